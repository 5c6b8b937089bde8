"""The scales at which a tensor is drawn, from the whole to single ids, and the steps of a cursor on each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from shardviz.picture.model.nest import nest, parts_of_claim
from shardviz.picture.model.ruler import Ruler

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.picture.model.holders import Holders, Plane
    from shardviz.picture.model.sides import Sides
    from shardviz.picture.text.paint import Frame, Side


LEAST_PART, LEAST_BLOCK = 3, 11
"""Columns that a part needs to be drawn by itself, and that a block of several needs for its name."""

TALLEST = 3
"""Lines of a block where it is the only one, or all are stretches of a line."""

MOST_CELLS = 64
"""At most so many cells per index, where the whole tensor is smaller than its room."""


@dataclass(frozen=True, eq=False)
class Zoom:
    """The scales of one tensor on one plane. Level 0 is the whole tensor; each level halves the indices per cell.

    Attributes:
        sides: Who holds the tensor.
        plane: The dims drawn.
        side: Which side is drawn: where not all of its parts can be, its blocks are.
    """

    sides: Sides
    plane: Plane
    side: Side = "claimed"

    @property
    def holders(self) -> Holders:
        """Who holds the tensor, on both sides."""
        return self.sides.holders

    @property
    def height(self) -> int:
        """How many indices run downwards."""
        return self.holders.shape[self.plane.rows]

    @property
    def width(self) -> int:
        """How many indices run to the right."""
        return self.holders.shape[self.plane.cols]

    def rulers(self, level: int, height: int, width: int) -> tuple[Ruler, Ruler, bool]:
        """Return the rulers downwards and to the right for a room of cells, and whether ids are written."""
        return _rulers(self.sides, self.plane.rows, self.plane.cols, self.side, level, height, width)

    def deepest(self, height: int, width: int) -> int:
        """Return the level at which single ids are written."""
        return _deepest(self.sides, self.plane.rows, self.plane.cols, self.side, height, width)

    def moved(self, frame: Frame, place: tuple[int, ...], down: int, right: int) -> tuple[int, ...]:
        """Return the place some cells further on; at the edge it stays."""
        reached = list(place)
        for dim, ruler, step in ((self.plane.rows, frame.rows, down), (self.plane.cols, frame.cols, right)):
            reached[dim] = _stepped(ruler, place[dim], step) if step else place[dim]
        return tuple(reached)

    def paged(self, frame: Frame, place: tuple[int, ...], cells: int) -> int:
        """Return the row that is some cells of the screen further down."""
        ruler = frame.rows
        cell = min(max(ruler.cell_of(place[self.plane.rows]) + cells, 0), ruler.extent - 1)
        return min(int(ruler.spans(cell, 1)[0, 0]), self.height - 1)

    def jumped(self, place: tuple[int, ...], down: int, right: int) -> tuple[int, ...]:
        """Return the first element of the next or the previous block."""
        reached = list(place)
        for dim, step in ((self.plane.rows, down), (self.plane.cols, right)):
            if step:
                edges = _edges(self.holders, dim)
                block = int(np.searchsorted(edges, place[dim], side="right")) - 1 + step
                reached[dim] = int(edges[min(max(block, 0), len(edges) - 2)])
        return tuple(reached)

    def block(self, place: tuple[int, ...]) -> list[tuple[int, int]]:
        """Return the index ranges of the block that has an element, one per dim; of a dim not drawn, one index."""
        ranges = [(at, at + 1) for at in place]
        for dim in (self.plane.rows, self.plane.cols):
            ranges[dim] = Ruler(_edges(self.holders, dim)).block_of(place[dim])
        return ranges


def _stepped(ruler: Ruler, index: int, step: int) -> int:
    """Go to the next span of a ruler, over lines and further cells of the same index."""
    cell, span = ruler.cell_of(index), (index, index)
    here = tuple(ruler.spans(cell, 1)[0].tolist())
    while 0 <= (cell := cell + step) < ruler.extent:
        span = tuple(ruler.spans(cell, 1)[0].tolist())
        if span[0] < span[1] and span != here:
            return int(span[0])
    return index


@lru_cache(maxsize=256)
def _edges(holders: Holders, dim: int) -> NDArray[np.int64]:
    return holders.edges(dim)


@lru_cache(maxsize=256)
def _rulers(
    sides: Sides, down: int, right: int, side: Side, level: int, height: int, width: int
) -> tuple[Ruler, Ruler, bool]:
    if not level:
        cols = Ruler.fitted(
            _edges(sides.holders, right), width, MOST_CELLS, _blocks(sides, right, side), (LEAST_PART, LEAST_BLOCK)
        )
        return _fitted_rows(sides, down, side, height, is_line=cols.size == 1), cols, False
    if level >= _deepest(sides, down, right, side, height, width):
        digits = len(str(math.prod(sides.holders.shape) - 1))
        return _scaled(sides, down, side, 1), _scaled(sides, right, side, 1, digits + 1), True
    rows, cols, _ = _rulers(sides, down, right, side, 0, height, width)
    each = [max(ruler.each >> level, 1) for ruler in (rows, cols)]
    return _scaled(sides, down, side, each[0]), _scaled(sides, right, side, each[1]), False


def _fitted_rows(sides: Sides, dim: int, side: Side, height: int, *, is_line: bool) -> Ruler:
    """Return the ruler downwards for the whole tensor: one block needs few lines, and so do those of a line."""
    edges = _edges(sides.holders, dim)
    blocks = len(edges) - 1
    if is_line or blocks == 1:
        height = min(height, blocks * (TALLEST + 1) + 1)
    rows = Ruler.fitted(edges, height, MOST_CELLS, _blocks(sides, dim, side))
    if rows.lines or rows.extent < height or height <= blocks:
        return rows
    return Ruler.fitted(edges, height - 1, MOST_CELLS, _blocks(sides, dim, side))  # the last line names the end


def _scaled(sides: Sides, dim: int, side: Side, each: int, cells: int = 1) -> Ruler:
    """Return a ruler at one scale, with the finest blocks that are not tiny there."""
    levels = (*_blocks(sides, dim, side), _edges(sides.holders, dim))
    fitting = (edges for edges in reversed(levels) if (len(edges) - 1) * each <= 2 * int(edges[-1]) * cells)
    return Ruler.scaled(next(fitting, levels[-1]), each, cells)


@lru_cache(maxsize=256)
def _blocks(sides: Sides, dim: int, side: Side) -> tuple[NDArray[np.int64], ...]:
    """Return the edges of blocks, coarsest first: of the drawn side; where two are compared, of who should hold it."""
    levels = nest(sides, dim, held=side == "held")
    if side != "difference" or not sides.is_compared:
        return levels
    finest = parts_of_claim(sides, dim)
    return (*levels, finest) if len(finest) < len(_edges(sides.holders, dim)) else levels


@lru_cache(maxsize=256)
def _deepest(sides: Sides, down: int, right: int, side: Side, height: int, width: int) -> int:
    rows, cols, _ = _rulers(sides, down, right, side, 0, height, width)
    return max(rows.each, cols.each).bit_length()
