"""The scales at which a tensor is drawn, from the whole to single ids, and the steps of a cursor on each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from shardviz.picture.model.drawing import nest, parts_of_claim
from shardviz.picture.text.paint import Ruler

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.picture.model.holders import Holders, Plane
    from shardviz.picture.model.sides import Sides
    from shardviz.picture.text.paint import Frame, Side


LEAST_PART, LEAST_BLOCK = 3, 11
"""Columns that a part needs to be drawn by itself, and that a block of several needs for its name."""

TALLEST = 3
"""Lines of a block if it is the only one, or all are stretches of a line."""

MOST_CELLS = 64
"""At most so many cells per index, if the whole tensor is smaller than its room."""


@dataclass(frozen=True, eq=False)
class Zoom:
    """The scales of one tensor on one plane. Level 0 is the whole tensor; each level halves the indices per cell.

    Attributes:
        side: Which side is drawn: where not all of its parts can be, its blocks are.
    """

    sides: Sides
    plane: Plane
    side: Side = "claimed"

    @property
    def dims(self) -> tuple[int, int]:
        """The dims drawn, downwards and to the right."""
        return self.plane.rows, self.plane.cols

    @property
    def height(self) -> int:
        """How many indices run downwards."""
        return self.sides.holders.shape[self.plane.rows]

    @property
    def width(self) -> int:
        """How many indices run to the right."""
        return self.sides.holders.shape[self.plane.cols]

    def rulers(self, level: int, height: int, width: int) -> tuple[Ruler, Ruler, bool]:
        """Return the rulers downwards and to the right for a room of cells, and whether ids are written."""
        return _rulers(self.sides, *self.dims, self.side, level, height, width)

    def deepest(self, height: int, width: int) -> int:
        """Return the level at which single ids are written."""
        return _deepest(self.sides, *self.dims, self.side, height, width)

    def placed(self, row: int, col: int) -> tuple[int, ...]:
        """Return the element at a row and a column, with the other dims as they are."""
        at = {self.plane.rows: row, self.plane.cols: col}
        return tuple(at.get(dim, index) for dim, index in enumerate(self.plane.at))

    def moved(self, frame: Frame, down: int, right: int) -> tuple[int, ...]:
        """Return the element some cells further on; at the edge it stays."""
        row, col = self.plane.at[self.plane.rows], self.plane.at[self.plane.cols]
        return self.placed(_stepped(frame.rows, row, down), _stepped(frame.cols, col, right))

    def paged(self, frame: Frame, cells: int) -> int:
        """Return the row that is some cells of the screen further down."""
        cell = min(max(frame.rows.cell_of(self.plane.at[self.plane.rows]) + cells, 0), frame.rows.extent - 1)
        return min(int(frame.rows.spans(cell, 1)[0, 0]), self.height - 1)

    def jumped(self, down: int, right: int) -> tuple[int, ...]:
        """Return the first element of the next or the previous block."""
        reached = []
        for dim, step in zip(self.dims, (down, right), strict=True):
            edges, at = _edges(self.sides.holders, dim), self.plane.at[dim]
            block = int(np.searchsorted(edges, at, side="right")) - 1 + step
            reached.append(int(edges[min(max(block, 0), len(edges) - 2)]) if step else at)
        return self.placed(*reached)

    def block(self) -> list[tuple[int, int]]:
        """Return the index ranges of the block under the cursor, one per dim; of a dim not drawn, one index."""
        edges = {dim: Ruler(_edges(self.sides.holders, dim)) for dim in self.dims}
        return [edges[dim].block_of(at) if dim in edges else (at, at + 1) for dim, at in enumerate(self.plane.at)]


def _stepped(ruler: Ruler, index: int, step: int) -> int:
    """Go to the next span of a ruler, over lines and further cells of the same index."""
    cell = ruler.cell_of(index)
    here = tuple(ruler.spans(cell, 1)[0].tolist())
    while step and 0 <= (cell := cell + step) < ruler.extent:
        start, stop = ruler.spans(cell, 1)[0].tolist()
        if start < stop and (start, stop) != here:
            return int(start)
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
    """Return the edges of blocks, coarsest first: of the drawn side; if two are compared, of who should hold it."""
    levels = nest(sides, dim, held=side == "held")
    if side != "difference" or not sides.is_compared:
        return levels
    finest = parts_of_claim(sides, dim)
    return (*levels, finest) if len(finest) < len(_edges(sides.holders, dim)) else levels


@lru_cache(maxsize=256)
def _deepest(sides: Sides, down: int, right: int, side: Side, height: int, width: int) -> int:
    rows, cols, _ = _rulers(sides, down, right, side, 0, height, width)
    return max(rows.each, cols.each).bit_length()


def row_name(frame: Frame, at: int, row: int, span: tuple[int, int], *, every: bool) -> tuple[str, bool]:
    """Name a row of the screen, and say whether the cursor, which is `at` a row of the tensor, is on it.

    A block is named at its first row, the end on the last line, and `every` row if that is asked. What the row
    covers is its span; start and stop are equal on a line.
    """
    start, stop = span
    size = frame.rows.size
    if size == 1:
        return "", False
    if start == stop:
        return (str(size), False) if row == frame.rows.extent - 1 else ("", False)
    is_first = row == frame.rows.cell_of(start)
    begins = is_first and frame.rows.block_of(start)[0] == start
    is_named = (is_first and (every or frame.ids)) or begins
    return (str(start) if is_named else ""), is_named and start <= at < max(stop, start + 1)


def column_names(frame: Frame, at: int, left: int, width: int) -> tuple[str, str, str]:
    """Name the columns at their first cells, the ends before the others; the cursor's is the middle text."""
    names = _columns(frame, left, width)
    line, bold = [" "] * width, range(0)
    for begin, text, start in sorted(names, key=lambda name: name is not names[0] and name is not names[-1]):
        cells = range(max(begin - 1, 0), min(begin + len(text) + 1, width))
        if all(line[cell] == " " for cell in cells):
            line[begin : begin + len(text)] = list(text)
            bold = range(begin, begin + len(text)) if start == at else bold
    text = "".join(line)
    return text[: bold.start], text[bold.start : bold.stop], text[bold.stop :]


def _columns(frame: Frame, left: int, width: int) -> list[tuple[int, str, int]]:
    """Return where the names of columns begin, the names, and the columns; of a line there are none."""
    if frame.cols.size == 1:
        return []
    cols, names, before = frame.cols, [], None
    for x, (start, stop) in enumerate(cols.spans(left, width).tolist()):
        is_every = before is None or frame.ids or not cols.lines
        is_named = start < stop and (is_every or cols.block_of(start)[0] == start)
        if (start, stop) != before and (is_named or start == stop == cols.size):
            names.append((max(min(x, width - len(str(start))), 0), str(start), start))
        before = (start, stop)
    return names


def cuts_label(text: str, cursor: tuple[int, int]) -> bool:
    """Whether an edge of the cursor lies on a label, or beside one."""
    low, high = cursor
    return bool((text[low : low + 2] + text[high - 2 : high]).strip(" │├┤┼"))


def pointed_at(text: str, cursor: tuple[int, int]) -> str:
    """Put the cursor's pointers at both ends of its columns, from one up to but not including the other."""
    low, high = cursor
    return text[:low] + "»" + text[low + 1 : high - 1] + "«" + text[high:]
