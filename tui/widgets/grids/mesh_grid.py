"""The mesh: one cell per rank in a grid of named axes, with signs for the element under the map's cursor."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region, Size

from shardviz.picture.model.palette import WRONG, Colouring

from ...colours import heat_style, rank_style
from ...keys import arrows
from ...model.mesh_plan import MeshPlan
from ...model.messages import RankChosen
from ...model.navigation.lights import Lights
from .grid import DIM, Grid

if TYPE_CHECKING:
    from collections.abc import Iterable

    from textual import events
    from textual.binding import BindingType
    from textual.strip import Strip

    from shardviz.layout.mesh import Mesh
    from shardviz.picture.model.mesh.heat import Heat

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

    BINDINGS: ClassVar[list[BindingType]] = arrows("grid", "move", "To the next rank {}")

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.plan: MeshPlan | None = None
        self.rank: int | None = None
        self.lights = Lights()
        self.colouring = Colouring()
        self._heat: Heat | None = None
        self._styles: dict[tuple[bool, int, bool, bool, bool], Style] = {}
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
            last = self.plan.grid.row_title(self.plan.grid.num_rows - 1)  # no row has longer positions
            titles = [*(mesh.axes[axis] for axis in self.plan.grid.across), last]
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
        cells: list[tuple[str, Style]] = []
        ranks, column = plan.ranks[row].tolist(), left
        for col, begin in plan.columns(left, left + self.size.width - self._gutter):
            if begin > column:
                cells.append((" " * (begin - column), self.base))
            rank = ranks[col]
            sign = self._sign(rank)
            cells.append((f"{f'{sign}{rank}':>{plan.cell - 1}} "[max(column - begin, 0) :], self._style(rank, sign)))
            column = begin + plan.cell
        return _joined(cells)

    def _style(self, rank: int, sign: str) -> Style:
        level = self._heat.level(rank) if self._heat is not None else self.colouring.colour(rank)
        look = (self._heat is not None, level, sign != " ", rank in self.lights.group, rank == self.rank)
        style = self._styles.get(look)
        if style is None:
            style = self._styles[look] = self._style_of(*look)
        return style

    def _style_of(self, is_heat: bool, level: int, has_sign: bool, is_grouped: bool, is_chosen: bool) -> Style:
        fill = heat_style(level, self.colours) or self.base if is_heat else rank_style(level, self.colours)
        return fill + Style(bold=has_sign, underline=is_grouped, reverse=is_chosen)

    def notify_style_update(self) -> None:
        """Paint in other colours."""
        self._styles.clear()
        super().notify_style_update()

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


def _joined(cells: Iterable[tuple[str, Style]]) -> list[Segment]:
    """Return cells as segments, neighbours of one style as one: equal styles are the same object here."""
    segments = []
    for _, run in groupby(cells, key=lambda cell: id(cell[1])):
        texts, styles = zip(*run, strict=True)
        segments.append(Segment("".join(texts), styles[0]))
    return segments
