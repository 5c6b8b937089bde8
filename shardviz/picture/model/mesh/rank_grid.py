"""Which rank of a mesh is in which cell of a grid, for the pictures of a mesh in text, SVG and the TUI.

The last axis runs to the right and the one before it down. Axes further out make several grids, or one large grid in
which axes take turns: across, down, across the groups, down the groups, and so on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice, pairwise, product
from typing import TYPE_CHECKING

from shardviz.picture.model.palette import WRONG
from shardviz.text import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from shardviz.layout.mesh import Coord, Mesh


@dataclass(frozen=True)
class RankGrid:
    """A mesh, or the part of it at one position on its outer axes, as a grid of ranks.

    Attributes:
        mesh: The mesh.
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
        mesh: The mesh.
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


def kept(count: int, most: int, wanted: Collection[int] = ()) -> list[int | range]:
    """Return the positions to show, and between them the ranges that are left out.

    A single position is never left out: the line that says so would take its place.

    Args:
        count: How many there are.
        most: How many lines they may take.
        wanted: Positions that are shown before others; the first and the last always are.
    """
    if count <= most:
        return list(range(count))
    shown = {0, count - 1}
    for position in (*sorted(wanted), *range(count)):
        if _lines(shown | {position}, count) <= most:
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


def _lines(shown: Collection[int], count: int) -> int:
    return len(shown) + sum(after > before + 1 for before, after in pairwise(sorted(shown)))


def marked_among(ranks: Iterable[int], marked: Collection[int], sign: str = WRONG) -> str:
    """Say how many of some ranks are marked: `, 12 ranks ✗`; nothing if none are."""
    count = sum(rank in marked for rank in ranks)
    return f", {counted(count, 'rank')} {sign}" if count else ""


def spread(ranks: Iterable[int], grid: RankGrid) -> tuple[set[int], set[int]]:
    """Return the rows and the columns of a grid that have any of some ranks."""
    places = [grid.row_and_col(rank) for rank in ranks if rank in grid]
    return {row for row, _ in places}, {col for _, col in places}
