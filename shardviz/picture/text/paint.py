"""A map's viewport as characters and looks: blocks to scale, lines, and the ranks' labels.

The result is a grid of cells, each with one character and one look; the renderer chooses the colors. A `Ruler` turns a
dim's indices into cells and back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce
from itertools import groupby, pairwise
from operator import or_
from typing import TYPE_CHECKING, Literal

import numpy as np

from shardviz.picture.model.holders import rank_array
from shardviz.picture.model.mesh import part_labels, rank_labels
from shardviz.picture.model.palette import WRONG
from shardviz.picture.text.panels import OUTSIDE, CellBlocks, paint_boxes, runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardviz.picture.model.holders import Mask, Plane
    from shardviz.picture.model.palette import Coloring
    from shardviz.picture.model.sides import Cell, Sides
    from shardviz.picture.text.panels import Boxes

    Indices = NDArray[np.int64]
    Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Ruler:
    """One dim on the screen.

    Where every block between two edges has cells of its own, no cell shows two of them, and a line may be drawn between
    blocks; where there are more blocks than room, cells take equal spans and may show several.

    Attributes:
        edges: Where blocks begin, rising, with 0 first and the dim's size last.
        each: Indices per cell, at least 1.
        cells: Cells per index; above 1 only if `each` is 1.
        lines: Whether there is a cell for a line before, between and behind the blocks.
        stretched: Cells of each block, if they are as many as the room has and cover spans of almost one size; then
            `each` is about that.
        whole: Whether all cells of a block cover all of it: it stands for several parts, and no cell for some of them.
    """

    edges: Indices
    each: int = 1
    cells: int = 1
    lines: bool = False
    stretched: tuple[int, ...] = ()
    whole: bool = False

    @classmethod
    def scaled(cls, edges: Indices, each: int, cells: int = 1) -> Ruler:
        """Return a ruler at a fixed scale: lines only between long blocks, tiny blocks merged."""
        blocks, size = len(edges) - 1, int(edges[-1])
        if blocks * each > 2 * size * cells:
            return cls(np.array([0, size], np.int64), each, cells)
        plain = cls(edges, each, cells)
        return cls(edges, each, cells, lines=True) if plain.extent >= 2 * blocks else plain

    @classmethod
    def fitted(
        cls, edges: Indices, room: int, most: int = 1, outer: Sequence[Indices] = (), least: tuple[int, int] = (1, 2)
    ) -> Ruler:
        """Return the largest ruler that fits into `room` cells; its blocks are whole parts.

        Args:
            edges: Where parts begin.
            room: Cells to use at most.
            most: Cells per index at most.
            outer: The edges of the blocks that parts are in, coarsest first: the finest that fit are drawn if the
                parts themselves do not, each cut into as many equal groups of the next as fit.
            least: Cells that a part needs to be drawn by itself, and that a block of many needs.
        """
        size = int(edges[-1])
        if not size:
            return cls(edges)
        if (len(edges) - 1) * least[0] <= room:
            return cls._filled(edges, room, most, least[0])
        levels = [np.array([0, size], np.int64), *(one for one in outer if 2 < len(one) < len(edges)), edges]
        fits = [at for at, one in enumerate(levels) if at == 0 or (len(one) - 1) * least[1] < room]
        dense = [at for at, one in enumerate(levels) if at and len(one) - 1 <= room and least[0] == 1]
        if fits == [0] and dense:
            return replace(cls._filled(levels[dense[-1]], room, most, least[0]), whole=True)
        at = min(fits[-1], len(levels) - 2)
        groups = _grouped(levels[at], levels[at + 1], (room - 1) // least[1])
        return replace(cls._filled(groups, room, most, least[0]), whole=True)

    @classmethod
    def _filled(cls, edges: Indices, room: int, most: int, least: int) -> Ruler:
        """Return a ruler to scale, with lines if these leave the blocks what they need."""
        lengths, size = np.diff(edges), int(edges[-1])
        for lines in (len(edges), 0):
            counts = _to_scale(lengths, room - lines, most)
            cells = int(counts.sum())
            if cells + lines <= room and (not lines or cells >= min(least * len(lengths), size)):
                return cls(edges, -(-size // cells), 1, bool(lines), tuple(counts.tolist()))
        return cls(edges, int(lengths.max()))

    @property
    def size(self) -> int:
        """Number of indices."""
        return int(self.edges[-1])

    @cached_property
    def _counts(self) -> Indices:
        """Cells of each block, without lines."""
        if self.stretched:
            return np.array(self.stretched, np.int64)
        return -(-np.diff(self.edges) // self.each) * self.cells

    @cached_property
    def _starts(self) -> Indices:
        """The first cell of each block; its line comes before it."""
        before = np.concatenate([[0], np.cumsum(self._counts)])[:-1]
        return before + np.arange(1, len(before) + 1) if self.lines else before

    @cached_property
    def extent(self) -> int:
        """Number of cells."""
        return int(self._counts.sum()) + (len(self.edges) if self.lines else 0) if self.size else 0

    def spans(self, first: int, count: int) -> Indices:
        """Return the indices that cells cover as `(start, stop)`; on a line both are its edge.

        Args:
            first: The first cell wanted.
            count: Cells wanted; those beyond the extent are left out.
        """
        at = np.arange(first, min(first + count, self.extent), dtype=np.int64)
        block = np.searchsorted(self._starts, at, side="right") - 1
        ahead = at - self._starts[block]
        on_line = (block < 0) | (ahead >= self._counts[block])
        start, stop = self._covered(block, ahead)
        edge = self.edges[block + 1]
        return np.stack([np.where(on_line, edge, start), np.where(on_line, edge, stop)], axis=-1)

    def _covered(self, block: Indices, ahead: Indices) -> tuple[Indices, Indices]:
        """Return what cells cover, given their blocks and the cells of these before them."""
        begin, end = self.edges[block], self.edges[block + 1]
        if self.whole:
            return begin, end
        if self.stretched:
            length, count = end - begin, self._counts[block]
            first: Indices = begin + np.floor_divide(ahead * length, count)
            after: Indices = begin + np.floor_divide((ahead + 1) * length, count)
            return first, np.maximum(after, first + 1)
        start = begin + np.floor_divide(ahead, self.cells) * self.each
        return start, np.minimum(start + self.each, end)

    def cell_of(self, index: int) -> int:
        """Return the first cell that shows an index."""
        block = int(np.searchsorted(self.edges, index, side="right")) - 1
        ahead = index - int(self.edges[block])
        if self.whole:
            return int(self._starts[block])
        if self.stretched:
            length, count = int(self.edges[block + 1] - self.edges[block]), self.stretched[block]
            first = -(-ahead * count // length) if count >= length else ((ahead + 1) * count - 1) // length
            return int(self._starts[block]) + first
        return int(self._starts[block]) + ahead // self.each * self.cells

    def cells_of(self, index: int) -> int:
        """Return how many cells show an index."""
        block = int(np.searchsorted(self.edges, index, side="right")) - 1
        if self.whole:
            return int(self._counts[block])
        if not self.stretched:
            return self.cells
        end, count = int(self.edges[block + 1]), self.stretched[block]
        after = self.cell_of(index + 1) if index + 1 < end else int(self._starts[block]) + count
        return max(after - self.cell_of(index), 1)

    def block_of(self, index: int) -> tuple[int, int]:
        """Return the first index of the block that an index is in, and one past its last."""
        block = int(np.searchsorted(self.edges, index, side="right")) - 1
        return int(self.edges[block]), int(self.edges[block + 1])


def _to_scale(lengths: Indices, room: int, most: int) -> Indices:
    """Give blocks cells in proportion to their lengths, at least one each."""
    size = int(lengths.sum())
    for total in range(room + len(lengths), 0, -1):
        counts: Indices = np.clip((lengths * total + size // 2) // size, 1, lengths * most)
        if counts.sum() <= room:
            return counts
    return np.ones(len(lengths), np.int64)


def _grouped(blocks: Indices, parts: Indices, most: int) -> Indices:
    """Cut each block into groups of equally many parts, at most `most` groups in all."""
    inside = [parts[(parts >= start) & (parts <= stop)] for start, stop in pairwise(blocks.tolist())]
    largest = max(map(len, inside)) - 1
    groups = max(most // len(inside), 1)
    least = -(-largest // groups)
    each = next((count for count in range(least, min(2 * least, largest)) if not largest % count), least)
    return np.unique(np.concatenate([blocks, *(found[::each] for found in inside)]))


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
        side: Which of the two descriptions is drawn, or where they differ.
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
