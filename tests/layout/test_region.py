"""Regions: the ids in them are those that numpy's own indexing gives."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardviz.layout.region import Range, Ranges, Region, index_of, indices, length, merge_ranges


def ranges_within(size: int) -> st.SearchStrategy[Ranges]:
    """Ranges in any order, overlapping or not: a shard may hold its rows in another order, or twice."""
    if not size:
        return st.just(())
    ends = st.integers(0, size - 1).flatmap(lambda start: st.tuples(st.just(start), st.integers(start + 1, size)))
    return st.lists(ends, max_size=4).map(tuple)


@st.composite
def shaped_regions(draw: st.DrawFn) -> tuple[tuple[int, ...], Region]:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    return shape, Region(tuple(draw(ranges_within(size)) for size in shape))


@given(shaped_regions())
def test_ids_are_those_of_numpy_indexing(case: tuple[tuple[int, ...], Region]):
    shape, region = case
    whole = np.arange(math.prod(shape)).reshape(shape)
    wanted = whole[np.ix_(*map(indices, region.dims))]
    found = region.flat_ids(shape)
    assert found.dtype == np.int64
    assert np.array_equal(found, wanted)
    assert region.shape == wanted.shape
    assert region.size == wanted.size


@given(st.lists(st.integers(0, 6), max_size=4))
def test_the_whole_of_a_tensor_has_every_id_once(shape: list[int]):
    assert Region.whole(shape).flat_ids(shape).ravel().tolist() == list(range(math.prod(shape)))


def test_a_scalar_is_a_region_of_one_element():
    scalar = Region.whole(())
    assert (scalar.shape, scalar.size, scalar.flat_ids(()).tolist(), str(scalar)) == ((), 1, 0, "[]")


def test_ids_beyond_thirty_two_bits_are_exact():
    region = Region((((1 << 20, (1 << 20) + 1),), ((5, 6),)))
    assert region.flat_ids((1 << 21, 1 << 21)).tolist() == [[(1 << 41) + 5]]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda ends: (min(ends), max(ends)))))
def test_merging_keeps_every_index_in_its_place(ranges: list[Range]):
    joined = merge_ranges(ranges)
    assert indices(joined).tolist() == [index for start, stop in ranges for index in range(start, stop)]
    assert length(joined) == sum(stop - start for start, stop in ranges)
    assert all(start < stop for start, stop in joined)
    assert all(before[1] != after[0] for before, after in pairwise(joined))


@pytest.mark.parametrize(
    ("region", "text"),
    [
        (Region((((0, 2),), ((0, 12),))), "[0:2, 0:12]"),
        (Region((((0, 2), (6, 8)), ((0, 12),))), "[0:2+6:8, 0:12]"),
        (Region(((), ((0, 12),))), "[empty]"),
    ],
)
def test_a_region_reads_as_slices(region: Region, text: str):
    assert str(region) == text


@given(st.lists(st.integers(1, 5), max_size=4).map(tuple))
def test_the_index_of_an_element_is_that_of_numpy_and_empty_for_a_scalar(shape: tuple[int, ...]) -> None:
    for element, index in enumerate(np.ndindex(shape)):
        assert index_of(element, shape) == list(index)
