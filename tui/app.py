"""The app: which views there are, the document and the selection that they share, and the worker that reads."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from textual import on
from textual.app import App, SystemCommand
from textual.binding import ActiveBinding, Binding, BindingType
from textual.reactive import var
from textual.screen import ModalScreen, Screen

from shardviz.dump.read import read_run
from shardviz.errors import EXIT_USAGE

from .colours import THEMES
from .loading import load, written
from .messages import DocumentRead, OtherRead, Progressed, ReadFailed
from .saving import save_screen
from .screens.compare import CompareView
from .screens.explore import ExploreView
from .screens.findings import FindingsView
from .screens.mesh import MeshView
from .screens.rank import RankView
from .selection import Selection, carried_over, first_selection, of_finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .document import Document


LOOK_AGAIN = 1.0
"""Seconds between two looks at a folder that may still be written."""


class ShardvizApp(App[None]):
    """A dump as a place to walk through.

    Args:
        path: The dump's folder.
        other: A second dump to compare it with.
    """

    TITLE = "shardviz"
    CSS_PATH = Path(__file__).with_name("shardviz.tcss")
    MODES: ClassVar[dict[str, str | Callable[[], Screen[Any]]]] = {
        "explore": ExploreView,
        "mesh": MeshView,
        "rank": RankView,
        "findings": FindingsView,
        "compare": CompareView,
    }
    DEFAULT_MODE = "explore"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "1", "switch_mode('explore')", "Tensors", show=False, id="app.explore", tooltip="The tensors and their maps"
        ),
        Binding("2", "switch_mode('mesh')", "Mesh", show=False, id="app.mesh", tooltip="All ranks at their places"),
        Binding(
            "3", "switch_mode('rank')", "Rank", show=False, id="app.rank", tooltip="Everything that one rank holds"
        ),
        Binding(
            "4",
            "switch_mode('findings')",
            "Findings",
            show=False,
            id="app.findings",
            tooltip="Everything that is wrong",
        ),
        Binding(
            "5",
            "switch_mode('compare')",
            "Compare",
            show=False,
            id="app.compare",
            tooltip="The other dump beside this one",
        ),
        Binding("c", "copy_fix", "Copy fix", id="app.copy_fix", tooltip="Copy the fix of the finding below"),
        Binding("n", "next_finding(1)", "Next", id="app.next", tooltip="Go to the next finding's place"),
        Binding("N", "next_finding(-1)", "Last finding", show=False, id="app.previous", tooltip="Go one finding back"),
        Binding(
            "s", "save('svg')", "Save", show=False, id="app.save_svg", tooltip="Save the screen as a picture (SVG)"
        ),
        Binding("S", "save('txt')", "Save text", show=False, id="app.save_text", tooltip="Save the screen as text"),
        Binding(
            "f1,question_mark", "help", "Help", key_display="F1", id="app.help", tooltip="Help for what is focused"
        ),
        Binding("q", "quit", "Quit", id="app.quit", tooltip="Leave; the terminal is as it was"),
    ]

    document: var[Document | None] = var(None)
    other_document: var[Document | None] = var(None)
    selection: var[Selection] = var(Selection())
    note: var[str] = var("")

    def __init__(self, path: Path, other: Path | None = None) -> None:
        super().__init__()
        self.path = path
        self.other = other
        self._opened_on = self.selection
        self._written = (0, 0)
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = THEMES[0].name

    @property
    def view_names(self) -> list[str]:
        """The views that there are, in the order of their keys."""
        return [name for name in self.MODES if name != "compare" or self.other is not None]

    def on_mount(self) -> None:
        """Start reading, and look again and again whether more was written."""
        self._read()
        if self.other is not None:
            reading = partial(load, self.other, self.post_message, OtherRead)
            self.run_worker(reading, thread=True, group="load other")
        self.set_interval(LOOK_AGAIN, self._look_again)

    def _read(self) -> None:
        self._written = written(self.path)
        self.run_worker(partial(load, self.path, self.post_message), thread=True, exclusive=True, group="load")

    def _look_again(self) -> None:
        """Read a folder again that a job is still writing."""
        idle = all(worker.is_finished for worker in self.workers if worker.group == "load")
        if idle and written(self.path) not in (self._written, (0, 0)):
            self._read()

    @on(Progressed)
    def _progressed(self, message: Progressed) -> None:
        self.note = f"reading rank {message.read:,} of {message.files:,}"

    @on(DocumentRead)
    def _document_read(self, message: DocumentRead) -> None:
        """Show what was read; who has not moved yet is taken to the first finding."""
        before, selection = self.document, self.selection
        if before is None or selection == self._opened_on:
            selection = self._opened_on = first_selection(message.document)
        elif message.document.model is not before.model:
            selection = carried_over(before, message.document, selection)
        if selection.finding >= len(message.document.findings):
            selection = replace(selection, finding=0)
        self.note = ""
        self.set_reactive(ShardvizApp.selection, selection)
        self.document = message.document

    @on(OtherRead)
    def _other_read(self, message: OtherRead) -> None:
        self.note = ""
        self.other_document = message.document

    @on(ReadFailed)
    def _read_failed(self, message: ReadFailed) -> None:
        """Leave where there is nothing to show; keep what is shown otherwise."""
        if self.document is None:
            self.exit(return_code=EXIT_USAGE, message=message.why)
        else:
            self.note = message.why.partition("\n")[0]

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer only what works now."""
        if action in ("copy_fix", "next_finding"):
            return bool(self.document and self.document.findings)
        if action == "switch_mode" and parameters not in [(name,) for name in self.view_names]:
            return False
        return not (action in ("switch_mode", "help") and isinstance(self.screen, ModalScreen))

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Offer in the palette what has a key and works now, and the themes."""
        for active in screen.active_bindings.values():
            if active.enabled and active.tooltip:
                key = self.get_key_display(active.binding)
                yield SystemCommand(
                    f"{active.tooltip} ({key})", active.binding.description, partial(self._run_binding, active)
                )
        yield SystemCommand("Change the theme", "Light and dark ones", self.action_change_theme)

    def _run_binding(self, active: ActiveBinding) -> None:
        self.call_later(self.run_action, active.binding.action, active.node)

    def action_help(self) -> None:
        """Show the help for what is focused."""
        from .screens.help import help_for

        self.push_screen(help_for(self.screen))

    def action_save(self, kind: str) -> None:
        """Save what is on screen into a new file in the working folder."""
        path = save_screen(self, kind)
        self.notify(str(path), title="Saved", markup=False)

    def watch_document(self) -> None:
        """Offer the keys that a report makes useful."""
        self.refresh_bindings()

    def action_copy_fix(self) -> None:
        """Copy the finding's fix."""
        assert self.document is not None
        finding = self.document.findings[self.selection.finding]
        self.copy_to_clipboard(finding.fix or finding.summary)
        self.notify(finding.fix or finding.summary, title="Copied the fix", markup=False)

    def action_next_finding(self, step: int) -> None:
        """Go to another finding and its place."""
        assert self.document is not None
        count = len(self.document.findings)
        self.selection = of_finding(self.document, self.selection, (self.selection.finding + step) % count)


def view(path: Path, *, other: Path | None = None) -> None:
    """Open the TUI on a dump, beside another one where that is given.

    Raises:
        DumpError: A folder is no dump.
    """
    for folder in (path, other):
        if folder is not None:
            read_run(folder)
    ShardvizApp(path, other).run()
