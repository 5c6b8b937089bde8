"""A mesh for pictures: each rank's cell in a grid, short labels of ranks, and heat by rank.

The last axis runs to the right and the one before it down. Axes further out make several grids, or one large grid in
which axes take turns: across, down, across the groups, down the groups, and so on.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice, pairwise, product
from typing import TYPE_CHECKING

import numpy as np

from shardviz.dump.costs import memory_table, received_bytes
from shardviz.picture.model.holders import Mask, rank_array, ranks_in_words, ranks_on, ranks_text
from shardviz.picture.model.palette import HEAT_SIGNS, WRONG
from shardviz.text import INSIDE, bytes_text, counted, range_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from numpy.typing import NDArray

    from shardviz.check.report import Report
    from shardviz.dump.dump import Dump
    from shardviz.layout.mesh import Coord, Mesh
    from shardviz.picture.model.drawing import Block
    from shardviz.picture.model.palette import Coloring


@dataclass(frozen=True)
class RankGrid:
    """A mesh, or the part of it at one position on its outer axes, as a grid of ranks.

    Attributes:
        across: The axes to the right, outermost first.
        down: The axes downwards, outermost first.
        at: Positions on the first axes, which are in neither.
    """

    mesh: Mesh
    across: tuple[int, ...]
    down: tuple[int, ...]
    at: Coord = ()

    @cached_property
    def num_rows(self) -> int:
        """Ranks downwards."""
        return math.prod(self.mesh.shape[axis] for axis in self.down)

    @cached_property
    def num_cols(self) -> int:
        """Ranks to the right."""
        return math.prod(self.mesh.shape[axis] for axis in self.across)

    @property
    def title(self) -> str:
        """Where the grid is on the outer axes: `pp=0, dp=1`; empty if there are none."""
        return ", ".join(f"{axis}={position}" for axis, position in zip(self.mesh.axes, self.at, strict=False))

    def __contains__(self, rank: int) -> bool:
        return rank in self.mesh and self.mesh.coord_of(rank)[: len(self.at)] == self.at

    def row_title(self, row: int) -> str:
        """Write where a row is: `fsdp=1`; empty if no axis runs downwards."""
        return self._title(self.down, row)

    def col_title(self, col: int) -> str:
        """Write where a column is: `tp=1`."""
        return self._title(self.across, col) or "rank"

    def _title(self, axes: tuple[int, ...], number: int) -> str:
        positions = self._positions(axes, number)
        return " ".join(f"{self.mesh.axes[axis]}={at}" for axis, at in zip(axes, positions, strict=True))

    def position(self, axis: int, col: int) -> int:
        """Return the position of a column along one of the axes to the right."""
        return self._positions(self.across, col)[self.across.index(axis)]

    def rank_at(self, row: int, col: int) -> int:
        """Return the rank in a row and a column."""
        return _rank_at(self, row, col)

    def row_and_col(self, rank: int) -> tuple[int, int]:
        """Return the row and the column of a rank."""
        coord = self.mesh.coord_of(rank)
        row, col = 0, 0
        for axis in self.down:
            row = row * self.mesh.shape[axis] + coord[axis]
        for axis in self.across:
            col = col * self.mesh.shape[axis] + coord[axis]
        return row, col

    def _positions(self, axes: tuple[int, ...], number: int) -> list[int]:
        coords: list[int] = []
        for axis in reversed(axes):
            number, position = divmod(number, self.mesh.shape[axis])
            coords.insert(0, position)
        return coords


@lru_cache(maxsize=1 << 14)
def _rank_at(grid: RankGrid, row: int, col: int) -> int:
    coord = [*grid.at, *[0] * (grid.mesh.ndim - len(grid.at))]
    for axes, number in ((grid.down, row), (grid.across, col)):
        for axis in reversed(axes):
            number, coord[axis] = divmod(number, grid.mesh.shape[axis])
    return grid.mesh.rank_at(tuple(coord))


def one_grid(mesh: Mesh) -> RankGrid:
    """Return the whole mesh as one grid."""
    axes = range(mesh.ndim)
    return RankGrid(mesh, tuple(axes[::-1][::2])[::-1], tuple(axes[::-1][1::2])[::-1])


def grids_of(mesh: Mesh, most: int, wanted: Collection[int] = ()) -> tuple[list[RankGrid], int]:
    """Return a grid for each position on the axes before the last two.

    Args:
        most: Grids to return at most.
        wanted: Ranks whose grids are returned before others.

    Returns:
        The grids, and how many more there are.
    """
    axes, outer = tuple(range(mesh.ndim)), mesh.shape[:-2]
    first = sorted({mesh.coord_of(rank)[:-2] for rank in wanted if rank in mesh})
    others = islice(product(*map(range, outer)), most)
    places = sorted(islice(dict.fromkeys((*first, *others)), most))
    grids = [RankGrid(mesh, axes[-1:], axes[-2:-1], place) for place in places]
    return grids, math.prod(outer) - len(grids)


def kept_positions(count: int, most: int, wanted: Collection[int] = ()) -> list[int | range]:
    """Return the positions to show, and between them the ranges that are left out.

    A single position is never left out: the line that says so would take its place.

    Args:
        most: How many lines they may take.
        wanted: Positions that are shown before others; the first and the last always are.
    """
    if count <= most:
        return list(range(count))
    shown = {0, count - 1}
    for position in (*sorted(wanted), *range(count)):
        if _lines(shown | {position}) <= most:
            shown.add(position)
        elif position not in wanted:
            break
    positions: list[int | range] = []
    for before, after in pairwise(sorted(shown)):
        hidden = range(before + 1, after)
        positions.append(before)
        if len(hidden) > 1:
            positions.append(hidden)
        else:
            positions += hidden
    return [*positions, count - 1]


def _lines(shown: Collection[int]) -> int:
    return len(shown) + sum(after > before + 1 for before, after in pairwise(sorted(shown)))


def marked_among(ranks: Iterable[int], marked: Collection[int], sign: str = WRONG) -> str:
    """Say how many of some ranks are marked: `, 12 ranks ✗`; nothing if none are."""
    count = sum(rank in marked for rank in ranks)
    return f", {counted(count, 'rank')} {sign}" if count else ""


def rows_and_columns(ranks: Iterable[int], grid: RankGrid) -> tuple[set[int], set[int]]:
    """Return the rows and the columns of a grid that have any of some ranks."""
    places = [grid.row_and_col(rank) for rank in ranks if rank in grid]
    return {row for row, _ in places}, {col for _, col in places}


LONG = 24
"""Rank numbers of more characters than this are read by nobody: how many they are says more."""

HANDFUL = 3
"""So many ranks are named by their numbers, even if they hold different parts."""

SHORT = 12
"""Rank numbers up to this many characters are written out wherever they fit."""


def ranks_label(mask: Mask, coloring: Coloring, room: int, *, many: bool = False) -> str:
    """Name a set of ranks in `room` characters, at least enough for a count.

    Args:
        room: Characters to use at most; the count of ranks is used if nothing else fits.
        many: Whether they hold different parts, and not copies of one.
    """
    labels = rank_labels(mask, coloring, many=many)
    return next((label for label in labels if len(label) <= room), labels[-1])


def block_label(block: Block, coloring: Coloring, room: int, sign: str = "") -> str:
    """Label a block's ranks in `room` characters, with a sign for those that are wrong."""
    label = ranks_label(block.ranks, coloring, room - len(sign) - 1 if sign else room, many=block.is_mixed)
    if not sign or not block.part:
        return f"{sign} {label}" if sign else label
    parts = part_labels(block.part, block.ranks, coloring, many=block.is_mixed)
    name = rank_labels(block.ranks, coloring)[0]
    found = [*(f"{name}: {sign} {part}" for part in parts), *(f"{sign} {part}" for part in parts)]
    return next((text for text in found if len(text) <= room), sign)


@lru_cache(maxsize=1 << 14)
def rank_labels(mask: Mask, coloring: Coloring, *, many: bool = False) -> tuple[str, ...]:
    """Return the names of a set of ranks, the one that says most first, how many they are last.

    None of them says less than the whole set: if nothing else fits, `…` is all.
    """
    if not mask:
        return ("nobody",)
    numbers, count = ranks_text(mask), mask.bit_count()
    coords = _coords(mask, coloring, many=many) if count > 1 else ()
    is_brief = len(numbers) <= SHORT and "…" not in numbers and (not many or count <= HANDFUL)
    names = [numbers, *coords] if is_brief else [*coords, numbers]
    if count > 1:
        is_read = len(numbers) <= LONG and not (coords and "…" in numbers)
        names = [name for name in names if name != numbers or is_read] + [f"{count:,} ranks", "…"]
    return tuple(dict.fromkeys(names))


@lru_cache(maxsize=1 << 14)
def part_labels(part: Mask, whole: Mask, coloring: Coloring, *, many: bool = False) -> tuple[str, ...]:
    """Return labels of some of a set's ranks, the most telling first: `fsdp=127`.

    Args:
        whole: The set that is named beside them.
        many: Whether the ranks of the set hold different parts, and not copies of one.
    """
    numbers, mesh = ranks_text(part), coloring.mesh
    inside = not part & ~whole and mesh is not None
    along, around = (_positions(mask, mesh) if inside and mesh else {} for mask in (part, whole))
    moved = [axis for axis in along if around and along[axis] != around[axis]]
    names = [numbers] if len(numbers) <= SHORT and "…" not in numbers else []
    if moved:
        coords = [" ".join(_along(axis, along[axis]) for axis in moved)]
        names = [*coords, *names] if many else [*names, *coords]
    count = f"{part.bit_count():,} of {whole.bit_count():,}" if not part & ~whole else f"{part.bit_count():,}"
    return (*names, f"{count} ranks", count) if part.bit_count() > 1 else tuple(names)


def _coords(mask: Mask, coloring: Coloring, *, many: bool) -> tuple[str, ...]:
    """Return the coordinates that make up exactly this set, long and short; empty if none do."""
    along = _positions(mask, coloring.mesh) if coloring.mesh is not None else {}
    if coloring.mesh is None or not along:
        return ()
    full = {axis for axis, positions in along.items() if len(positions) == coloring.mesh.axis_size(axis)}
    order = [*coloring.axes, *(axis for axis in along if axis not in coloring.axes)]
    named = [axis for axis in order if axis not in full]
    short = " ".join(f"{axis}={range_text(along[axis], '-')}" for axis in named) or "all ranks"
    if not many:
        return (short,)
    shown = [axis for axis in order if axis not in full or (axis in (coloring.axes or along) and len(along[axis]) > 1)]
    shown.sort(key=lambda axis: len(along[axis]) > 1)
    return f" {INSIDE} ".join(_along(axis, along[axis]) for axis in shown), short


def _along(axis: str, positions: list[int]) -> str:
    return f"{axis} {range_text(positions)}" if len(positions) > 1 else f"{axis}={positions[0]}"


def _positions(mask: Mask, mesh: Mesh) -> dict[str, list[int]]:
    """Return the positions along each axis whose product is this set; empty if it is no product."""
    coords = coords_among(mesh, rank_array(mask))
    if (coords < 0).any():
        return {}
    along = [np.flatnonzero(np.bincount(positions)).tolist() for positions in coords.T]
    return dict(zip(mesh.axes, along, strict=True)) if math.prod(map(len, along)) == len(coords) else {}


def coords_among(mesh: Mesh, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a row of coordinates for each rank; all -1 for a rank that isn't on the mesh."""
    known = _coords_by_rank(mesh)
    found: NDArray[np.int64] = known[np.where((ranks >= 0) & (ranks < len(known)), ranks, len(known) - 1)]
    return found


@lru_cache(maxsize=16)
def _coords_by_rank(mesh: Mesh) -> NDArray[np.int64]:
    """Return a row of coordinates for every rank number, and a last row of -1 for the others."""
    ranks = ranks_on(mesh)
    known = np.full((int(ranks.max()) + 2, mesh.ndim), -1, np.int64)
    known[ranks] = np.stack(np.unravel_index(np.arange(mesh.size), mesh.shape), axis=-1)
    return known


@dataclass(frozen=True)
class Heat:
    """One number for each rank.

    Attributes:
        by_rank: The numbers; ranks that are not in it have none.
        in_bytes: Whether they are bytes.
    """

    title: str
    by_rank: Mapping[int, int]
    in_bytes: bool = False

    def level(self, rank: int) -> int:
        """Return how hot a rank is: 0 for the least of all ranks, 7 for the most, -1 if unknown."""
        if rank not in self.by_rank:
            return -1
        least, most = self.ends
        return (self.by_rank[rank] - least) * (len(HEAT_SIGNS) - 1) // (most - least) if most > least else 0

    def sign(self, rank: int) -> str:
        """Return the sign of a rank's level; `?` if nothing is known."""
        level = self.level(rank)
        return HEAT_SIGNS[level] if level >= 0 else "?"

    @cached_property
    def ends(self) -> tuple[int, int]:
        """The least and the most that any rank has."""
        return min(self.by_rank.values(), default=0), max(self.by_rank.values(), default=0)

    def text(self, count: int) -> str:
        """Write one of the numbers."""
        return bytes_text(count) if self.in_bytes else f"{count:,}"

    def __str__(self) -> str:
        """Return what is counted, the least and the most, and which ranks have these."""
        least, most = self.ends
        if least == most:
            return f"{self.title}: {self.text(most)} on every rank"
        ends = ((HEAT_SIGNS[0], least), (HEAT_SIGNS[-1], most))
        return f"{self.title}: " + ", ".join(
            f"{sign} {self.text(end)} on {self._with_count(end)}" for sign, end in ends
        )

    def _with_count(self, count: int) -> str:
        return ranks_in_words([rank for rank, own in self.by_rank.items() if own == count], 40)


def heats_of(dump: Dump, report: Report | None = None) -> list[Heat]:
    """Return the numbers to show as heat, unless all are 0: bytes held and received, findings."""
    found = [bytes_held(dump), findings_on(dump, report), bytes_received(dump)]
    return [heat for heat in found if any(heat.by_rank.values())]


def bytes_held(dump: Dump) -> Heat:
    """Count the bytes of all tensors that a rank holds."""
    return Heat("bytes held", {rank: sum(sizes) for rank, sizes in memory_table(dump).by_rank.items()}, in_bytes=True)


def findings_on(dump: Dump, report: Report | None) -> Heat:
    """Count the findings that name a rank; one that many tensors have counts once for each."""
    named = Counter[int]()
    for finding in report.findings if report else ():
        named.update(dict.fromkeys(finding.ranks, len(finding.each)))
    return Heat("findings", {rank: named[rank] for rank in dump.files.mesh.ranks})


def bytes_received(dump: Dump) -> Heat:
    """Count the bytes that a rank receives in a step."""
    counted: dict[int, int] = {}
    for record, ranks in dump.files.alike():
        counted |= dict.fromkeys(ranks, sum(map(received_bytes, record.collectives)))
    return Heat("bytes received in a step", dict(sorted(counted.items())), in_bytes=True)
