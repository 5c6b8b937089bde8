"""The mesh: one cell per rank in a grid of named axes, with signs for the element under the cursor."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from typing import TYPE_CHECKING

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region, Size

from shardviz.picture.model.holders import mask_of, ranks_on
from shardviz.picture.model.mesh import grids_of, one_grid
from shardviz.picture.model.palette import WRONG, Coloring

from ..colors import heat_style, rank_style
from ..keys import arrows, keys
from ..model.selection import Picked
from .grid import DIM, Grid

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from textual import events
    from textual.strip import Strip

    from shardviz.layout.mesh import Mesh
    from shardviz.picture.model.mesh import Heat, RankGrid
    from shardviz.picture.model.sides import Sides
    from shardviz.picture.text.paint import Side

    from ..model.document import Document
    from ..model.selection import Selection
    from ..model.step import Collective


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


LEGEND = f"● holds it  ○ should, does not\n+ holds it, should not\n{WRONG} in the finding  ? no file"


class MeshGrid(Grid):
    """A number for each rank, with a sign for whether it holds the element; the cursor is on the chosen rank."""

    HELP = """\
## The mesh

Every rank in its place: the last axis runs to the right, the one before it down, further axes make groups.

`●` holds the element under the map's cursor, `○` should hold it and does not, `+` holds it and should not,
`✗` is one of the ranks that the chosen finding names, `?` has no readable file in the dump.

The map beside it shows the blocks of the chosen rank. The ranks of its group along an axis can be underlined.
Heat is the bytes that ranks hold, the findings about them or the bytes that they receive: `▁` is the least, `█` the
most.
"""

    BINDINGS = keys("grid", hidden=arrows("move", "To the next rank {}"))

    plan: MeshPlan | None = None
    rank: int | None = None
    lights = Lights()
    _coloring = Coloring()
    _heat: Heat | None = None
    _gutter = 0
    _heads = 1

    def show(
        self, mesh: Mesh, rank: int | None, lights: Lights, coloring: Coloring | None = None, heat: Heat | None = None
    ) -> None:
        """Show a mesh with the signs of ranks and the cursor on one; colors are by axes, by default all, or by heat."""
        if self.plan is None or self.plan.mesh != mesh:
            self.plan = plan = MeshPlan(mesh)
            last = plan.grid.row_title(plan.grid.num_rows - 1)  # no row has longer positions
            titles = [*(mesh.axes[axis] for axis in plan.grid.across), last]
            self._gutter, self._heads = max(map(len, titles)) + 1, len(plan.grid.across)
            self.virtual_size = Size(self._gutter + plan.columns[-1] + plan.cell, self._heads + plan.lines[-1] + 1)
        self.rank, self.lights, self._heat, self._coloring = rank, lights, heat, coloring or Coloring(mesh)
        self.refresh()
        self.scroll_to_cursor()

    def get_content_width(self, container: Size, viewport: Size) -> int:
        """Take as many columns as the mesh has, and one for the scroll bar."""
        return self.virtual_size.width + self.scrollbar_size_vertical

    def render_line(self, y: int) -> Strip:
        """Paint one line of the screen."""
        if self.plan is None:
            return self.blank
        left, top = self.scroll_offset
        if y < self._heads:
            return self._header(self.plan, y, left)
        row = self.plan.row_at(y - self._heads + top)
        if row is None:
            return self.blank
        title = self.plan.grid.row_title(row).ljust(self._gutter)
        segments = [Segment(title, self.base + DIM), *self._row(self.plan, row, left)]
        return self.strip_of(segments)

    def _row(self, plan: MeshPlan, row: int, left: int) -> list[Segment]:
        """Write the ranks of a row, neighbors that look alike together."""
        cells: list[tuple[str, Style]] = []
        ranks, column, heat = plan.ranks[row].tolist(), left, self._heat
        first = bisect_right(plan.columns, left - plan.cell)
        stop = bisect_left(plan.columns, left + self.size.width - self._gutter)
        for rank, begin in zip(ranks[first:stop], plan.columns[first:stop], strict=True):
            if begin > column:
                cells.append((" " * (begin - column), self.base))
            sign = heat.sign(rank) if heat is not None else self.lights.sign(rank)
            level = heat.level(rank) if heat is not None else self._coloring.color(rank)
            style = (heat_style if heat is not None else rank_style)(level, self.palette) or self.base
            style += _mark(sign != " ", rank in self.lights.group, rank == self.rank)
            cells.append((f"{f'{sign}{rank}':>{plan.cell - 1}} "[max(column - begin, 0) :], style))
            column = begin + plan.cell
        runs = ([*run] for _, run in groupby(cells, key=lambda cell: cell[1]))
        return [Segment("".join(text for text, _ in run), run[0][1]) for run in runs]

    def _header(self, plan: MeshPlan, head: int, left: int) -> Strip:
        """Write the positions along one axis over the first column of each."""
        axis, width, line, before = plan.grid.across[head], self.size.width - self._gutter, "", -1
        for col in range(plan.grid.num_cols):
            position = plan.grid.position(axis, col)
            end = plan.columns[col] + plan.cell - 1 - left
            if end > width:
                break
            if position != before and end - len(str(position)) >= len(line):
                line = line.ljust(end - len(str(position))) + str(position)
            before = position
        text = plan.mesh.axes[axis].ljust(self._gutter) + line
        return self.strip_of([Segment(text, self.base + DIM)])

    def action_move(self, down: int, right: int) -> None:
        """Go to a neighbor."""
        if self.plan is not None:
            grid, mesh = self.plan.grid, self.plan.mesh
            row, col = grid.row_and_col(self.rank if self.rank is not None and self.rank in mesh else mesh.ranks[0])
            row = min(max(row + down, 0), grid.num_rows - 1)
            col = min(max(col + right, 0), grid.num_cols - 1)
            self.post_message(Picked(grid.rank_at(row, col)))

    def scroll_to_cursor(self) -> None:
        """Keep the cursor in view."""
        plan = self.plan
        if plan is not None and self.rank is not None and self.rank in plan.mesh:
            row, col = plan.grid.row_and_col(self.rank)
            size = plan.cell + self._gutter, 1 + self._heads
            self.bring_into_view(Region(plan.columns[col], plan.lines[row], *size))

    def on_click(self, event: events.Click) -> None:
        """Go to the rank under the mouse."""
        left, top = self.scroll_offset
        if self.plan is None or event.y < self._heads or event.x < self._gutter:
            return
        row, col = self.plan.row_at(event.y - self._heads + top), self.plan.col_at(event.x - self._gutter + left)
        if row is not None and col is not None:
            self.post_message(Picked(self.plan.grid.rank_at(row, col)))


@lru_cache(maxsize=8)
def _mark(has_sign: bool, is_grouped: bool, is_chosen: bool) -> Style:
    return Style(bold=has_sign, underline=is_grouped, reverse=is_chosen)
