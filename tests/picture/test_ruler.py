"""A ruler shows every index, in order, and never two blocks in one cell where it has room for them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardviz.picture.text.paint import Ruler


@st.composite
def edges(draw: st.DrawFn) -> np.ndarray:
    size = draw(st.integers(1, 400))
    return np.array(sorted({0, size, *draw(st.lists(st.integers(1, size), max_size=30))}), np.int64)


@given(edges(), st.integers(3, 120), st.integers(1, 6))
def test_a_fitted_ruler_fits_and_shows_every_index_once_in_order(edges: np.ndarray, room: int, most: int) -> None:
    ruler = Ruler.fitted(edges, room, most)
    assert 0 < ruler.extent <= room
    shown = [tuple(span) for span in ruler.spans(0, room).tolist() if span[0] < span[1]]
    indices = [index for start, stop in dict.fromkeys(shown) for index in range(start, stop)]
    assert indices == list(range(int(edges[-1])))


@given(edges(), st.integers(1, 50), st.integers(0, 399))
def test_the_cell_of_an_index_covers_it(edges: np.ndarray, each: int, index: int) -> None:
    ruler = Ruler.scaled(edges, each)
    index %= ruler.size
    start, stop = ruler.spans(ruler.cell_of(index), 1)[0]
    assert start <= index < stop


@given(edges(), st.integers(3, 120), st.integers(1, 6), st.integers(0, 399))
def test_the_cells_of_an_index_on_a_fitted_ruler_cover_it_and_no_others_do(
    edges: np.ndarray, room: int, most: int, index: int
) -> None:
    ruler = Ruler.fitted(edges, room, most)
    index %= ruler.size
    spans = ruler.spans(0, ruler.extent).tolist()
    covering = [cell for cell, (start, stop) in enumerate(spans) if start <= index < stop]
    assert covering == list(range(ruler.cell_of(index), ruler.cell_of(index) + ruler.cells_of(index)))


@pytest.mark.parametrize("size", [12, 24, 31, 100, 128_256])
@pytest.mark.parametrize("room", [20, 47, 61])
def test_a_map_fills_its_room(size: int, room: int) -> None:
    ruler = Ruler.fitted(np.array([0, size // 4, size // 2, size]), room, 64)
    assert room - 3 <= ruler.extent <= room


def test_more_parts_than_room_are_shown_by_the_blocks_that_they_are_in() -> None:
    parts, blocks = np.arange(0, 1025), np.arange(0, 1025, 128)
    ruler = Ruler.fitted(parts, 40, outer=[np.array([0, 512, 1024]), blocks])
    assert ruler.lines
    assert np.array_equal(ruler.edges, np.arange(0, 1025, 64))
    few = Ruler.fitted(parts, 12, outer=[np.array([0, 512, 1024]), blocks])
    assert np.array_equal(few.edges, [0, 256, 512, 768, 1024])


def test_blocks_are_framed_by_lines_where_there_is_room() -> None:
    ruler = Ruler.fitted(np.array([0, 4, 6]), 9)
    assert ruler.spans(0, 99).tolist() == [[0, 0], [0, 1], [1, 2], [2, 3], [3, 4], [4, 4], [4, 5], [5, 6], [6, 6]]


def test_a_part_of_the_ruler_is_the_same_as_that_part_of_all_of_it() -> None:
    ruler = Ruler.scaled(np.arange(0, 128_257, 167), 40)
    assert np.array_equal(ruler.spans(1_000, 50), ruler.spans(0, ruler.extent)[1_000:1_050])


@pytest.mark.parametrize("blocks", [1024, 128_256])
def test_more_blocks_than_room_are_drawn_as_groups_of_equally_many(blocks: int) -> None:
    edges = np.linspace(0, 128_256, blocks + 1).astype(np.int64)
    ruler = Ruler.fitted(edges, 40)
    assert 10 < len(ruler.edges) <= 20
    assert ruler.extent <= 40
    counts = np.diff(np.searchsorted(edges, ruler.edges))
    assert len({*counts[:-1].tolist()}) == 1
    assert counts[-1] <= counts[0]


@pytest.mark.parametrize("room", range(4, 40))
def test_equal_blocks_have_equal_heights(room: int) -> None:
    ruler = Ruler.fitted(np.array([0, 4, 8, 12, 16]), room, 64)
    assert len({*ruler.stretched}) == 1


@pytest.mark.parametrize("room", range(8, 40))
def test_of_unequal_blocks_the_larger_is_at_least_as_high(room: int) -> None:
    assert (counts := Ruler.fitted(np.array([0, 3, 6, 9, 10]), room, 64).stretched)[0] == counts[1] == counts[2]
    assert counts[0] >= counts[3] >= 1


def test_a_dim_of_size_zero_has_no_cells() -> None:
    assert Ruler.fitted(np.array([0], np.int64), 20).extent == 0


def test_a_block_too_small_for_its_share_takes_a_cell_of_the_largest() -> None:
    ruler = Ruler.fitted(np.array([0, 8, 8192], np.int64), 12)
    assert (ruler.extent, ruler.lines) == (12, True)
    assert ruler.stretched == (1, 8)
