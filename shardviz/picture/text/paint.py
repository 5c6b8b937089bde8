"""A map's viewport as characters and looks: blocks to scale, lines, and the ranks' labels.

The result is a grid of cells, each with one character and one look; the renderer chooses the colors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import groupby
from operator import or_
from typing import TYPE_CHECKING, Literal

import numpy as np

from shardviz.picture.model.holders import rank_array
from shardviz.picture.model.mesh import part_labels, rank_labels
from shardviz.picture.model.palette import WRONG
from shardviz.picture.text.boxes import OUTSIDE, CellBlocks, paint_boxes, runs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.picture.model.holders import Mask, Plane
    from shardviz.picture.model.palette import Coloring
    from shardviz.picture.model.ruler import Ruler
    from shardviz.picture.model.sides import Cell, Sides
    from shardviz.picture.text.boxes import Boxes

    Indices = NDArray[np.int64]
    Flags = NDArray[np.bool_]


Side = Literal["claimed", "held", "difference"]
Tone = Literal["held", "in place", "elsewhere", "partly", "mixed", "nobody", "unlit"]


@dataclass(frozen=True)
class CellLook:
    """The labels, tone and color of cells with the same holders.

    Attributes:
        labels: Texts for a block of them, the longest first; the first that fits is written.
        tone: Whether they are in place.
        color: The place of their color in the palette of ranks; -1 for nobody, and for ranks of several hues.
        ranks: Who holds them, for the label of a stretch of cells that are too narrow for labels of their own.
    """

    labels: tuple[str, ...]
    tone: Tone
    color: int
    ranks: Mask = 0


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
class PaintedViewport:
    """A painted viewport.

    Attributes:
        chars: One string per row.
        looks: For each cell an index into `of`, `LINE` or `OUTSIDE`; shape (rows, columns).
        of: The looks.
    """

    chars: tuple[str, ...]
    looks: Indices
    of: tuple[CellLook, ...]


def paint(frame: Frame, top: int, left: int, height: int, width: int) -> PaintedViewport:
    """Paint the cells from (top, left) on; cells beyond the map are left out."""
    row_spans, down = _visible_spans(frame.rows, top, height)
    col_spans, across = _visible_spans(frame.cols, left, width)
    window = frame.sides.holders.window(frame.plane, row_spans, col_spans)
    looks: dict[CellLook, int] = {}
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
        _write_labels(boxes, frame, down.is_inside, across.is_inside, list(looks))
    return PaintedViewport(tuple(map("".join, boxes.chars.tolist())), boxes.codes, tuple(looks))


def look_of_cell(frame: Frame, cell: Cell) -> CellLook:
    """Return the look of a cell on the drawn side."""
    if frame.side == "difference":
        return _look_of_difference(frame, cell)
    is_claimed = frame.side == "claimed"
    mask, mixed = (cell.claimed, cell.claimed_mixed) if is_claimed else (cell.held, cell.held_mixed)
    if frame.lit is not None and not mask >> frame.lit & 1:
        return _look(frame, (), "unlit", mask)
    is_marked = frame.sides.marks_each_side and cell.is_wrong
    if not mask:
        return _look(frame, (f"{WRONG} nobody", WRONG) if is_marked else ("nobody", "?"), "nobody", mask)
    names = rank_labels(mask, frame.sides.coloring, many=mixed)
    if is_marked:
        return _look(frame, _marked_labels(frame, cell, names), "elsewhere", mask)
    lit_text = (f"{frame.lit} in {names[0]}",) if frame.lit is not None and mixed else ()
    pending = (f"{names[0]} {frame.suffix}",) if frame.suffix else ()
    shown = mask if frame.lit is None else 1 << frame.lit
    return _look(frame, (*lit_text, *pending, *names), "mixed" if mixed else "held", shown)


def _marked_labels(frame: Frame, cell: Cell, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return a cell's labels with the error sign, before all of them or before the wrong part."""
    if not cell.part:
        some = "part of " if cell.is_partly else ""
        return (*(f"{WRONG} {some}{name}" for name in names), WRONG)
    whole, many = cell.claimed or cell.held, cell.claimed_mixed or cell.held_mixed
    parts = part_labels(cell.part, whole, frame.sides.coloring, many=many)
    name = rank_labels(whole, frame.sides.coloring)[0]
    to = f" → {rank_labels(cell.has, frame.sides.coloring)[0]}" if cell.has not in (0, cell.part) else ""
    full = dict.fromkeys(f"{name}: {WRONG} {part}{end}" for part in parts for end in (to, ""))
    return (*full, *(f"{WRONG} {part}" for part in parts), WRONG)


def _look_of_difference(frame: Frame, cell: Cell) -> CellLook:
    """Return the look of a cell that is in place, or that went from some ranks to others.

    A cell for several parts can also show that these were exchanged among the same ranks.
    """
    coloring, many = frame.sides.coloring, cell.claimed_mixed or cell.held_mixed
    known = cell.claimed or cell.held
    names = rank_labels(known, coloring, many=many)
    if not cell.is_wrong:
        return _look(frame, (*names, "="), "in place", known)
    if not known:
        return _look(frame, (f"{WRONG} nobody", WRONG), "nobody", known)
    if cell.part and cell.different:
        return _look(frame, _marked_labels(frame, cell, names), "partly", known)
    if not cell.due | cell.has or not frame.sides.is_compared:
        return _look(frame, _marked_labels(frame, cell, names), "elsewhere", known)
    if cell.claimed == cell.held:
        among = rank_labels(cell.held, coloring)
        return _look(frame, (*(f"{WRONG} among {name}" for name in among), WRONG), "elsewhere", cell.held)
    went_from, went_to = (cell.due or cell.claimed, cell.has) if cell.is_partly else (cell.claimed, cell.held)
    due, has = _short_names(went_from, coloring), _short_names(went_to, coloring)
    went = [f"{WRONG} {due[0]}→{has[0]}", f"{WRONG} {due[-1]}→{has[-1]}", f"{due[-1]}→{has[-1]}", f"{WRONG} {due[-1]}"]
    if cell.is_partly:
        went = [f"{WRONG} part: {went[0].removeprefix(f'{WRONG} ')}", *went]
    tone: Tone = "partly" if cell.is_partly else "elsewhere"
    look = _look(frame, (*dict.fromkeys(went), WRONG), tone, cell.held)
    return replace(look, color=_color_of(cell.claimed, coloring)) if _is_hueless(cell, look) else look


def _short_names(mask: Mask, coloring: Coloring) -> tuple[str, str]:
    """Return the names of ranks on one side of an arrow: in full and as short as can be read."""
    names = [name for name in rank_labels(mask, coloring) if name != "…"]
    return names[0], min(names, key=len)


def _is_hueless(cell: Cell, look: CellLook) -> bool:
    """Whether a cell's holders have no common hue; it then has that of its rightful ranks."""
    return bool(cell.held and cell.claimed) and look.color < 0


def _look(frame: Frame, labels: tuple[str, ...], tone: Tone, mask: Mask) -> CellLook:
    return CellLook(
        tuple(label for label in labels if "…" not in (label, label[-1:])),
        tone,
        _color_of(mask, frame.sides.coloring) if mask else -1,
        mask,
    )


@lru_cache(maxsize=1 << 14)
def _color_of(mask: Mask, coloring: Coloring) -> int:
    return coloring.color_of(rank_array(mask))


def _visible_spans(ruler: Ruler, first: int, count: int) -> tuple[Indices, CellBlocks]:
    """Return the index spans that some cells of a ruler touch, and how the cells lie on them."""
    begin = max(first - 1, 0)
    spans = ruler.spans(begin, first - begin + count + 1)
    covers = spans[:, 0] < spans[:, 1]
    before = np.cumsum(covers, dtype=np.int64)
    after: Indices = np.where(covers, before, before + 1)
    after[after > covers.sum()] = 0
    own = slice(first - begin, first - begin + count)
    return spans[covers], CellBlocks(before[own], after[own])


def _write_labels(boxes: Boxes, frame: Frame, data_rows: Flags, data_cols: Flags, looks: list[CellLook]) -> None:
    """Write each block's label into its middle, on the middle one of the rows that look alike."""
    rows = np.flatnonzero(data_rows).tolist()
    for start, stop in runs([row.tobytes() for row in boxes.codes[np.ix_(data_rows, data_cols)]]):
        middle = rows[start + (stop - start - 1) // 2]
        line = boxes.codes[middle].tolist()
        for is_block, found in groupby(runs(line), key=lambda run: line[run[0]] >= 0):
            if is_block:
                _write_stretch(boxes, frame, middle, [(left, right, looks[line[left]]) for left, right in found])


def _write_stretch(boxes: Boxes, frame: Frame, row: int, blocks: list[tuple[int, int, CellLook]]) -> None:
    """Write the labels of blocks without lines between them; one for all if they are narrow."""
    labels = [_first_fitting(look.labels, right - left) for left, right, look in blocks]
    if len(blocks) > 1 and not any(labels) and frame.lit is None:
        begin, end = blocks[0][0], blocks[-1][1]
        ranks = reduce(or_, (look.ranks for _, _, look in blocks))
        label = _first_fitting(rank_labels(ranks, frame.sides.coloring, many=True), end - begin)
        boxes.write_centred(row, begin, end - begin, label)
        return
    for (left, right, _), label in zip(blocks, labels, strict=True):
        boxes.write_centred(row, left, right - left, label)


def _first_fitting(labels: tuple[str, ...], room: int) -> str:
    return next((label for label in labels if len(label) <= room), "")


def _write_ids(boxes: Boxes, frame: Frame, rows: Indices, at: Indices, left: int) -> None:
    shown = frame.cols.spans(left, boxes.chars.shape[1])
    starts = sorted({int(start) for start, stop in shown.tolist() if start < stop})
    for row, line in zip(rows.tolist(), at.tolist(), strict=True):
        for col in starts:
            text = str(flat_id(frame, row, col)).rjust(frame.cols.cells - 1)
            boxes.write(line, frame.cols.cell_of(col) - left, text)


def _write_on_rules(boxes: Boxes, looks: list[CellLook]) -> None:
    """Write the labels of blocks whose insides are taken by ids into the rules above them."""
    for row in range(len(boxes.codes) - 1):
        below = list(zip(boxes.codes[row + 1].tolist(), (boxes.chars[row] == "─").tolist(), strict=True))
        for start, stop in runs(below):
            look, is_ruled = below[start]
            if is_ruled and look >= 0 and (label := _first_fitting(looks[look].labels, stop - start - 2)):
                boxes.write_centred(row, start, stop - start, f" {label} ")


def flat_id(frame: Frame, row: int, col: int) -> int:
    """Return an element's row-major number, counted from 0."""
    index = list(frame.plane.at)
    index[frame.plane.rows], index[frame.plane.cols] = row, col
    number = 0
    for at, size in zip(index, frame.sides.holders.shape, strict=True):
        number = number * size + at
    return number
