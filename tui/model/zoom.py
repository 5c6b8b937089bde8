"""The scales at which a tensor is drawn, from the whole to single ids, and the steps of a cursor on each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from shardviz.picture.model.ruler import Ruler

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.picture.model.holders import Holders, Plane
    from shardviz.picture.text.paint import Frame

MOST_ROWS = 2
MOST_COLS = 4
"""At most so many cells per index, where the whole tensor is smaller than its room."""


@dataclass(frozen=True, eq=False)
class Zoom:
    """The scales of one tensor on one plane. Level 0 is the whole tensor; each level halves the indices per cell.

    Attributes:
        holders: Who holds the tensor.
        plane: The dims drawn.
    """

    holders: Holders
    plane: Plane

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
        return _rulers(self.holders, self.plane.rows, self.plane.cols, level, height, width)

    def deepest(self, height: int, width: int) -> int:
        """Return the level at which single ids are written."""
        return _deepest(self.holders, self.plane.rows, self.plane.cols, height, width)

    def moved(self, frame: Frame, place: tuple[int, ...], down: int, right: int) -> tuple[int, ...]:
        """Return the place some cells further on; at the edge it stays."""
        found = list(place)
        for dim, ruler, step in ((self.plane.rows, frame.rows, down), (self.plane.cols, frame.cols, right)):
            found[dim] = _stepped(ruler, place[dim], step) if step else place[dim]
        return tuple(found)

    def paged(self, frame: Frame, place: tuple[int, ...], cells: int) -> int:
        """Return the row that is some cells of the screen further down."""
        ruler = frame.rows
        cell = min(max(ruler.cell_of(place[self.plane.rows]) + cells, 0), ruler.extent - 1)
        return min(int(ruler.spans(cell, 1)[0, 0]), self.height - 1)

    def jumped(self, place: tuple[int, ...], down: int, right: int) -> tuple[int, ...]:
        """Return the first element of the next or the previous block."""
        found = list(place)
        for dim, step in ((self.plane.rows, down), (self.plane.cols, right)):
            if step:
                edges = _edges(self.holders, dim)
                block = int(np.searchsorted(edges, place[dim], side="right")) - 1 + step
                found[dim] = int(edges[min(max(block, 0), len(edges) - 2)])
        return tuple(found)

    def block(self, place: tuple[int, ...]) -> list[tuple[int, int]]:
        """Return the index ranges of the block that has an element, one per dim; of a dim not drawn, one index."""
        found = [(at, at + 1) for at in place]
        for dim in (self.plane.rows, self.plane.cols):
            found[dim] = Ruler(_edges(self.holders, dim)).block_of(place[dim])
        return found


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
def _rulers(holders: Holders, down: int, right: int, level: int, height: int, width: int) -> tuple[Ruler, Ruler, bool]:
    rows = Ruler.fitted(_edges(holders, down), height, MOST_ROWS)
    cols = Ruler.fitted(_edges(holders, right), width, MOST_COLS)
    if not level:
        return rows, cols, False
    if level >= _deepest(holders, down, right, height, width):
        digits = len(str(math.prod(holders.shape) - 1))
        return Ruler.scaled(_edges(holders, down), 1), Ruler.scaled(_edges(holders, right), 1, digits + 1), True
    halved = [
        Ruler.scaled(_edges(holders, dim), max(ruler.each >> level, 1), ruler.cells)
        for dim, ruler in ((down, rows), (right, cols))
    ]
    return halved[0], halved[1], False


@lru_cache(maxsize=256)
def _deepest(holders: Holders, down: int, right: int, height: int, width: int) -> int:
    rows, cols, _ = _rulers(holders, down, right, 0, height, width)
    return max(rows.each, cols.each).bit_length()
