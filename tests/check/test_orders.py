"""Orders that are regular get the rule they follow: per group, per shard, per copy, per slice, over flattened axes."""

from __future__ import annotations

import numpy as np
import pytest

from shardviz.check.order.infer.orders import as_text, name_order, period_of


def grouped(order: list[int], groups: int) -> list[int]:
    return [group * len(order) + place for group in range(groups) for place in order]


def test_the_fix_of_an_order_in_groups_undoes_it() -> None:
    index = grouped([2, 0, 3, 1], 3)
    cause, _ = name_order(np.array(index), 0)
    assert "index_select(1, torch.tensor([1, 3, 0, 2]))" in cause.fix
    content = np.array(index).reshape(-1, 4)[:, [1, 3, 0, 2]].ravel()
    assert content.tolist() == list(range(12))


@pytest.mark.parametrize(("count", "block", "start"), [(12, 1, 0), (12, 2, 0), (16, 3, 1), (110, 1, 0)])
def test_numbers_sorted_as_text_are_recognized(count: int, block: int, start: int) -> None:
    blocks = [int(name) - start for name in sorted(map(str, range(start, start + count)))]
    assert as_text(np.array([block * at + inner for at in blocks for inner in range(block)])) == block


@pytest.mark.parametrize(("size", "block"), [(52, 5), (70, 6)])
def test_the_last_of_the_blocks_may_be_shorter(size: int, block: int) -> None:
    starts = sorted(range(0, size, block), key=lambda start: str(start // block))
    order = np.array([at for start in starts for at in range(start, min(start + block, size))])
    assert as_text(order) == block
    assert as_text(np.roll(order, block)) is None


def test_no_other_order_is_one_of_text() -> None:
    assert as_text(np.array([0, 1, 3, 2])) is None
    assert as_text(np.array([0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 9, 8])) is None
    assert period_of(np.arange(12)[::-1]) == 12
