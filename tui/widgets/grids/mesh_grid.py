"""The mesh: one cell per rank in a grid of named axes, with signs for the element under the map's cursor."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region, Size

from shardviz.picture.model.palette import Colouring

from ...colours import heat_style, rank_style
from ...keys import arrows
from ...model.mesh_plan import MeshPlan
from ...model.messages import RankChosen
from ...model.navigation.lights import Lights
from .grid import DIM, Grid

if TYPE_CHECKING:
    from textual import events
    from textual.binding import BindingType
    from textual.strip import Strip

    from shardviz.layout.mesh import Mesh
    from shardviz.picture.model.mesh.heat import Heat

LEGEND = "● holds it    ○ should, does not\n✗ should not  ≠ in the finding\n? no file"


class MeshGrid(Grid):
    """A number for each rank, with a sign for whether it holds the element; the cursor is on the chosen rank."""

    HELP = """\
## The mesh

Every rank in its place: the last axis runs to the right, the one before it down, further axes make groups.

`●` holds the element under the map's cursor, `○` should hold it and does not, `✗` holds it and should not,
`≠` is one of the ranks that the chosen finding names, `?` has no readable file in the dump.

The map beside it shows the blocks of the chosen rank. The ranks of its group along an axis can be underlined.
Heat is the bytes that ranks hold, the findings about them or the bytes that they receive: `▁` is the least, `█` the
most.
"""

    BINDINGS: ClassVar[list[BindingType]] = arrows("grid", "move", "To the next rank {}")

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.plan: MeshPlan | None = None
        self.rank: int | None = None
        self.lights = Lights()
        self.colouring = Colouring()
        self._heat: Heat | None = None
        self._gutter = 0
        self._heads = 1

    @property
    def heat(self) -> Heat | None:
        """What ranks are coloured by, with a sign for how much; None for their place."""
        return self._heat

    @heat.setter
    def heat(self, heat: Heat | None) -> None:
        if heat is not self._heat:
            self._heat = heat
            self.refresh()

    def show(self, mesh: Mesh, rank: int | None, lights: Lights, colouring: Colouring | None = None) -> None:
        """Show a mesh, with the cursor on one rank; by default ranks get their colours by all of its axes."""
        colouring = colouring or Colouring(mesh)
        if self.plan is None or self.plan.mesh != mesh:
            self.plan = MeshPlan(mesh)
            lines, columns = self.plan.size
            width = self.virtual_size.width
            titles = [mesh.axes[axis] for axis in self.plan.grid.across]
            titles += map(self.plan.grid.row_title, range(self.plan.grid.num_rows))
            self._gutter, self._heads = max(map(len, titles)) + 1, len(self.plan.grid.across)
            self.extend(Size(self._gutter + columns, self._heads + lines))
            is_clipped = min(width, self.virtual_size.width) > self.size.width > 0
            if self.is_attached and self.styles.is_auto_width and width != self.virtual_size.width and not is_clipped:
                self.refresh(layout=True)
        elif (lights, colouring) == (self.lights, self.colouring):
            if rank != self.rank:
                self._move_to(rank)
            return
        self.rank, self.lights, self.colouring = rank, lights, colouring
        self.refresh()
        self._scroll_to_cursor()

    def get_content_width(self, container: Size, viewport: Size) -> int:
        """Take as many columns as the mesh has, and one for the scroll bar."""
        return self.virtual_size.width + self.scrollbar_size_vertical

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
                sign = self._sign(rank)
                cell = f"{f'{sign}{rank}':>{plan.cell - 1}} "[column - plan.place(row, col)[1] :]
                style = self._style(rank, sign)
            if style is not before:
                segments.append(Segment(text, before))
                text, before = "", style
            text += cell
            column += len(cell)
        return [*segments, Segment(text, before)]

    def _style(self, rank: int, sign: str) -> Style:
        if self._heat is not None:
            fill = heat_style(self._heat.level(rank), self.colours) or self.base
        else:
            fill = rank_style(self.colouring.colour(rank), self.colours)
        return _style(fill, sign != " ", rank in self.lights.group, rank == self.rank)

    def _sign(self, rank: int) -> str:
        return self._heat.sign(rank) if self._heat is not None else self.lights.sign(rank)

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
def _style(fill: Style, has_sign: bool, is_grouped: bool, is_chosen: bool) -> Style:
    """Return the style of a rank's cell: equal ones are the same object, so that cells can be joined."""
    return fill + Style(bold=has_sign, underline=is_grouped, reverse=is_chosen)
