"""The drawing model: a tensor cut into blocks to scale, with the ranks of each block.

Made once from `Sides` for a budget of rows and columns, and rendered by one module per format. Two dims are drawn; of
the others, each split one gives a panel for every part, and whole ones are named.

`[1024/tp/fsdp]` over 8 x 128 ranks has 8 blocks of 128 parts. A picture with room for 20 rows shows the 8 blocks, one
of them open. Pieces say from where each part should be to where it is: a rank's parts are matched in the order in which
it holds them, and a part that was cut has as many pieces, each as high as it is on either side.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice, pairwise, product
from typing import TYPE_CHECKING

import numpy as np

from shardviz.picture.model.holders import Mask, Plane
from shardviz.picture.model.mesh import coords_among

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from shardviz.picture.model.sides import Cell, Sides

    Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a drawn dim.

    Attributes:
        start: Its first index.
        stop: One past its last.
        parts: 1 for a stretch with the same holders throughout, more if parts are not drawn one by one.
        is_block: Whether these parts are one block of an outer split, folded.
    """

    start: int
    stop: int
    parts: int = 1
    is_block: bool = False

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def is_left_out(self) -> bool:
        """Whether it stands for parts that are only counted."""
        return self.parts > 1 and not self.is_block

    def title(self, more: str = "…") -> str:
        """Return its indices, or `more` and the number of parts if they are only counted."""
        return f"{more} {self.parts:,}" if self.is_left_out else str(self)

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"


@lru_cache(maxsize=256)
def nest(sides: Sides, dim: int, *, held: bool = False) -> tuple[Indices, ...]:
    """Return the edges of the blocks of a dim's outer splits, coarsest first, without the parts.

    Args:
        dim: One of the dims of its holders' shape.
        held: Whether the second side's splits are followed, if there are two, and not the first's.
    """
    stripes = sides.holders.dims[dim]
    if sides.mesh is None or len(stripes.kinds) < 2:
        return ()
    is_first = sides.has_claimed and not (held and sides.has_held)
    lowest = stripes.lowest(0 if is_first else sides.shift, (1 << sides.shift) - 1)
    coords = coords_among(sides.mesh, lowest)
    return _levels(np.diff(coords[stripes.kinds], axis=0), stripes.edges)


def parts_of_claim(sides: Sides, dim: int) -> Indices:
    """Return where the ranks that should hold a dim change, whoever does."""
    return sides.holders.dims[dim].claim_edges((1 << sides.shift) - 1)


def _levels(steps: Indices, edges: Indices) -> tuple[Indices, ...]:
    """Return the edges of each level, from the coordinate steps between neighboring stripes.

    The axis with the fewest steps is the outermost.
    """
    changes = (steps != 0).sum(axis=0)
    steps = steps[:, [axis for axis in np.argsort(changes, kind="stable") if changes[axis]]]
    if not steps.shape[1]:
        return ()
    begins = [steps[:, 0] < 0, *(np.any(steps[:, : count + 1] != 0, axis=1) for count in range(steps.shape[1]))]
    levels, before = [], 1
    finest = int(begins[-1].sum()) + 1
    for begin in begins:
        count = int(begin.sum()) + 1
        if before < count < finest:
            levels.append(np.concatenate([edges[:1], edges[1:-1][begin], edges[-1:]]))
            before = count
    return tuple(levels)


def choose_spans(spans: Sequence[Span], budget: int, first: int, levels: Sequence[Indices] = ()) -> list[Span]:
    """Choose at most `budget` spans: one block opened, other blocks folded, the rest joined.

    Args:
        spans: All spans of a dim.
        budget: How many there may be.
        first: The index of the one whose block is opened.
        levels: The edges of blocks, as `nest` returns them.
    """
    if len(spans) <= budget:
        return list(spans)
    groups = _groups(spans, levels[0]) if levels else []
    if len(groups) < 2:
        return choose_spans(spans, budget, first, levels[1:]) if levels else _keep_ends(spans, budget, first)
    opened = next(at for at in range(len(groups)) if first < sum(map(len, groups[: at + 1])))
    inner = first - sum(map(len, groups[:opened]))
    blocks = [group[0] if len(group) == 1 else join_spans(group, is_block=True) for group in groups]
    shown = _keep_ends(blocks, max(budget - min(len(groups[opened]), budget // 2) + 1, 3), opened)
    if blocks[opened] not in shown:
        return _keep_ends(spans, budget, first)
    at = shown.index(blocks[opened])
    return [*shown[:at], *choose_spans(groups[opened], budget - len(shown) + 1, inner, levels[1:]), *shown[at + 1 :]]


def _groups(spans: Sequence[Span], edges: Indices) -> list[list[Span]]:
    """Return spans by the block that they begin in."""
    blocks = np.searchsorted(edges, [span.start for span in spans], side="right")
    cuts = [0, *(np.flatnonzero(np.diff(blocks)) + 1).tolist(), len(spans)]
    return [list(spans[start:stop]) for start, stop in pairwise(cuts)]


def _keep_ends(spans: Sequence[Span], budget: int, first: int) -> list[Span]:
    """Keep the first spans, the last, and those from one on; join the others."""
    count = len(spans)
    if count <= budget:
        return list(spans)
    tail = 2 if budget >= 8 else 1
    room = budget - tail - 1
    kept = set(range(room)) if first < room else {*range(room // 2), *range(first, first + room - room // 2 - 1)}
    kept |= set(range(count - tail, count))
    starts = [at for at in range(count) if at == 0 or at in kept or at - 1 in kept]
    ends = [*starts[1:], count]
    return [spans[at] if end == at + 1 else join_spans(spans[at:end]) for at, end in zip(starts, ends, strict=True)]


def join_spans(spans: Sequence[Span], *, is_block: bool = False) -> Span:
    """Put spans that follow each other into one; `is_block` if they are one block."""
    return Span(spans[0].start, spans[-1].stop, sum(span.parts for span in spans), is_block)


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
        drawn: The dims drawn, downwards and to the right; one for a line, none for a single number.
        whole: The dims that are neither drawn nor split.
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
    """Cut a tensor into the blocks to draw."""
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


MOST_PIECES = 64
"""With more than this nothing could be followed."""

Stretch = tuple[float, float]
"""The indices from which and up to which a part reaches."""

Piece = tuple[Mask, Stretch, Stretch]
"""Whose it is, where it is on the first side, and where on the second."""


def pieces(panel: Panel) -> list[Piece]:
    """Return a panel's pieces; none unless the parts are stretches of one dim, and not too many."""
    if not panel.is_different or len(panel.cols) > 1 or panel.claimed is None or panel.held is None:
        return []
    found = list(_pieces(panel, panel.claimed, panel.held))
    return found if 1 < len(found) <= MOST_PIECES else []


def _pieces(panel: Panel, claimed: Grid, held: Grid) -> Iterator[Piece]:
    """Yield the pieces of each set of ranks; if parts are left out, only of equally large parts."""
    due, has = _stretches(panel.rows, claimed), _stretches(panel.rows, held)
    is_whole = all(span.parts == 1 for span in panel.rows)
    for mask in due:
        if mask in has and (is_whole or _are_of_one_size(due[mask], has[mask])):
            cuts = sorted({*_shares(due[mask]), *_shares(has[mask])})
            for start, stop in pairwise(cuts):
                yield mask, _range_between(due[mask], start, stop), _range_between(has[mask], start, stop)


def _are_of_one_size(due: Sequence[Stretch], has: Sequence[Stretch]) -> bool:
    return len(due) == len(has) == 1 and due[0][1] - due[0][0] == has[0][1] - has[0][0]


def _stretches(rows: Sequence[Span], grid: Grid) -> dict[Mask, list[Stretch]]:
    """Return where each set of ranks has a part, neighbors joined."""
    by_ranks: dict[Mask, list[Stretch]] = {}
    for span, (block,) in zip(rows, grid, strict=True):
        if block.ranks and not block.is_mixed and span.parts == 1:
            stretches = by_ranks.setdefault(block.ranks, [])
            if stretches and stretches[-1][1] == span.start:
                stretches[-1] = (stretches[-1][0], span.stop)
            else:
                stretches.append((span.start, span.stop))
    return by_ranks


def _shares(stretches: Sequence[Stretch]) -> list[float]:
    """Return the shares of all that they have up to the end of each stretch, 0 first and 1 last."""
    sums = [0, *accumulate(stop - start for start, stop in stretches)]
    return [round(one / sums[-1], 9) for one in sums]


def _range_between(stretches: Sequence[Stretch], start: float, stop: float) -> Stretch:
    """Return the part of the stretches between two shares, which lies in one of them."""
    shares = _shares(stretches)
    which = min(bisect_right(shares, start), len(shares) - 1) - 1
    first, last = stretches[which]
    per_share = (last - first) / (shares[which + 1] - shares[which])
    ends = ((share - shares[which]) * per_share + first for share in (start, stop))
    low, high = (round(end, 6) for end in ends)
    return low, high
