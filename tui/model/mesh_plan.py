"""Where each rank of a mesh is on the screen, and the sign that it has there."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from shardviz.picture.model.holders import mask_of, ranks_on
from shardviz.picture.model.mesh.rank_grid import grids_of, one_grid
from shardviz.picture.model.palette import WRONG

if TYPE_CHECKING:
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
    """A mesh laid out on lines and columns of the screen."""

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
    def lines(self) -> list[int]:
        """The line of the screen on which each row of ranks is."""
        in_group = grids_of(self.mesh, 1)[0][0].num_rows
        return [row + row // in_group for row in range(self.grid.num_rows)]

    @cached_property
    def columns(self) -> list[int]:
        """The column of the screen at which the cells of each column of ranks begin."""
        in_group = grids_of(self.mesh, 1)[0][0].num_cols
        return [col * self.cell + col // in_group * GROUP_GAP for col in range(self.grid.num_cols)]

    def row_at(self, line: int) -> int | None:
        """Return the row of ranks on a line; None between groups."""
        row = bisect_right(self.lines, line) - 1
        return row if self.lines[row] == line else None

    def col_at(self, column: int) -> int | None:
        """Return the column of ranks at a column of the screen; None between groups."""
        col = bisect_right(self.columns, column) - 1
        return col if col >= 0 and column < self.columns[col] + self.cell else None


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
    mesh, guilty = document.mesh, frozenset[int]()
    group = frozenset(mesh.group_of(rank, axis)) if axis and rank is not None and rank in mesh else frozenset[int]()
    if document.is_about(selection.finding, selection.entry):
        guilty = frozenset(document.findings[selection.finding].ranks)
    lights = Lights(0, 0, document.missing, group, guilty)
    sides = document.drawn(selection.entry, selection.name)
    if selection.plane is None or sides is None:
        return lights
    cell = sides.at(selection.plane.at)
    claimed = cell.claimed if sides.has_claimed else cell.held
    return replace(lights, claimed=claimed, held=cell.held if sides.has_held else claimed)


def takes_part(document: Document, collective: Collective, rank: int) -> Lights:
    """Mark the ranks that take part in a collective, and the group of one of them."""
    mask = mask_of(collective.ranks)
    return Lights(mask, mask, document.missing, collective.group_of(document.mesh, rank))
