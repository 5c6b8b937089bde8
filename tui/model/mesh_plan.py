"""Where each rank of a mesh is on the screen, and the sign that it has there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from shardviz.errors import ShardvizError
from shardviz.picture.model.holders import mask_of, ranks_on
from shardviz.picture.model.mesh.rank_grid import grids_of, one_grid
from shardviz.picture.model.palette import WRONG

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from shardviz.layout.mesh import Mesh
    from shardviz.picture.model.mesh.rank_grid import RankGrid
    from shardviz.picture.model.sides import Sides
    from shardviz.picture.text.paint import Side

    from .document import Document
    from .selection import Selection
    from .step import Collective


GROUP_GAP = 2
"""Cells left free between groups to the right; downwards it is one."""


@dataclass(frozen=True)
class MeshPlan:
    """A mesh laid out on lines and columns of the screen.

    Attributes:
        mesh: The mesh.
    """

    mesh: Mesh

    @cached_property
    def grid(self) -> RankGrid:
        """Which rank is in which row and column."""
        return one_grid(self.mesh)

    @cached_property
    def ranks(self) -> NDArray[np.int64]:
        """The ranks of each row, column by column."""
        across, down = self.grid.across, self.grid.down
        placed = ranks_on(self.mesh).reshape(self.mesh.shape).transpose(*down, *across)
        rows: NDArray[np.int64] = placed.reshape(self.grid.num_rows, self.grid.num_cols)
        return rows

    @cached_property
    def cell(self) -> int:
        """Columns that a rank takes: a sign, its number, a space behind it."""
        return len(str(self.ranks.max())) + 2

    @cached_property
    def _per_group(self) -> tuple[int, int]:
        """Rows and columns of ranks in a group."""
        inner = grids_of(self.mesh, 1)[0][0]
        return inner.num_rows, inner.num_cols

    def columns(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the columns of ranks that columns of the screen show, each with where its cell begins."""
        cols = self._per_group[1]
        width = cols * self.cell
        for col in range(first // (width + GROUP_GAP) * cols, self.grid.num_cols):
            begin = col * self.cell + col // cols * GROUP_GAP
            if begin >= stop:
                return
            if begin + self.cell > first:
                yield col, begin

    @cached_property
    def size(self) -> tuple[int, int]:
        """Lines and columns of the whole grid."""
        rows, cols = self._per_group
        lines = self.grid.num_rows + (self.grid.num_rows - 1) // rows
        return lines, self.grid.num_cols * self.cell + (self.grid.num_cols - 1) // cols * GROUP_GAP

    def place(self, row: int, col: int) -> tuple[int, int]:
        """Return the line and the column at which a rank's cell begins."""
        rows, cols = self._per_group
        return row + row // rows, col * self.cell + col // cols * GROUP_GAP

    def row_at(self, line: int) -> int | None:
        """Return the row of ranks on a line; None between groups."""
        group, row = divmod(line, self._per_group[0] + 1)
        rank_row = group * self._per_group[0] + row
        return rank_row if row < self._per_group[0] and rank_row < self.grid.num_rows else None

    def col_at(self, column: int) -> int | None:
        """Return the column of ranks at a column of the screen; None between groups."""
        width = self._per_group[1] * self.cell
        group, ahead = divmod(column, width + GROUP_GAP)
        rank_col = group * self._per_group[1] + ahead // self.cell
        return rank_col if ahead < width and rank_col < self.grid.num_cols else None


@dataclass(frozen=True)
class Lights:
    """The marks of ranks on the mesh.

    Attributes:
        claimed: The ranks that hold the element by the placements, as a mask.
        held: The ranks that hold it by the ids, as a mask; the same as `claimed` if there are no ids.
        missing: Ranks whose files are missing or damaged.
        group: Ranks that are underlined, as one group along an axis.
        guilty: Ranks that the chosen finding names.
    """

    claimed: int = 0
    held: int = 0
    missing: frozenset[int] = frozenset()
    group: frozenset[int] = frozenset()
    guilty: frozenset[int] = frozenset()

    def sign(self, rank: int) -> str:
        """Return the sign of a rank."""
        if rank in self.missing:
            return "?"
        claimed, held = self.claimed >> rank & 1, self.held >> rank & 1
        if rank in self.guilty and claimed == held:
            return WRONG
        return " +○●"[2 * claimed + held]


def drawn_side(sides: Sides, side: Side) -> Side:
    """Return the side to draw instead of one that is not known, on which nobody would seem to hold anything."""
    if sides.has_claimed == sides.has_held or sides.marks_each_side or not all(sides.holders.shape):
        return side
    return "held" if sides.has_held else "claimed"


def lights_of(document: Document, selection: Selection, rank: int | None = None, axis: str = "") -> Lights:
    """Mark the holders of the element under the map's cursor, and the group of a rank along an axis."""
    files = document.dump.files
    group: frozenset[int] = frozenset()
    if axis and rank is not None and rank in files.mesh:
        group = frozenset(files.mesh.group_of(rank, axis))
    missing = document.missing
    guilty = _guilty(document, selection)
    if selection.plane is None:
        return Lights(missing=missing, group=group, guilty=guilty)
    try:
        sides = document.sides(selection.entry, selection.name)
    except ShardvizError:
        return Lights(missing=missing, group=group, guilty=guilty)
    cell = sides.at(selection.plane.at)
    claimed = cell.claimed if sides.has_claimed else cell.held
    return Lights(claimed, cell.held if sides.has_held else claimed, missing, group, guilty)


def _guilty(document: Document, selection: Selection) -> frozenset[int]:
    """Return the ranks that the chosen finding names; none where it is about another tensor."""
    if not document.entries or selection.finding >= len(document.findings):
        return frozenset()
    finding = document.findings[selection.finding]
    is_of_this = not finding.tensor or selection.finding in document.entries[selection.entry].findings
    return frozenset(finding.ranks) if is_of_this else frozenset()


def takes_part(document: Document, collective: Collective, rank: int) -> Lights:
    """Mark the ranks that take part in a collective, and the group of one of them."""
    files, mask = document.dump.files, mask_of(collective.ranks)
    return Lights(mask, mask, document.missing, collective.group_of(files.mesh, rank))
