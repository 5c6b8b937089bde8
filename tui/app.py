"""The app: the state that the views share, the keys that work everywhere, and the workers that read dumps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import textual
from rich.console import Group
from rich.text import Text
from rich.traceback import Traceback
from textual import on
from textual.app import App, SystemCommand
from textual.reactive import var
from textual.screen import ModalScreen, Screen

from shardviz.dump.read import read_run

from .clipboard import copy
from .colours import THEMES
from .keys import MOVES, keys
from .loading import load, load_difference, written
from .model.messages import DocumentRead, DumpsCompared, OtherRead, Progressed, ReadFailed
from .model.selection import Selection, carried_over, first_selection, next_finding
from .saving import save_screen
from .screens.main import MainScreen
from .screens.views import KEYS, VIEWS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from textual.binding import BindingType

    from shardviz.check.diff import Difference
    from shardviz.errors import ShardvizError

    from .model.document import Document


LOOK_AGAIN = 1.0
"""Seconds between two checks whether a folder has new files."""


class ShardvizApp(App[None]):
    """The viewer of a dump.

    Args:
        path: The dump's folder.
        other: A second dump to compare it with.
    """

    TITLE = "shardviz"
    CSS_PATH = Path(__file__).with_name("shardviz.tcss")
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-normal"), (160, "-wide")]  # noqa: RUF012  Textual's own form
    VERTICAL_BREAKPOINTS = [(0, "-short"), (32, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        *keys("app", [(KEYS[name], f"show_view('{name}')", view.TITLE, view.TOOLTIP) for name, view in VIEWS.items()]),
        *keys(
            "app",
            [
                ("N", "next_finding(-1)", "Previous", "Go to the previous finding"),
                ("s", "save('svg')", "Save SVG", "Save the screen as a picture (SVG)"),
                ("S", "save('txt')", "Save text", "Save the screen as text"),
            ],
        ),
        *keys(
            "app",
            [
                ("c", "copy_fix", "Copy fix", "Copy the fix of the finding below"),
                ("n", "next_finding(1)", "Next", "Go to the next finding"),
                ("f1,question_mark", "help", "Help", "Help for the focused part"),
                ("q,ctrl+c", "quit", "Quit", "Quit and restore the terminal"),
            ],
            show=True,
        ),
    ]

    document: var[Document | None] = var(None)
    other_document: var[Document | None] = var(None)
    difference: var[Difference | None] = var(None)
    selection: var[Selection] = var(Selection())
    note: var[str] = var("")

    def __init__(self, path: Path, other: Path | None = None) -> None:
        super().__init__()
        self.path = path
        self.other = other
        self.failure: ShardvizError | None = None
        self._main = MainScreen(self, self.view_names, "explore" if other is None else "compare")
        self._opened_on = self.selection
        self._written = (0, 0)
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = THEMES[0].name

    @property
    def view_names(self) -> list[str]:
        """The names of the views, in the order of their keys."""
        return [name for name in VIEWS if name != "compare" or self.other is not None]

    def get_default_screen(self) -> MainScreen:
        """Return the screen that has the views."""
        return self._main

    def on_mount(self) -> None:
        """Start reading, and keep checking whether more was written."""
        self._read()
        if self.other is not None:
            reading = partial(load, self.other, self.post_message, OtherRead)
            self.run_worker(reading, thread=True, group="load other")
        self.set_interval(LOOK_AGAIN, self._look_again)

    async def action_show_view(self, name: str) -> None:
        """Show another view."""
        await self._main.show_view(name)

    def _read(self) -> None:
        self._written = written(self.path)
        self.run_worker(partial(load, self.path, self.post_message), thread=True, exclusive=True, group="load")

    def _look_again(self) -> None:
        """Read the folder again if a job has written more."""
        idle = all(worker.is_finished for worker in self.workers if worker.group == "load")
        if idle and written(self.path) not in (self._written, (0, 0)):
            self._read()

    @on(Progressed)
    def _progressed(self, message: Progressed) -> None:
        self.note = f"reading rank {message.read:,} of {message.files:,}"

    @on(DocumentRead)
    def _document_read(self, message: DocumentRead) -> None:
        """Show the document; a user who has not moved yet is taken to the first finding."""
        if not self.screen_stack:
            return  # the app closed while the dump was being read
        if self.document is None or self.selection == self._opened_on:
            selection = self._opened_on = first_selection(message.document)
        else:
            selection = carried_over(self.document, message.document, self.selection)
        self.note = ""
        self.set_reactive(ShardvizApp.selection, selection)
        self.document = message.document

    @on(OtherRead)
    def _other_read(self, message: OtherRead) -> None:
        self.note = ""
        self.other_document = message.document

    @on(ReadFailed)
    def _read_failed(self, message: ReadFailed) -> None:
        """Exit if there is nothing to show; otherwise keep the document, and note the failure."""
        if self.document is None:
            self.failure = message.why
            self.exit()
        else:
            self.note = message.why.message

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer only the actions that work now."""
        if action in ("copy_fix", "next_finding"):
            return bool(self.document and self.document.findings)
        if action == "show_view" and parameters not in [(name,) for name in self.view_names]:
            return False
        return not (action in ("show_view", "help") and isinstance(self.screen, ModalScreen))

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Offer in the palette every action that has a key and works now, and the themes."""
        for active in screen.active_bindings.values():
            if active.enabled and active.tooltip and active.binding.action.partition("(")[0] not in MOVES:
                key = self.get_key_display(active.binding)
                run = partial(self.call_later, self.run_action, active.binding.action, active.node)
                yield SystemCommand(f"{active.tooltip} ({key})", active.binding.description, run)
        yield SystemCommand("Change the theme", "Light and dark themes", self.action_change_theme)

    def _fatal_error(self) -> None:
        """Print the traceback without local variables, which Textual would print too: here they are whole dumps."""
        self.bell()
        shown = Traceback(width=min(self.size.width, 100), suppress=[textual])
        self.panic(Group(shown, Text("shardviz: error: the viewer failed; this is a bug in shardviz")))

    def action_help(self) -> None:
        """Show the help for the focused widget."""
        from .screens.help import help_for

        self.push_screen(help_for(self.screen))

    def action_save(self, kind: str) -> None:
        """Save the screen to a new file in the working folder."""
        path = save_screen(self, kind)
        self.notify(str(path), title="Saved", markup=False)

    def watch_document(self) -> None:
        """Show the title, and offer the keys that need a report."""
        self._main.entitle(self.document, self.note)
        self.refresh_bindings()
        self._compare()

    def watch_note(self) -> None:
        """Show how far the dump has been read."""
        self._main.entitle(self.document, self.note)

    def watch_other_document(self) -> None:
        """Compare the dumps, once both are read."""
        self._compare()

    def _compare(self) -> None:
        """Compare the dumps in a thread, once both are checked."""
        here, there = self.document, self.other_document
        if here is not None and there is not None and here.report is not None and there.report is not None:
            comparing = partial(load_difference, here, there, self.post_message)
            self.run_worker(comparing, thread=True, exclusive=True, group="compare")

    @on(DumpsCompared)
    def _compared(self, message: DumpsCompared) -> None:
        self.difference = message.difference

    def action_copy_fix(self) -> None:
        """Copy the fix of the chosen finding."""
        assert self.document is not None
        finding = self.document.findings[self.selection.finding]
        copy(self, finding.fix or finding.summary)
        self.notify(finding.fix or finding.summary, title="Copied the fix", markup=False)

    def action_next_finding(self, step: int) -> None:
        """Go to another finding and its place on the map."""
        assert self.document is not None
        self.selection = next_finding(self.document, self.selection, step)


def view(path: Path, *, other: Path | None = None, started: Callable[[ShardvizApp], object] | None = None) -> None:
    """Open the TUI on a dump, with a second one beside it if given.

    Args:
        path: The dump.
        other: The second one.
        started: Called with the viewer just before it runs.

    Raises:
        ShardvizError: A folder is not a dump, or can no longer be read.
        SystemExit: The viewer failed, and has printed why.
    """
    for folder in (path, other):
        if folder is not None:
            read_run(folder)
    app = ShardvizApp(path, other)
    if started is not None:
        started(app)
    app.run()
    if app.failure is not None:
        raise app.failure
    if app.return_code:
        raise SystemExit(app.return_code)
