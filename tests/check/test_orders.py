"""Orders that are regular get the rule they follow: per group, per shard, per copy, per slice, over flattened axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardviz.check.order.infer.orders import as_text, name_order, period_of
from tests.check.checking import by_index, found_of

if TYPE_CHECKING:
    from pathlib import Path


def grouped(order: list[int], groups: int) -> list[int]:
    return [group * len(order) + place for group in range(groups) for place in order]


@pytest.mark.parametrize(
    ("order", "groups", "words"),
    [
        ([2, 0, 3, 1], 6, "within every 4 indices, dim 0 comes in the order [2, 0, 3, 1]"),
        ([2, 3, 0, 1], 4, "within every 4 indices, dim 0's halves are exchanged"),
        ([4, 5, 0, 1, 2, 3], 2, "within every 6 indices, dim 0 is rolled by 2"),
        ([4, 5, 0, 1, 6, 7, 2, 3], 3, "blocks of 2 come in the order [2, 0, 3, 1]"),
    ],
)
def test_the_same_order_in_every_head_is_reported_once(
    tmp_path: Path, order: list[int], groups: int, words: str
) -> None:
    index = grouped(order, groups)
    found = found_of(tmp_path, by_index(index), f"[{len(index)}/tp, 2]", "tp=1")
    assert words in found.summary
    assert "no simple rule" not in found.cause


def test_the_fix_of_an_order_in_groups_undoes_it() -> None:
    index = grouped([2, 0, 3, 1], 3)
    cause, _ = name_order(np.array(index), 0)
    assert "index_select(1, torch.tensor([1, 3, 0, 2]))" in cause.fix
    content = np.array(index).reshape(-1, 4)[:, [1, 3, 0, 2]].ravel()
    assert content.tolist() == list(range(12))


def test_an_order_in_groups_as_long_as_the_shards_says_that_they_are(tmp_path: Path) -> None:
    found = found_of(tmp_path, by_index(grouped([4, 1, 5, 0, 3, 2], 4)), "[24/tp, 2]", "tp=4")
    assert "within every 6 indices (the shard of a rank)" in found.summary


@pytest.mark.parametrize(("count", "block", "start"), [(12, 1, 0), (12, 2, 0), (16, 3, 1), (110, 1, 0)])
def test_numbers_sorted_as_text_are_recognized(count: int, block: int, start: int) -> None:
    blocks = [int(name) - start for name in sorted(map(str, range(start, start + count)))]
    assert as_text(np.array([block * at + inner for at in blocks for inner in range(block)])) == block


def test_no_other_order_is_one_of_text() -> None:
    assert as_text(np.array([0, 1, 3, 2])) is None
    assert as_text(np.array([0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 9, 8])) is None
    assert period_of(np.arange(12)[::-1]) == 12
