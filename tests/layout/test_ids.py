"""Shards are read as index ranges, and nothing that is no product passes for one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardviz.layout.region import BLOCK, Region, merge_ranges, region_of
from tests.lanes import cases


@st.composite
def regions(draw: st.DrawFn) -> tuple[tuple[int, ...], Region]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    dims = []
    for size in shape:
        picked = draw(st.permutations(range(size)))[: draw(st.integers(1, size))]
        dims.append(merge_ranges((index, index + 1) for index in picked))
    return shape, Region(tuple(dims))


@cases(200)
@given(regions(), st.sampled_from([np.int64, np.float64, np.float32]), st.integers(1, 1000))
def test_a_product_of_ranges_is_read_back(made: tuple[tuple[int, ...], Region], dtype: type, first: int) -> None:
    shape, region = made
    assert region_of((region.flat_ids(shape) + first).astype(dtype), shape, first) == region


@pytest.mark.parametrize("wrong", [0, -1, 7, 10_000, np.nan, np.inf, 3.5])
@pytest.mark.parametrize("at", [(0, 0), (1, 2), (3, 3)])
def test_one_wrong_element_is_no_product(wrong: float, at: tuple[int, int]) -> None:
    ids = np.arange(1.0, 17).reshape(4, 4)
    ids[at] = wrong
    if ids[at] != 1 + 4 * at[0] + at[1]:
        assert region_of(ids, (4, 4)) is None


def test_a_wrong_element_beyond_the_first_block_is_seen() -> None:
    ids = np.arange(1, 4 * BLOCK + 1).reshape(4, BLOCK)
    assert region_of(ids, ids.shape) == Region.whole(ids.shape)
    ids[3, BLOCK - 2] = 1
    assert region_of(ids, ids.shape) is None


def test_a_long_line_in_two_pieces_is_two_ranges() -> None:
    ids = np.concatenate([np.arange(5, 3 * BLOCK), np.arange(1, 4)])
    assert region_of(ids, (3 * BLOCK,)) == Region((((4, 3 * BLOCK - 1), (0, 3)),))


def test_a_scalar_is_its_own_region() -> None:
    assert region_of(np.array(7), (), 7) == Region(())
    assert region_of(np.array(8), (), 7) is None
