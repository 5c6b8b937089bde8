"""A viewport of a map as characters and looks: blocks to scale, the lines between them, the ranks written in them.

The result is a grid of cells, each with one character and one look; the renderer chooses the colours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from shardviz.picture.model.holders import ranks_of, ranks_text
from shardviz.picture.model.palette import rank_colour
from shardviz.picture.text.boxes import OUTSIDE, Cut, paint_boxes, runs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.picture.model.holders import Mask, Plane
    from shardviz.picture.model.ruler import Ruler
    from shardviz.picture.model.sides import Cell, Sides
    from shardviz.picture.text.boxes import Boxes

    Indices = NDArray[np.int64]
    Flags = NDArray[np.bool_]

Side = Literal["claimed", "held", "difference"]
Tone = Literal["held", "in place", "elsewhere", "mixed", "nobody", "unlit"]


@dataclass(frozen=True)
class Look:
    """How cells with the same holders look.

    Attributes:
        labels: Texts for a block of them, the longest first; the first that fits is written.
        tone: Whether they are in place.
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
        suffix: Added to labels for copies and pending sums.
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
        chars: One string per row.
        looks: For each cell an index into `of`, `LINE` or `OUTSIDE`; shape (rows, columns).
        of: The looks.
    """

    chars: tuple[str, ...]
    looks: Indices
    of: tuple[Look, ...]


def paint(frame: Frame, top: int, left: int, height: int, width: int) -> Painted:
    """Paint the cells from (top, left) on; cells beyond the map are left out."""
    row_spans, down = _cut(frame.rows, top, height)
    col_spans, across = _cut(frame.cols, left, width)
    window = frame.sides.holders.window(frame.plane, row_spans, col_spans)
    looks: dict[Look, int] = {}
    look_of = [
        looks.setdefault(look_of_cell(frame, frame.sides.cell(masks)), len(looks)) if masks else OUTSIDE
        for masks in window.masks
    ]
    boxes = paint_boxes(np.array(look_of, np.int64)[window.codes], down, across)
    if frame.ids:
        rows = row_spans[down.before[down.is_inside] - 1, 0]
        _write_ids(boxes, frame, rows, np.flatnonzero(down.is_inside), left)
        _write_on_rules(boxes, list(looks))
    else:
        _write_labels(boxes, down.is_inside, across.is_inside, list(looks))
    return Painted(tuple(map("".join, boxes.chars.tolist())), boxes.codes, tuple(looks))


def look_of_cell(frame: Frame, cell: Cell) -> Look:
    """Return the look of a cell on the drawn side."""
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


def _cut(ruler: Ruler, first: int, count: int) -> tuple[Indices, Cut]:
    """Return the spans of indices that some cells of a ruler touch, and how the cells lie on them."""
    begin = max(first - 1, 0)
    spans = ruler.spans(begin, first - begin + count + 1)
    covers = spans[:, 0] < spans[:, 1]
    before = np.cumsum(covers, dtype=np.int64)
    after: Indices = np.where(covers, before, before + 1)
    after[after > covers.sum()] = 0
    own = slice(first - begin, first - begin + count)
    return spans[covers], Cut(before[own], after[own])


def _write_labels(boxes: Boxes, data_rows: Flags, data_cols: Flags, looks: list[Look]) -> None:
    """Write each block's label into its middle, on the middle one of the rows that look alike."""
    rows = np.flatnonzero(data_rows).tolist()
    for start, stop in runs([row.tobytes() for row in boxes.codes[np.ix_(data_rows, data_cols)]]):
        middle = rows[start + (stop - start) // 2]
        line = boxes.codes[middle].tolist()
        for left, right in runs(line):
            if line[left] >= 0:
                boxes.write_centred(middle, left, right - left, _fitting(looks[line[left]].labels, right - left))


def _fitting(labels: tuple[str, ...], room: int) -> str:
    return next((label for label in labels if len(label) <= room), "")


def _write_ids(boxes: Boxes, frame: Frame, rows: Indices, at: Indices, left: int) -> None:
    shown = frame.cols.spans(left, boxes.chars.shape[1])
    starts = sorted({int(start) for start, stop in shown.tolist() if start < stop})
    for row, line in zip(rows.tolist(), at.tolist(), strict=True):
        for col in starts:
            text = str(flat_id(frame, row, col)).rjust(frame.cols.cells - 1)
            boxes.write(line, frame.cols.cell_of(col) - left, text)


def _write_on_rules(boxes: Boxes, looks: list[Look]) -> None:
    """Write the labels of blocks whose insides are taken by ids into the rules above them."""
    for row in range(len(boxes.codes) - 1):
        below = list(zip(boxes.codes[row + 1].tolist(), (boxes.chars[row] == "─").tolist(), strict=True))
        for start, stop in runs(below):
            look, is_ruled = below[start]
            if is_ruled and look >= 0 and (label := _fitting(looks[look].labels, stop - start - 2)):
                boxes.write_centred(row, start, stop - start, f" {label} ")


def flat_id(frame: Frame, row: int, col: int) -> int:
    """Return the number, counted row by row from 0 as rulers count, of the element at a place of the plane."""
    index = list(frame.plane.at)
    index[frame.plane.rows], index[frame.plane.cols] = row, col
    found = 0
    for at, size in zip(index, frame.sides.holders.shape, strict=True):
        found = found * size + at
    return found
