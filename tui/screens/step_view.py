"""The step: its modules or its collectives, the ranks that take part, before and after, a pipeline's schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rich.segment import Segment
from rich.style import Style
from textual import on
from textual.containers import Horizontal
from textual.geometry import Region, Size
from textual.reactive import var
from textual.widgets import Static

from shardviz.dump.costs import duration
from shardviz.picture.model.palette import rank_color
from shardviz.picture.model.step import SHORT, SIDES
from shardviz.text import bytes_text, counted, printable

from ..colors import rank_style
from ..keys import arrows, keys
from ..model.selection import Picked, rank_of
from ..model.step import Collective, Modules, Step, axes_text, modules_of, moment_line, moments, numbers_text
from ..model.tree import after
from ..model.usage import bar
from ..widgets.frame import Box, ScrollBox
from ..widgets.grid import BOLD, CHOSEN, DIM, Grid, Lines
from ..widgets.mesh_grid import MeshGrid, takes_part
from .view import View

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual import events
    from textual.app import ComposeResult
    from textual.strip import Strip

    from shardviz.dump.costs import Timeline
    from shardviz.dump.records.step import StageRecord
    from shardviz.layout.mesh import Mesh

    from ..model.document import Document
    from ..model.selection import Selection
    from ..model.step import Moment


LEGEND = "a0 forward of micro-batch 0 through the first stage, b0 the second  A0=== backward  · idle"
SAME = Style(underline=True, bold=True)
"""The passes of the micro-batch that the cursor is on, so that its way through the stages shows."""


class ScheduleGrid(Grid):
    """Forward and backward passes as cells to scale in time, one line per rank, with a cursor on one pass."""

    HELP = """\
## The pipeline

One line per rank, time to the right. `a3` is the forward pass of micro-batch 3 through the rank's first stage (`b3`
through its second), `A3` is the backward pass, which counts as twice as long; `·` is a rank with nothing to do.
The order on each rank is the real one; each pass begins as early as it could. The way of the chosen micro-batch
through the stages is underlined.
"""

    BINDINGS = keys(
        "schedule",
        hidden=[
            *arrows("move", "To the next pass {}"),
            ("home", "end(0)", "First", "To the rank's first pass"),
            ("end", "end(-1)", "Last", "To the rank's last pass"),
        ],
    )

    timeline: Timeline | None = None
    row = at = 0
    _mesh: Mesh | None = None
    _ranks: Sequence[int] = ()
    _cell = _gutter = 1

    def show(self, times: Timeline | None, mesh: Mesh) -> None:
        """Show a schedule of ranks of a mesh."""
        if times is self.timeline:
            return
        self._mesh = mesh
        self.timeline, self.row, self.at = times, 0, 0
        if times is not None:
            self._ranks = list(times.begins)
            self._gutter = len(f"rank {max(self._ranks)}") + 1
            self.styles.height = len(self._ranks)
        self.fit()

    def fit(self) -> None:
        """Leave a space between passes if there is room for it."""
        if (times := self.timeline) is not None:
            self._cell = 1 + len(str(times.num_microbatches - 1))
            self._cell += self._gutter + (self._cell + 1) * times.length <= self.room.width
            self.virtual_size = Size(self._gutter + self._cell * times.length, len(self._ranks))
        self.refresh()

    @property
    def rank(self) -> int:
        """The rank that the cursor is on."""
        return self._ranks[self.row]

    @property
    def chosen(self) -> tuple[StageRecord, int] | None:
        """The pass under the cursor, and the time at which it begins."""
        passes = self.timeline.begins[self.rank] if self.timeline else ()
        return passes[min(self.at, len(passes) - 1)] if passes else None

    def render_line(self, y: int) -> Strip:
        """Paint the line of one rank."""
        left, top = self.scroll_offset
        row = y + top
        if self.timeline is None or row >= len(self._ranks):
            return self.blank
        name = Segment(f"rank {self._ranks[row]}".ljust(self._gutter), self.base + (BOLD if row == self.row else DIM))
        return self.strip_of([name, *self._cells(self.timeline, row, left)])

    def _cells(self, times: Timeline, row: int, left: int) -> list[Segment]:
        """Paint the passes of a rank and the gaps between them, as far as they are on screen."""
        rank, end = self._ranks[row], left + self.size.width - self._gutter
        passes = times.begins[rank]
        segments, at = [], left
        for record, begin in [*passes, (None, times.length)]:
            first = begin * self._cell
            if at < min(first, end):
                dots = "".join("·" if column % self._cell == 0 else " " for column in range(at, min(first, end)))
                segments.append(Segment(dots, self.base + DIM))
                at = min(first, end)
            if record is None or at >= end:
                break
            width = duration(record) * self._cell
            if (last := first + width) > at:
                name = times.label(rank, record)
                text = f"{name.ljust(width - (width > len(name)), '=') if record.backward else name:<{width}}"
                segments.append(Segment(text[at - first : min(last, end) - first], self._style(row, rank, record)))
                at = min(last, end)
        return segments

    def _style(self, row: int, rank: int, record: StageRecord) -> Style:
        style = rank_style(rank_color(rank, self._mesh), self.palette)
        chosen = self.chosen
        if chosen is None or record.microbatch != chosen[0].microbatch:
            return style
        return style + (CHOSEN if row == self.row and record is chosen[0] else SAME)

    def action_move(self, down: int, right: int) -> None:
        """Go to another rank, to what it does at that time, or to the pass before or after."""
        if self.timeline is not None and self.chosen is not None:
            row = min(max(self.row + down, 0), len(self._ranks) - 1)
            self._go(row, _at(self.timeline.begins[self._ranks[row]], self.chosen[1]) if down else self.at + right)

    def action_end(self, index: int) -> None:
        """Go to the rank's first or last pass."""
        if self.timeline is not None:
            self._go(self.row, index % max(len(self.timeline.begins[self.rank]), 1))

    def _go(self, row: int, at: int) -> None:
        """Put the cursor on a pass, or on the nearest one that there is, and post its rank."""
        assert self.timeline is not None, "there are passes"
        self.row, last = row, len(self.timeline.begins[self._ranks[row]]) - 1
        self.at = max(min(at, last), 0)
        self.refresh()
        self.post_message(Picked(self.rank))
        if (chosen := self.chosen) is not None:
            width = duration(chosen[0]) * self._cell + self._gutter
            self.bring_into_view(Region(chosen[1] * self._cell, self.row, width, 1))

    def on_click(self, event: events.Click) -> None:
        """Put the cursor under the mouse."""
        left, top = self.scroll_offset
        row = event.y + top
        if self.timeline is not None and row < len(self._ranks) and event.x >= self._gutter:
            time = (event.x - self._gutter + left) // self._cell
            self._go(row, _at(self.timeline.begins[self._ranks[row]], time))


def pipeline_text(times: Timeline | None) -> str:
    """Write the title of a schedule: its sizes, and the bubble compared with the closed formula."""
    if times is None:
        return "Pipeline"
    stages = f" × {times.stages_per_rank} stages" if times.stages_per_rank > 1 else ""
    return (
        f"Pipeline of {len(times.begins)} ranks{stages}, {times.num_microbatches} micro-batches: "
        f"idle {times.bubble:.1%}, by the formula {times.formula:.1%}"
    )


def pass_text(rank: int, record: StageRecord, begin: int) -> str:
    """Describe one pass."""
    way = "backward" if record.backward else "forward"
    end = begin + duration(record)
    return f"rank {rank}  stage {record.stage}, micro-batch {record.microbatch} {way}, from {begin} to {end}"


def _at(passes: tuple[tuple[StageRecord, int], ...], time: int) -> int:
    """Return the last pass that has begun at a time."""
    return max(sum(begin <= time for _, begin in passes) - 1, 0)


COLUMNS_TO_BAR = 20
"""Columns of the screen for each column of the longest bar."""

MOST_LOOKED_AT = 64
"""Ranks whose numbers are looked at for the width of a column."""


class ModuleLines(Lines):
    """The list of the calls, with a cursor on one."""

    HELP = """\
## The step by module

The calls of the step's modules in the order in which they ran, each beside the unsharded model's. Before the name stand
four signs: what went in, what came out, and the gradients of what came out and of what went in.

- `✓` every rank has its part of the unsharded model's, `+` the terms of a sum, `~` its slices in another order.
- `✗` something else, `≠` slices several times, `|` cut from the graph, `0` a gradient that did not come.
- **enter** opens a call and closes it; the first wrong one is open from the start, with its numbers beside it.
- **m** goes back to the collectives.
"""


class MomentLines(Lines):
    """The list of the ranks' values before and after."""

    HELP = """\
## Before and after

Each rank's values when it called the collective, and when the collective was done; the ranks of a group are listed
together, and the chosen one's is underlined on the mesh.
"""


class StepView(View["Document"]):
    """The step's modules, or its collectives with the chosen one in full, and a pipeline's schedule if one ran."""

    NAME = "step"
    TITLE = "Step"
    TOOLTIP = "The collectives of a training step"
    FOCUS = "#collectives"
    HELP = """\
## The step

The collectives of one training step, in the order in which they began. Identical layers are one line.

- `→` ran in the forward pass, `←` in the backward pass, `·` outside of all modules: the loop itself called it.
- *bytes* is the size of the whole tensor that was gathered, reduced or sent; *received* is how much of it one rank
  receives, counted for a ring.
- The mesh below marks the ranks that take part with `●`; the group of the chosen rank is underlined.

An axis along which ranks receive 0 B was never used: if gradients should be summed over it, they were not.
"""
    BINDINGS = keys(
        "step",
        [
            ("a", "next_axis", "Next axis", "Show only collectives along the next mesh axis, or all"),
            ("o", "toggle('by_bytes')", "Sort", "Sort by start, or by bytes received"),
            ("m", "modules", "Modules", "The step by module, or its collectives"),
        ],
    )

    by_bytes = var(False, init=False)
    watch_by_bytes = View.show_again

    _axes: tuple[str, ...] = ()
    _listed: Sequence[Collective] = ()
    _moments: Sequence[Moment] = ()
    _modules: Modules | None = None
    _of: Document | None = None
    _by_module = False

    def compose(self) -> ComposeResult:
        """Put the collectives above, the schedule below them, the chosen collective and its mesh at the bottom."""
        with Horizontal(id="modules"):
            with Box(id="modules-box"):
                yield ModuleLines(id="module-lines")
            with ScrollBox(id="module-box"):
                yield Static("", id="module-card", markup=False)
        with Box(id="comms-box"):
            yield Static(id="comms-head", markup=False, classes="legend")
            yield Lines(id="collectives")
        with Box(id="schedule-box"):
            yield Static(LEGEND, id="schedule-legend", classes="legend", markup=False)
            yield ScheduleGrid(id="schedule")
            yield Static(id="pass", markup=False, classes="legend")
        with Horizontal(id="comm"):
            with Box(id="comm-box"):
                yield Static(id="comm-card", markup=False)
                yield MomentLines(id="moments")
            with Box(id="part-box"):
                yield MeshGrid(id="part")
        yield Static(id="step-note", markup=False)

    def show(self, document: Document, selection: Selection) -> None:
        """Show the step, and the chosen collective with the ranks that take part."""
        step = document.step if not document.is_partial else Step(has_run=True)
        why = "… reading" if document.is_partial else step.why_empty
        note = self.query_one("#step-note", Static)
        note.update(why)
        note.display = bool(why)
        self._show_modules(document)
        for part in ("#comms-box", "#comm"):
            self.query_one(part).display = bool(step.collectives) and not self._by_module
        has_schedule = step.pipeline is not None or bool(step.undrawn)
        self.query_one("#schedule-box").display = has_schedule and not self._by_module
        self._show_schedule(document, step)
        self._list(step)
        self._show_collective(document, selection)

    def _show_modules(self, document: Document) -> None:
        """Show the step by module, once it is judged: from the start if one of them is the first wrong one."""
        lines = self.query_one(ModuleLines)
        if not document.is_judged:
            self._modules, self._by_module = None, False
        elif self._of is not document or self._modules is None:
            self._of, self._modules = document, modules_of(document)
            self._by_module = self._modules.tree.finding is not None and bool(self._modules.tree.num_calls)
        self.query_one("#modules").display = self._by_module
        self.FOCUS = "#module-lines" if self._by_module else "#collectives"
        if self._by_module and self._modules is not None:
            lines.show(len(self._modules.lines), self._modules.line, None if lines.count else self._modules.first)
            title = f"{counted(self._modules.tree.num_calls, 'call')} of modules, as they ran"
            self.query_one("#modules-box", Box).set_titles(title, f"signs: {', '.join(SHORT[side] for side in SIDES)}")
            self._show_module()

    @on(Lines.Highlighted, "#module-lines")
    def _show_module(self) -> None:
        if self._modules is not None and self._modules.lines:
            at = self.query_one(ModuleLines).cursor
            node = self._modules.lines[at]
            self.query_one("#module-card", Static).update(self._modules.card(at))
            self.query_one("#module-box", ScrollBox).set_titles(printable(node.name), printable(node.call.type))

    def _list(self, step: Step) -> None:
        """List the collectives that pass the filter, in the chosen order, and the bytes received along each axis."""
        self._listed = [item for item in step.collectives if not self._axes or item.record.axes == self._axes]
        if self.by_bytes:
            self._listed.sort(key=lambda collective: -collective.received)
        width = max((len(axes_text(collective.record.axes)) for collective in step.collectives), default=4)
        head = f"  {'collective':<15} {'axis':<{width}} {'count':>6} {'bytes':>8} {'received':>8}  module"
        self.query_one("#comms-head", Static).update(head, layout=False)
        self.query_one("#collectives", Lines).show(len(self._listed), lambda at: self._listed[at].line(width))
        title = f"Collectives along {axes_text(self._axes)}" if self._axes else "Collectives of the step"
        order = ", most bytes received first" if self.by_bytes else ""
        totals = axis_totals(step, self.app.size.width // COLUMNS_TO_BAR)
        self.query_one("#comms-box", Box).set_titles(title + order, f"received per rank, at most: {totals}")

    def _show_collective(self, document: Document, selection: Selection) -> None:
        if not self._listed:
            return
        chosen, mesh = self._listed[self.query_one("#collectives", Lines).cursor], document.mesh
        rank = rank_of(document, selection, chosen.ranks)
        self.query_one("#comm-box", Box).set_titles(chosen.title)
        self.query_one("#comm-card", Static).update(chosen.text(mesh, rank))
        self.query_one("#part-box", Box).set_titles("● takes part", f"underlined: rank {rank}'s group")
        self.query_one(MeshGrid).show(mesh, rank, takes_part(document, chosen, rank))
        self._moments = moments(document.dump, chosen)
        lines = self.query_one(MomentLines)
        lines.display = bool(self._moments)
        self.query_one("#comm").set_class(bool(self._moments), "kept")
        width = max((len(numbers_text(before)) for _, before, _ in self._moments[:MOST_LOOKED_AT]), default=0)
        cursor = next((at for at, moment in enumerate(self._moments) if moment[0] == rank), 0)
        lines.show(len(self._moments), lambda at: moment_line(self._moments[at], width), cursor)

    def _show_schedule(self, document: Document, step: Step) -> None:
        grid = self.query_one(ScheduleGrid)
        grid.show(step.pipeline, document.mesh)
        grid.display = self.query_one("#schedule-legend").display = step.pipeline is not None
        self.query_one("#schedule-box", Box).set_titles(pipeline_text(step.pipeline))
        self._show_pass(step)

    def _show_pass(self, step: Step) -> None:
        grid, text = self.query_one(ScheduleGrid), f"? not drawn: {step.undrawn}" if step.undrawn else ""
        if step.pipeline is not None and grid.chosen is not None:
            text = pass_text(grid.rank, *grid.chosen)
        self.query_one("#pass", Static).update(text)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Filter and sort only if there are collectives."""
        document = self.state.document
        if action == "modules":
            return bool(self._modules and self._modules.tree.num_calls)
        is_listed = bool(document and document.step.collectives and not self._by_module)
        return action not in ("next_axis", "toggle") or is_listed

    def action_modules(self) -> None:
        """Show the step by module, or its collectives again."""
        self._by_module = not self._by_module
        self.show_again()
        self.query_one(self.FOCUS).focus()
        self.refresh_bindings()

    @on(Lines.Chosen, "#module-lines")
    def _module_opened(self, message: Lines.Chosen) -> None:
        if self._modules is not None:
            self._modules = self._modules.toggled(message.index)
            self.show_again()

    @on(Lines.Highlighted, "#collectives")
    def _collective_chosen(self) -> None:
        if self.state.document is not None:
            self._show_collective(self.state.document, self.state.selection)

    @on(Lines.Highlighted, "#moments")
    def _moment_chosen(self, message: Lines.Highlighted) -> None:
        self.state.selection = replace(self.state.selection, rank=self._moments[message.index][0])

    @on(Picked)
    def _picked(self) -> None:
        """Describe the pass under the cursor; the selection follows the rank by itself."""
        if self.state.document is not None:
            self._show_pass(self.state.document.step)

    def action_next_axis(self) -> None:
        """List only collectives along the next axis, or all again."""
        if self.state.document is not None:
            groups = dict.fromkeys(collective.record.axes for collective in self.state.document.step.collectives)
            self._axes = after([(), *groups], self._axes)
            self.show_again()


def axis_totals(step: Step, width: int) -> str:
    """Write the bytes that the busiest rank receives along each axis, to scale, the longest bar in so many columns."""
    most = max((count for _, count in step.received), default=0)
    totals = [
        f"{axes_text(axes)} {bar(count / max(most, 1), width).strip()} {bytes_text(count)}".replace("  ", " ")
        for axes, count in step.received
    ]
    return " · ".join(totals)
