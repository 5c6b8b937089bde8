"""Shards that hold their own rows in another order: which shards, by which rule, and what is said of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardviz.check.run import check_dump
from shardviz.dump.write import rank_file
from tests.check.checking import by_index, check_made, found_of, reordered

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ([2], "within shard [4:8], one of 3, dim 0 is reversed; the others are in order"),
        ([1, 3], "within shards [0:4], [8:12], 2 of 3, dim 0 is reversed; the other is in order"),
    ],
)
def test_a_shard_whose_rows_are_reversed_is_named_so(tmp_path: Path, odd: list[int], words: str) -> None:
    index = np.arange(12).reshape(3, 4)
    for number in odd:
        index[number - 1] = index[number - 1, ::-1]
    found = found_of(tmp_path, by_index(index.ravel().tolist()), "[12/tp, 2]", "tp=3")
    assert words in found.summary


@pytest.mark.parametrize(
    ("changed", "mesh", "words", "cause"),
    [
        (
            {14: 15, 15: 14},
            "tp=2",
            "shard [0:16], one of 2, dim 0's indices come in the order 0 ... 13 15 14",
            "this shard's ranks",
        ),
        (
            {3: 5, 5: 3},
            "tp=8",
            "within shard [0:8], one of 8, dim 0's indices come in the order 0 1 2 5",
            "this shard's ranks",
        ),
        (
            {5: 7, 7: 5, 26: 27, 27: 26},
            "dp=2,tp=2",
            "shards [0:8], [24:32], 2 of 4, dim 0 is reordered",
            "an index of its own",
        ),
        ({1: 2, 2: 1, 9: 10, 10: 9}, "tp=8", "within shards [0:4], [8:12], 2 of 8, dim 0", "by one rule"),
        ({1: 2, 2: 1, 17: 18, 18: 17}, "tp=2", "within every 16 indices (the shard of a rank)", "by the same index"),
    ],
)
def test_shards_in_order_beside_odd_ones_are_not_called_reordered(
    tmp_path: Path, changed: dict[int, int], mesh: str, words: str, cause: str
) -> None:
    rows = 64 if mesh == "tp=8" and 9 not in changed else 32
    claimed = f"[{rows}/dp/tp, 2]" if "dp" in mesh else f"[{rows}/tp, 2]"
    found = found_of(tmp_path, by_index([changed.get(row, row) for row in range(rows)]), claimed, mesh)
    assert words in found.summary
    assert cause in found.cause


@pytest.mark.parametrize(
    ("index", "claimed", "words"),
    [
        ([3, 2, 1, 0, 7, 6, 5, 4, 11, 10, 9, 8, 12], "[13/tp, 2]", "within every shard, dim 0 is reversed"),
        ([3, 0, 1, 2, 7, 4, 5, 6, 11, 8, 9, 10, 13, 12], "[14/tp, 2]", "within every shard, dim 0 is rolled by 1"),
        ([2, 3, 0, 1, 6, 7, 4, 5, 8, 9, 10, 11, 13, 12], "[14/tp, 2]", "of 4, dim 0's halves are exchanged"),
        (
            [2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 12, 13],
            "[15/tp, 2]",
            "within every shard, dim 0 is rolled by -2",  # three rows have no halves
        ),
        ([2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 13, 14, 12], "[15/tp, 2]", "within every shard, dim 0 is rolled by 2"),
        ([2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 12, 14, 13], "[15/tp, 2]", "by another order on each"),
        ([1, 2, 3, 0, 7, 4, 5, 6, 8, 9, 10, 11, 12, 13], "[14/tp, 2]", "by another order on each"),
    ],
)
def test_a_last_shard_that_is_shorter_follows_the_same_rule(
    tmp_path: Path, index: list[int], claimed: str, words: str
) -> None:
    assert words in found_of(tmp_path, by_index(index), claimed, "tp=4").summary


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ([*range(14), 15, 14, *range(16, 64)], "within shard [0:16], one of 3 that were read, dim 0's indices come"),
        (
            [16 * part + 15 - at for part in range(4) for at in range(16)],
            "within every shard that was read, dim 0 is reversed",
        ),
        ([63 - at for at in range(64)], "no known pattern fits"),
    ],
)
def test_shards_that_were_read_are_looked_at_without_the_others(tmp_path: Path, index: list[int], words: str) -> None:
    check_made(tmp_path, "tp=4", {"w": reordered(by_index(index), "[64/tp, 2]", "tp=4")})
    (tmp_path / "made.shardviz" / rank_file(3)).unlink()
    found = check_dump(tmp_path / "made.shardviz").findings[0]
    assert words in found.summary
    assert "no simple rule" not in found.cause


def test_an_order_that_begins_late_is_listed_from_where_it_does(tmp_path: Path) -> None:
    index = [*range(20), 40, *range(21, 40), 20, *range(41, 64)]
    assert "in the order 0 ... 19 40 21 22" in found_of(tmp_path, by_index(index), "[64/tp, 2]", "tp=4").summary


def test_uneven_shards_of_which_each_is_reversed_are_named_so(tmp_path: Path) -> None:
    index = [*range(4)[::-1], *range(4, 8)[::-1], *range(8, 10)[::-1]]
    found = found_of(tmp_path, by_index(index), "[10/tp, 2]", "tp=3")
    assert "within every shard, dim 0 is reversed" in found.summary


def test_shards_reordered_by_different_rules_are_not_called_reversed(tmp_path: Path) -> None:
    index = [3, 2, 1, 0, 5, 7, 4, 6, 8, 9, 10, 11]
    found = found_of(tmp_path, by_index(index), "[12/tp, 2]", "tp=3")
    assert "by another order on each" in found.summary
    assert "reversed" not in found.summary
