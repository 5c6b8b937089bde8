"""Where each rank of a mesh stands on the screen: the last axis across, the one before it down, further ones around.

From the last axis on, axes take turns: across, down, across the groups, down the groups, and so on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardviz.layout.mesh import Mesh

GROUP_GAP = 2
"""Cells left free between groups to the right; downwards it is one."""


@dataclass(frozen=True)
class MeshPlan:
    """A mesh laid out as a grid of cells.

    Attributes:
        mesh: The mesh.
    """

    mesh: Mesh

    @cached_property
    def across(self) -> tuple[int, ...]:
        """The axes to the right, outermost first."""
        return tuple(range(self.mesh.ndim - 1, -1, -2))[::-1]

    @cached_property
    def down(self) -> tuple[int, ...]:
        """The axes downwards, outermost first."""
        return tuple(range(self.mesh.ndim - 2, -1, -2))[::-1]

    @cached_property
    def cell(self) -> int:
        """Columns that a rank takes: a sign, its number, a space on either side."""
        return len(str(max(self.mesh.ranks))) + 3

    @cached_property
    def num_columns(self) -> int:
        """Ranks to the right."""
        return math.prod(self.mesh.shape[axis] for axis in self.across)

    @cached_property
    def num_rows(self) -> int:
        """Ranks downwards."""
        return math.prod(self.mesh.shape[axis] for axis in self.down)

    @cached_property
    def _per_group(self) -> tuple[int, int]:
        rows, cols = self.mesh.shape[-2:] if self.mesh.ndim > 1 else (1, self.mesh.shape[-1])
        return (rows if len(self.down) > 1 else self.num_rows), (cols if len(self.across) > 1 else self.num_columns)

    @cached_property
    def size(self) -> tuple[int, int]:
        """Lines and columns of the whole grid."""
        rows, cols = self._per_group
        lines = self.num_rows + (self.num_rows - 1) // rows
        return lines, self.num_columns * self.cell + (self.num_columns - 1) // cols * GROUP_GAP

    def place(self, row: int, col: int) -> tuple[int, int]:
        """Return the line and the column at which a rank's cell begins."""
        rows, cols = self._per_group
        return row + row // rows, col * self.cell + col // cols * GROUP_GAP

    def row_at(self, line: int) -> int | None:
        """Return the row of ranks on a line; None between groups."""
        group, row = divmod(line, self._per_group[0] + 1)
        found = group * self._per_group[0] + row
        return found if row < self._per_group[0] and found < self.num_rows else None

    def col_at(self, column: int) -> int | None:
        """Return the column of ranks at a column of the screen; None between groups."""
        width = self._per_group[1] * self.cell
        group, ahead = divmod(column, width + GROUP_GAP)
        found = group * self._per_group[1] + ahead // self.cell
        return found if ahead < width and found < self.num_columns else None

    def rank_at(self, row: int, col: int) -> int:
        """Return the rank in a row and a column of the grid."""
        return _rank_at(self, row, col)

    def row_and_col(self, rank: int) -> tuple[int, int]:
        """Return the row and the column of the grid in which a rank stands."""
        coord = self.mesh.coord_of(rank)
        found = []
        for axes in (self.down, self.across):
            number = 0
            for axis in axes:
                number = number * self.mesh.shape[axis] + coord[axis]
            found.append(number)
        return found[0], found[1]

    def row_title(self, row: int) -> str:
        """Write where a row stands: `fsdp=1`."""
        parts: list[str] = []
        for axis in reversed(self.down):
            row, position = divmod(row, self.mesh.shape[axis])
            parts.insert(0, f"{self.mesh.axes[axis]}={position}")
        return " ".join(parts)

    def position(self, axis: int, col: int) -> int:
        """Return the position of a column along one of the axes to the right."""
        for other in reversed(self.across):
            col, position = divmod(col, self.mesh.shape[other])
            if other == axis:
                break
        return position


@lru_cache(maxsize=1 << 14)
def _rank_at(plan: MeshPlan, row: int, col: int) -> int:
    coord = [0] * plan.mesh.ndim
    for axes, number in ((plan.down, row), (plan.across, col)):
        for axis in reversed(axes):
            number, coord[axis] = divmod(number, plan.mesh.shape[axis])
    return plan.mesh.rank_at(tuple(coord))
