"""The drawing model: a tensor cut into blocks to scale, with the ranks of each block.

Made once from `Sides` for a budget of rows and columns, and rendered by one module per format. Two dims are drawn; of
the others, each split one gives a panel for every part, and whole ones are named.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice, pairwise, product
from typing import TYPE_CHECKING

import numpy as np

from shardviz.picture.model.holders import Mask, Plane
from shardviz.picture.model.nest import Span, choose_spans, join_spans, nest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardviz.picture.model.sides import Cell, Sides

    Indices = NDArray[np.int64]

MAX_BLOCKS = 1 << 15
"""Blocks that are compared one by one; those beyond are compared as one."""

MAX_SLICES = 256
"""How many slices of the other dims are looked at."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How many rows and columns a picture may have.

    Attributes:
        rows: Blocks downwards.
        cols: Blocks to the right.
        panels: Slices of the dims that are not drawn.
    """

    rows: int = 24
    cols: int = 12
    panels: int = 4


@dataclass(frozen=True, slots=True)
class Block:
    """The ranks of one block on one side.

    Attributes:
        ranks: Those that hold any of it.
        is_mixed: Whether parts of it have different holders: it is scattered, or stands for many parts.
        part: The ranks by which it is wrong, if not all of it is.
    """

    ranks: Mask
    is_mixed: bool = False
    part: Mask = 0


Grid = tuple[tuple[Block, ...], ...]
"""Blocks, rows by columns."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One slice of a tensor.

    Attributes:
        at: The dims that are not drawn but split, each with the stretch of it that this panel is.
        rows: The blocks downwards.
        cols: The blocks to the right.
        claimed: The ranks of each block by the placements; None for a plain tensor.
        held: The ranks of each block by the ids; None if nothing was stamped.
        differs: Where the two are not the same, rows by columns.
        wrong: Where they are not, or the values are wrong, rows by columns.
    """

    at: tuple[tuple[int, Span], ...]
    rows: tuple[Span, ...]
    cols: tuple[Span, ...]
    claimed: Grid | None
    held: Grid | None
    differs: tuple[tuple[bool, ...], ...]
    wrong: tuple[tuple[bool, ...], ...]

    @property
    def is_different(self) -> bool:
        """Whether any block is not held by the ranks that claim it."""
        return any(map(any, self.differs))

    def marks_on(self, title: str) -> bool:
        """Whether a side marks what is wrong; if the two sides differ, only the held one does."""
        return title == "held" or not self.is_different


@dataclass(frozen=True, slots=True)
class Drawing:
    """A tensor's blocks.

    Attributes:
        shape: The tensor's shape.
        drawn: The dims drawn, downwards and to the right; one for a line, none for a single number.
        whole: The dims that are neither drawn nor split.
        panels: The slices that are drawn.
        num_panels: All slices there are.
    """

    shape: tuple[int, ...]
    drawn: tuple[int, ...]
    whole: tuple[int, ...]
    panels: tuple[Panel, ...]
    num_panels: int

    @property
    def is_different(self) -> bool:
        """Whether claimed and held differ in a panel that is drawn."""
        return any(panel.is_different for panel in self.panels)


def draw(sides: Sides, shape: Sequence[int], budget: Budget = Budget()) -> Drawing:
    """Cut a tensor into the blocks to draw.

    Args:
        sides: Who holds what, claimed and held.
        shape: The tensor's own shape.
        budget: How many blocks to draw at most.
    """
    if not math.prod(shape) or not (sides.has_claimed or sides.has_held):
        return Drawing(tuple(shape), (), (), (), 0)
    padded = sides.holders.shape
    edges = [_block_edges(sides, dim, budget) for dim in range(len(padded))]
    drawn = (1, 0) if len(shape) == 1 else drawn_dims([len(cuts) - 1 for cuts in edges])
    stepped = [dim for dim, cuts in enumerate(edges) if dim not in drawn and len(cuts) > 2]
    slices = islice(product(*(_spans(edges[dim]) for dim in stepped)), MAX_SLICES)
    panels = [_panel(sides, drawn, dict(zip(stepped, at, strict=True)), edges, budget) for at in slices]
    missing = len(padded) - len(shape)
    return Drawing(
        shape=tuple(shape),
        drawn=tuple(dim - missing for dim in drawn if dim >= missing),
        whole=tuple(dim - missing for dim in range(missing, len(padded)) if dim not in (*drawn, *stepped)),
        panels=_chosen_panels(panels, budget.panels),
        num_panels=math.prod(len(edges[dim]) - 1 for dim in stepped),
    )


def _chosen_panels(panels: Sequence[Panel], most: int) -> tuple[Panel, ...]:
    """Choose the first panels, those with differences before the others, in their own order."""
    by_interest = sorted(range(len(panels)), key=lambda at: not panels[at].is_different)
    return tuple(panels[at] for at in sorted(by_interest[:most]))


def _block_edges(sides: Sides, dim: int, budget: Budget) -> Indices:
    """Return where blocks may begin; scattered ids may begin one anywhere."""
    size = sides.holders.shape[dim]
    if sides.holders.runs and size <= budget.rows:
        return np.arange(size + 1, dtype=np.int64)
    return sides.holders.edges(dim)


def drawn_dims(parts: Sequence[int]) -> tuple[int, int]:
    """Choose the two dims to draw, down and across: the first split ones, else the last.

    Args:
        parts: How many parts each dim is in.
    """
    order = sorted(range(len(parts)), key=lambda dim: (1, -dim) if parts[dim] > 1 else (0, dim))
    first, second = sorted(order[-2:])
    return first, second


def _spans(edges: Indices) -> list[Span]:
    return [Span(start, stop) for start, stop in pairwise(edges.tolist())]


def _panel(
    sides: Sides, drawn: tuple[int, int], at: dict[int, Span], edges: Sequence[Indices], budget: Budget
) -> Panel:
    plane = Plane(*drawn, tuple(at[dim].start if dim in at else 0 for dim in range(len(edges))))
    square = int(MAX_BLOCKS**0.5)
    most = (max(square, MAX_BLOCKS // len(edges[other])) for other in reversed(drawn))
    down, right = (_compared(_spans(edges[dim]), room) for dim, room in zip(drawn, most, strict=True))
    cells, codes = _window(sides, plane, down, right)
    down, right, codes = _coalesced(down, right, codes)
    differs = np.take(np.array([cell.is_wrong for cell in cells], np.bool_), codes)
    rows = choose_spans(down, budget.rows, int(differs.any(axis=1).argmax()), nest(sides, drawn[0]))
    cols = choose_spans(right, budget.cols, int(differs.any(axis=0).argmax()), nest(sides, drawn[1]))
    cells, codes = _window(sides, plane, rows, cols)
    return Panel(
        at=tuple(at.items()),
        rows=tuple(rows),
        cols=tuple(cols),
        claimed=_grid([Block(cell.claimed, cell.claimed_mixed, cell.part) for cell in cells], codes, sides.has_claimed),
        held=_grid([Block(cell.held, cell.held_mixed, cell.part) for cell in cells], codes, sides.has_held),
        differs=tuple(tuple(cells[code].different for code in row) for row in codes.tolist()),
        wrong=tuple(tuple(cells[code].is_wrong for code in row) for row in codes.tolist()),
    )


def row_stretches(rows: Sequence[Span], grid: Grid, more: str = "…") -> list[tuple[int, int, str]]:
    """Return runs of rows with equal ranks as (first row, end row, title)."""
    stretches: list[tuple[int, int, str]] = []
    start = 0
    for row in range(1, len(rows) + 1):
        first = rows[start]
        if row == len(rows) or grid[row] != grid[start] or not rows[row].parts == first.parts == 1:
            title = f"{more} {first.parts:,} parts" if first.is_left_out else f"{first.start}:{rows[row - 1].stop}"
            stretches.append((start, row, title))
            start = row
    return stretches


def column_titles(cols: Sequence[Span], widths: Sequence[float], more: str = "…") -> list[str]:
    """Return the titles of columns; only their first indices if some titles don't fit."""
    titles = [span.title(more) for span in cols]
    if all(len(title) <= width for title, width in zip(titles, widths, strict=True)):
        return titles
    return [more if span.is_left_out else str(span.start) for span in cols]


def _compared(spans: list[Span], most: int) -> list[Span]:
    """Put all that comes after `most` parts into one span."""
    return spans if len(spans) <= most else [*spans[: most - 1], join_spans(spans[most - 1 :])]


def _window(sides: Sides, plane: Plane, rows: Sequence[Span], cols: Sequence[Span]) -> tuple[list[Cell], Indices]:
    down, right = (np.array([(span.start, span.stop) for span in spans], np.int64) for spans in (rows, cols))
    window = sides.holders.window(plane, down, right)
    return [sides.cell(masks) for masks in window.masks], window.codes


def _coalesced(rows: list[Span], cols: list[Span], codes: Indices) -> tuple[list[Span], list[Span], Indices]:
    """Join neighbors with the same holders throughout."""
    downs = [0, *(np.flatnonzero((codes[1:] != codes[:-1]).any(axis=1)) + 1).tolist()]
    rights = [0, *(np.flatnonzero((codes[:, 1:] != codes[:, :-1]).any(axis=0)) + 1).tolist()]
    return _join_spans(rows, downs), _join_spans(cols, rights), codes[np.ix_(downs, rights)]


def _join_spans(spans: Sequence[Span], starts: Sequence[int]) -> list[Span]:
    ends = [*starts[1:], len(spans)]
    found = (spans[start:end] for start, end in zip(starts, ends, strict=True))
    return [Span(part[0].start, part[-1].stop, max(span.parts for span in part)) for part in found]


def _grid(blocks: Sequence[Block], codes: Indices, is_known: bool) -> Grid | None:
    return tuple(tuple(blocks[code] for code in row) for row in codes.tolist()) if is_known else None
