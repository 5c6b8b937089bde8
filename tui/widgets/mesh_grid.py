"""The mesh: one cell per rank in a grid of named axes, with signs for the element under the map's cursor."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region, Size

from shardviz.picture.model.palette import WRONG, Coloring

from ..colors import heat_style, rank_style
from ..keys import arrows
from ..model.mesh_plan import Lights, MeshPlan
from ..model.messages import RankChosen
from .grid import DIM, Grid

if TYPE_CHECKING:
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

    plan: MeshPlan | None = None
    rank: int | None = None
    lights = Lights()
    _coloring = Coloring()
    _heat: Heat | None = None
    _gutter = 0
    _heads = 1

    def show(
        self,
        mesh: Mesh,
        rank: int | None,
        lights: Lights,
        coloring: Coloring | None = None,
        heat: Heat | None = None,
    ) -> None:
        """Show a mesh, with the cursor on one rank.

        Args:
            mesh: The mesh.
            rank: The rank that the cursor is on.
            lights: The signs of ranks.
            coloring: The axes by which ranks get their colors; by default all of the mesh.
            heat: A number by which they are colored instead, with a sign for how much.
        """
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
            self.post_message(RankChosen(grid.rank_at(row, col)))

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
            self.post_message(RankChosen(self.plan.grid.rank_at(row, col)))


@lru_cache(maxsize=8)
def _mark(has_sign: bool, is_grouped: bool, is_chosen: bool) -> Style:
    return Style(bold=has_sign, underline=is_grouped, reverse=is_chosen)
