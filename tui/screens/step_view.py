"""The step: its modules or its collectives, the ranks that take part, before and after, a pipeline's schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rich.text import Text
from textual import on
from textual.containers import Horizontal
from textual.reactive import var
from textual.widgets import Static

from shardviz.text import bytes_text, counted, printable

from ..keys import keys
from ..model.selection import PassChosen, rank_of
from ..model.step import Collective, Modules, Step, axes_text, modules_of, moment_line, moments, numbers_text
from ..model.tree import after
from ..model.usage import bar
from ..widgets.frame import Box, ScrollBox
from ..widgets.grid import Lines
from ..widgets.mesh_grid import MeshGrid, takes_part
from ..widgets.schedule_grid import LEGEND, ScheduleGrid, pass_text, pipeline_text
from .view import View

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from ..app import ShardvizApp
    from ..model.document import Document
    from ..model.selection import Selection
    from ..model.step import Moment


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


class StepView(View):
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

    def __init__(self, state: ShardvizApp) -> None:
        super().__init__(state)
        self._axes: tuple[str, ...] = ()
        self._listed: list[Collective] = []
        self._moments: list[Moment] = []
        self._modules: Modules | None = None
        self._of: Document | None = None
        self._by_module = False

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
            yield Static(id="axis-bars", markup=False)
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

    def chosen(self, selection: Selection) -> object:
        """Return the chosen rank."""
        return selection.rank

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
        if self._by_module and self._modules is not None:
            lines.show(len(self._modules.lines), self._modules.line, None if lines.count else self._modules.first)
            title = f"{counted(self._modules.tree.num_calls, 'call')} of modules, as they ran"
            self.query_one("#modules-box", Box).set_titles(title)
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
        self.query_one("#axis-bars", Static).update(axis_bars(step, self.app.size.width // 2))
        totals = f": {axis_totals(step)}" if self.screen.has_class("-short") else ""
        self.query_one("#comms-box", Box).set_titles(title + order, f"received per rank, at most{totals}")

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
        text = f"? not drawn: {step.undrawn}" if step.undrawn else ""
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

    @property
    def focus_first(self) -> str:
        """Selects the list that is shown."""
        return "#module-lines" if self._by_module else self.FOCUS

    def action_modules(self) -> None:
        """Show the step by module, or its collectives again."""
        self._by_module = not self._by_module
        self.show_again()
        self.query_one(self.focus_first).focus()
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

    @on(PassChosen)
    def _pass_chosen(self, message: PassChosen) -> None:
        self.query_one("#pass", Static).update(pass_text(message.rank, message.record, message.begin))
        self.state.selection = replace(self.state.selection, rank=message.rank)

    def action_next_axis(self) -> None:
        """List only collectives along the next axis, or all again."""
        if self.state.document is not None:
            groups = dict.fromkeys(collective.record.axes for collective in self.state.document.step.collectives)
            self._axes = after([(), *groups], self._axes)
            self.show_again()


def axis_bars(step: Step, width: int) -> Text:
    """Draw the bytes that the busiest rank receives along each axis."""
    rows = [(axes_text(axes), bytes_text(count), count) for axes, count in step.received]
    names, sizes = max((len(row[0]) for row in rows), default=0), max((len(row[1]) for row in rows), default=0)
    most, text = max((row[2] for row in rows), default=0), Text(no_wrap=True)
    for name, size, count in rows:
        line = f"{name:<{names}} {size:>{sizes}} "
        text.append(line, "bold").append(bar(count / max(most, 1), max(width - len(line), 4)), "dim").append("\n")
    text.rstrip()
    return text


def axis_totals(step: Step) -> str:
    """Write each axis's bytes with a short bar, where there is no room for bars of their own."""
    most = max((count for _, count in step.received), default=0)
    totals = [
        f"{axes_text(axes)} {bar(count / max(most, 1), 4).strip()} {bytes_text(count)}".replace("  ", " ")
        for axes, count in step.received
    ]
    return " · ".join(totals)
