"""Where each rank of a mesh is on the screen: its cell in the grid of ranks, with gaps between groups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from shardviz.picture.model.holders import ranks_on
from shardviz.picture.model.mesh.rank_grid import grids_of, one_grid

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from shardviz.layout.mesh import Mesh
    from shardviz.picture.model.mesh.rank_grid import RankGrid

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
        found = group * self._per_group[0] + row
        return found if row < self._per_group[0] and found < self.grid.num_rows else None

    def col_at(self, column: int) -> int | None:
        """Return the column of ranks at a column of the screen; None between groups."""
        width = self._per_group[1] * self.cell
        group, ahead = divmod(column, width + GROUP_GAP)
        found = group * self._per_group[1] + ahead // self.cell
        return found if ahead < width and found < self.grid.num_cols else None
