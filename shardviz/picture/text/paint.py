"""A viewport of a map as characters and looks: blocks to scale, the lines between them, the ranks written in them.

What is painted is a grid of cells, each with one character and one look; colours are the renderer's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal

import numpy as np

from shardviz.picture.model.holders import ranks_of, ranks_text
from shardviz.picture.model.palette import rank_colour

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.picture.model.holders import Mask, Plane
    from shardviz.picture.model.ruler import Ruler
    from shardviz.picture.model.sides import Cell, Sides

    Indices = NDArray[np.int64]
    Flags = NDArray[np.bool_]
    Chars = NDArray[np.str_]

Side = Literal["claimed", "held", "difference"]
Tone = Literal["held", "in place", "elsewhere", "mixed", "nobody", "unlit"]

OUTSIDE = -1
LINE = -2
BOX = " ╵╷│╴┘┐┤╶└┌├─┴┬┼"
"""Box-drawing characters by their arms: 1 up, 2 down, 4 left, 8 right."""


@dataclass(frozen=True)
class Look:
    """How cells with the same holders look.

    Attributes:
        labels: What is written in a block of them, the longest that fits.
        tone: What they tell.
        rank: The lowest rank that holds them; -1 for nobody.
        colour: The place of its colour in the palette of ranks; -1 for nobody.
    """

    labels: tuple[str, ...]
    tone: Tone
    rank: int
    colour: int


@dataclass(frozen=True)
class Frame:
    """A tensor's map at one scale.

    Attributes:
        sides: Who holds what.
        side: Which of the two descriptions is drawn, or where they differ.
        plane: The dims drawn.
        rows: The ruler downwards.
        cols: The ruler to the right.
        ids: Whether single ids are written instead of ranks.
        suffix: What a label says of copies and pending sums.
        lit: A rank whose blocks alone stand out; None for all.
    """

    sides: Sides
    side: Side
    plane: Plane
    rows: Ruler
    cols: Ruler
    ids: bool = False
    suffix: str = ""
    lit: int | None = None


@dataclass(frozen=True)
class Painted:
    """A painted viewport.

    Attributes:
        chars: One string a row.
        looks: For each cell an index into `of`, `LINE` or `OUTSIDE`; shape (rows, columns).
        of: The looks.
    """

    chars: tuple[str, ...]
    looks: Indices
    of: tuple[Look, ...]


def paint(frame: Frame, top: int, left: int, height: int, width: int) -> Painted:
    """Paint the cells from (top, left) on; cells beyond the map are left out."""
    row_spans, above, below = _around(frame.rows, top, height)
    col_spans, before, after = _around(frame.cols, left, width)
    window = frame.sides.holders.window(frame.plane, row_spans, col_spans)
    looks: dict[Look, int] = {}
    look_of = [
        looks.setdefault(look_of_cell(frame, frame.sides.cell(masks)), len(looks)) if masks else OUTSIDE
        for masks in window.masks
    ]
    padded = np.full((len(row_spans) + 1, len(col_spans) + 1), OUTSIDE)
    padded[1:, 1:] = np.array(look_of, np.int64)[window.codes]
    corners = [padded[down[:, None], right] for down in (above, below) for right in (before, after)]
    arms = _arms(*corners)
    grid = np.where(arms > 0, LINE, corners[3])
    chars = np.array(list(BOX))[arms]
    data_rows, data_cols = above == below, before == after
    if frame.ids:
        _write_ids(chars, frame, row_spans[above[data_rows] - 1, 0], np.flatnonzero(data_rows), left)
        _write_on_rules(chars, grid, list(looks))
    else:
        _write_labels(chars, grid, data_rows, data_cols, list(looks))
    return Painted(tuple(map("".join, chars.tolist())), grid, tuple(looks))


def look_of_cell(frame: Frame, cell: Cell) -> Look:
    """Say how a cell looks on the side that is drawn."""
    claimed, held = ranks_text(cell.claimed), ranks_text(cell.held)
    if frame.side == "difference":
        if cell.different:
            path = (f"{claimed or '?'}→{held or '?'}", "≠") if not cell.claimed_mixed | cell.held_mixed else ("≠",)
            return _look(frame, path, "elsewhere", cell.held)
        return _look(frame, (claimed or held, "="), "in place", cell.claimed)
    mask, text = (cell.claimed, claimed) if frame.side == "claimed" else (cell.held, held)
    if frame.lit is not None and not mask >> frame.lit & 1:
        return _look(frame, (), "unlit", mask)
    if not mask:
        return _look(frame, ("nobody", "?"), "nobody", mask)
    mixed = cell.claimed_mixed if frame.side == "claimed" else cell.held_mixed
    named = (f"{text} {frame.suffix}", text) if frame.suffix else (text,)
    short = (f"{ranks_of(mask)[0]}…",) if len(text) > 2 else ()
    return _look(frame, (*named, *short), "mixed" if mixed else "held", mask)


def _look(frame: Frame, labels: tuple[str, ...], tone: Tone, mask: Mask) -> Look:
    if not mask:
        return Look(labels, tone, -1, -1)
    rank = ranks_of(mask)[0]
    return Look(labels, tone, rank, rank_colour(rank, frame.sides.mesh))


def _around(ruler: Ruler, first: int, count: int) -> tuple[Indices, Indices, Indices]:
    """Find what lies on each side of a cell: itself where it covers indices, its neighbours where it is a line.

    Returns:
        The spans of the cells that cover indices, and for each cell wanted two numbers into them, counted from 1: the
        one at or before it and the one at or behind it. 0 is outside.
    """
    begin = max(first - 1, 0)
    spans = ruler.spans(begin, first - begin + count + 1)
    covers = spans[:, 0] < spans[:, 1]
    before = np.cumsum(covers, dtype=np.int64)
    after: Indices = np.where(covers, before, before + 1)
    after[after > covers.sum()] = 0
    own = slice(first - begin, first - begin + count)
    return spans[covers], before[own], after[own]


def _arms(above_left: Indices, above_right: Indices, below_left: Indices, below_right: Indices) -> Indices:
    up, down = above_left != above_right, below_left != below_right
    left, right = above_left != below_left, above_right != below_right
    arms: Indices = up + 2 * down + 4 * left + 8 * right
    return arms


def _write_labels(chars: Chars, grid: Indices, data_rows: Flags, data_cols: Flags, looks: list[Look]) -> None:
    """Write each block's label into its middle, on the middle one of the rows that look alike."""
    same = [row.tobytes() for row in grid[:, data_cols]]
    rows = [(same[row], row) for row in np.flatnonzero(data_rows).tolist()]
    for _, alike in groupby(rows, key=lambda pair: pair[0]):
        block = [row for _, row in alike]
        middle = block[len(block) // 2]
        start = 0
        for look, run in groupby(grid[middle].tolist()):
            length = len(list(run))
            if look >= 0 and (label := _fitting(looks[look].labels, length)):
                at = start + (length - len(label)) // 2
                chars[middle, at : at + len(label)] = list(label)
            start += length


def _fitting(labels: tuple[str, ...], room: int) -> str:
    return next((label for label in labels if len(label) <= room), "")


def _write_ids(chars: Chars, frame: Frame, rows: Indices, at: Indices, left: int) -> None:
    width = chars.shape[1]
    first = frame.cols.spans(left, width)
    starts = sorted({int(start) for start, stop in first.tolist() if start < stop})
    for row, line in zip(rows.tolist(), at.tolist(), strict=True):
        for col in starts:
            text = str(flat_id(frame, row, col)).rjust(frame.cols.cells - 1)
            begin = frame.cols.cell_of(col) - left
            low, high = max(begin, 0), min(begin + len(text), width)
            chars[line, low:high] = list(text[low - begin : high - begin])


def _write_on_rules(chars: Chars, grid: Indices, looks: list[Look]) -> None:
    """Write the labels of blocks whose insides are taken by ids into the rules above them."""
    for row in range(len(grid) - 1):
        start = 0
        for (look, ruled), run in groupby(zip(grid[row + 1].tolist(), (chars[row] == "─").tolist(), strict=True)):
            length = len(list(run))
            if ruled and look >= 0 and (label := _fitting(looks[look].labels, length - 2)):
                at = start + (length - len(label)) // 2
                chars[row, at - 1 : at + len(label) + 1] = list(f" {label} ")
            start += length


def flat_id(frame: Frame, row: int, col: int) -> int:
    """Return the id, from 1 within the tensor, of the element at a place of the plane."""
    index = list(frame.plane.at)
    index[frame.plane.rows], index[frame.plane.cols] = row, col
    found = 0
    for at, size in zip(index, frame.sides.holders.shape, strict=True):
        found = found * size + at
    return found + 1
