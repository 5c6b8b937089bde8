"""The mesh: one cell per rank in a grid of named axes, with signs for the element under the map's cursor."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region, Size

from shardviz.picture.model.palette import VERMILLION, rank_colour

from ..colours import ink, rank_style
from ..keys import arrows
from ..model.lights import Lights
from ..model.mesh_plan import MeshPlan
from ..model.messages import RankChosen
from .grid import DIM, Grid

if TYPE_CHECKING:
    from textual import events
    from textual.binding import BindingType
    from textual.strip import Strip

    from shardviz.layout.mesh import Mesh

LEGEND = "● holds it    ○ should, does not\n✗ should not  ≠ in the finding\n? no file"


class MeshGrid(Grid):
    """A number for each rank, with a sign for whether it holds the element; the cursor is on the chosen rank."""

    HELP = """\
## The mesh

Every rank in its place: the last axis runs to the right, the one before it down, further axes make groups.

`●` holds the element under the map's cursor, `○` should hold it and does not, `✗` holds it and should not,
`≠` is one of the ranks that the chosen finding names, `?` has no readable file in the dump.

The map beside it shows the blocks of the chosen rank. The ranks of its group along an axis can be underlined.
"""

    BINDINGS: ClassVar[list[BindingType]] = arrows("grid", "move", "To the next rank {}")

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.plan: MeshPlan | None = None
        self.rank: int | None = None
        self.lights = Lights()
        self._gutter = 0
        self._heads = 1

    def show(self, mesh: Mesh, rank: int | None, lights: Lights) -> None:
        """Show a mesh, with the cursor on one rank."""
        if self.plan is None or self.plan.mesh != mesh:
            self.plan = MeshPlan(mesh)
            lines, columns = self.plan.size
            titles = [mesh.axes[axis] for axis in self.plan.grid.across]
            titles += map(self.plan.grid.row_title, range(self.plan.grid.num_rows))
            self._gutter, self._heads = max(map(len, titles)) + 1, len(self.plan.grid.across)
            self.extend(Size(self._gutter + columns, self._heads + lines))
        elif lights == self.lights:
            if rank != self.rank:
                self._move_to(rank)
            return
        self.rank, self.lights = rank, lights
        self.refresh()
        self._scroll_to_cursor()

    def _move_to(self, rank: int | None) -> None:
        """Move the cursor, and repaint only the lines that it leaves and reaches."""
        for place in (self.rank, rank):
            self.rank = rank
            if self.plan is not None and place is not None and place in self.plan.mesh:
                line = self.plan.place(*self.plan.grid.row_and_col(place))[0] + self._heads - self.scroll_offset.y
                self.refresh(Region(0, line, self.size.width, 1))
        self._scroll_to_cursor()

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
        """Write the ranks of a row, neighbours that look alike together."""
        segments: list[Segment] = []
        text, before, column = "", self.base, left
        while column < min(left + self.size.width - self._gutter, plan.size[1]):
            col, cell, style = plan.col_at(column), " ", self.base
            if col is not None:
                rank = plan.grid.rank_at(row, col)
                cell = f"{self.lights.sign(rank)}{rank:>{plan.cell - 2}} "[column - plan.place(row, col)[1] :]
                style = self._style(plan, rank)
            if style is not before:
                segments.append(Segment(text, before))
                text, before = "", style
            text += cell
            column += len(cell)
        return [*segments, Segment(text, before)]

    def _style(self, plan: MeshPlan, rank: int) -> Style:
        sign, is_grouped = self.lights.sign(rank), rank in self.lights.group
        colour = rank_colour(rank, plan.mesh) if sign == "●" else -1
        return _style(sign, colour, self.base, self.behind, is_grouped, rank == self.rank)

    def _header(self, plan: MeshPlan, head: int, left: int) -> Strip:
        """Write the positions along one axis over the first column of each."""
        axis, width, line, before = plan.grid.across[head], self.size.width - self._gutter, "", -1
        for col in range(plan.grid.num_cols):
            position = plan.grid.position(axis, col)
            end = plan.place(0, col)[1] + plan.cell - 1 - left
            if end > width:
                break
            if position != before and end - len(str(position)) >= len(line):
                line = line.ljust(end - len(str(position))) + str(position)
            before = position
        text = plan.mesh.axes[axis].ljust(self._gutter) + line
        return self.strip_of([Segment(text, self.base + DIM)])

    def action_move(self, down: int, right: int) -> None:
        """Go to a neighbour."""
        if self.plan is None:
            return
        known = self.rank is not None and self.rank in self.plan.mesh
        grid = self.plan.grid
        row, col = grid.row_and_col(self.rank if known and self.rank is not None else self.plan.mesh.ranks[0])
        row = min(max(row + down, 0), grid.num_rows - 1)
        col = min(max(col + right, 0), grid.num_cols - 1)
        self.post_message(RankChosen(grid.rank_at(row, col)))

    def _scroll_to_cursor(self) -> None:
        if self.plan is not None and self.rank is not None and self.rank in self.plan.mesh:
            line, column = self.plan.place(*self.plan.grid.row_and_col(self.rank))
            box = Region(column, line, self.plan.cell + self._gutter, 1 + self._heads)
            self.bring_into_view(box)

    def fit(self) -> None:
        """Keep the cursor in view."""
        self._scroll_to_cursor()

    def on_click(self, event: events.Click) -> None:
        """Go to the rank under the mouse."""
        left, top = self.scroll_offset
        if self.plan is None or event.y < self._heads or event.x < self._gutter:
            return
        row, col = self.plan.row_at(event.y - self._heads + top), self.plan.col_at(event.x - self._gutter + left)
        if row is not None and col is not None:
            self.post_message(RankChosen(self.plan.grid.rank_at(row, col)))


@lru_cache(maxsize=4096)
def _style(sign: str, colour: int, base: Style, behind: str, is_grouped: bool, is_chosen: bool) -> Style:
    """Return the style of a rank's cell: equal ones are the same object, so that cells can be joined."""
    style = base + DIM
    if sign == "●":
        style = rank_style(colour, behind) + Style(bold=True)
    elif sign != " ":
        style = base + ink(VERMILLION, bold=True)
    if is_grouped:
        style += Style(underline=True, dim=False)
    return style + Style(reverse=True, dim=False) if is_chosen else style
