"""Shards that hold their own rows in another order: which shards, by which rule, and what is said of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.check.checking import by_index, found_of

if TYPE_CHECKING:
    from pathlib import Path


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


def test_an_order_that_begins_late_is_listed_from_where_it_does(tmp_path: Path) -> None:
    index = [*range(20), 40, *range(21, 40), 20, *range(41, 64)]
    assert "in the order 0 ... 19 40 21 22" in found_of(tmp_path, by_index(index), "[64/tp, 2]", "tp=4").summary
