"""What the viewers of dumps and of checkpoints share: views, the selection, themes, saving, help, and reading again."""

from __future__ import annotations

import asyncio
import gc
import sys
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, cast

from textual import on
from textual.app import App, SystemCommand
from textual.containers import Horizontal
from textual.reactive import var
from textual.screen import ModalScreen
from textual.widgets import ContentSwitcher
from textual.worker import get_current_worker

from shardviz.dump.records.files import RunRecord
from shardviz.errors import ShardvizError
from shardviz.text import printable

from .colors import ON_DARK_16, ON_LIGHT, THEMES, Inks, NoColors, PlainCharacters, shows_unicode
from .export import copy, remember_theme, remembered_theme, save, screen_svg, screen_text
from .keys import AT_CURSOR, keys
from .loading import Stamps, stamps_of
from .model.document import Judged
from .model.selection import (
    Opened,
    Picked,
    Selection,
    TensorChosen,
    about,
    at_target,
    carried_over,
    name_of,
    next_finding,
    of_entry,
    opened_on,
    parse_target,
)
from .screens.explore_view import ExploreView
from .screens.view import View
from .widgets.frame import KeyBar, Title, ViewTabs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from textual.app import ComposeResult
    from textual.filter import LineFilter
    from textual.screen import Screen

    from .keys import KeySpec
    from .model.selection import Target


LOOK_AGAIN = 1.0
"""Seconds between two checks for changed files."""


COLLECT = (50_000, 50, 50)
"""How seldom garbage is collected: by default passes over all widgets fall within most keys, 20 to 100 ms each."""


def view_keys(views: Sequence[type[View[Any]]]) -> list[KeySpec]:
    """Return the keys of views: their numbers."""
    return [(str(at), f"show_view('{view.NAME}')", view.TITLE, view.TOOLTIP) for at, view in enumerate(views, 1)]


class Viewer(App[None], Generic[Opened]):
    """A viewer of files on disk. Subclasses have the views, and read the files.

    Args:
        watched: The folders and files whose changes are noticed; the first is the one that is shown.
        tensor: The tensor that it opens on, as `shardviz show` finds it; by default that of the first finding.
        rank: The rank that it opens on.
        first: The view that is shown first.
        without: Views that are left out.
    """

    VIEWS: ClassVar[Sequence[type[View[Any]]]]

    TITLE = "shardviz"
    CSS_PATH = Path(__file__).with_name("shardviz.tcss")
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-normal"), (160, "-wide")]  # noqa: RUF012  Textual's own form
    VERTICAL_BREAKPOINTS = [(0, "-short"), (32, "-tall")]  # noqa: RUF012
    BINDINGS = keys(
        "viewer",
        [
            ("g", "goto", "Go to", "Go to a rank, a tensor or an element, and see who has it"),
            ("c", "copy_fix", "Copy fix", "Copy the fix of the finding below"),
            ("n", "next_finding(1)", "Next finding", "Go to the next finding"),
            ("f1,question_mark", "help", "Help", "Help for the focused part"),
            ("q,ctrl+c", "quit", "Quit", "Quit and restore the terminal"),
        ],
        hidden=[
            ("N", "next_finding(-1)", "Previous finding", "Go to the previous finding"),
            ("y", "copy_name", "Copy name", "Copy the name of the chosen tensor"),
            ("s", "save_tensor", "Save picture", "Save the chosen tensor's picture (SVG)"),
            ("S", "save_screen('svg')", "Save screen", "Save the screen as a picture (SVG)"),
            ("R", "reload", "Reload", "Read the files again"),
        ],
    )

    run_record: var[RunRecord | None] = var(None)
    document: var[Opened | None] = var(None)
    selection: var[Selection] = var(Selection())
    note: var[str] = var("")
    """How far the files are read, or why they cannot be read again."""
    changed: var[str] = var("")
    """When files on disk changed last, as `14:03`; empty until they do."""

    def __init__(
        self,
        *watched: Path,
        tensor: str | None = None,
        rank: int | None = None,
        first: str = ExploreView.NAME,
        without: str = "",
    ) -> None:
        super().__init__()
        self.path, self.watched = watched[0], watched
        self.failure: ShardvizError | None = None
        self._tensor, self._rank = tensor, rank
        self._opened_on = self.selection
        self.numbers = {view.NAME: str(at) for at, view in enumerate(self.VIEWS, 1) if without != view.NAME}
        self.view_name = first
        self._stamps: Stamps = {}
        self.seconds = 0.0
        gc.set_threshold(*COLLECT)
        self.animation_level = "none"  # a page down would be painted a dozen times, and over ssh be late
        self._plain = PlainCharacters(enabled=not shows_unicode())
        self._on_light, self._on_dark_16, self._without_colors = Inks(ON_LIGHT), Inks(ON_DARK_16), NoColors({})
        for theme in THEMES:
            self.register_theme(theme)
        known = remembered_theme()
        self.theme = known if known in self.available_themes else THEMES[0].name

    def picture(self) -> str:
        """Draw the chosen tensor as SVG.

        Raises:
            ShardvizError: It cannot be drawn.
        """
        raise NotImplementedError

    def read_again(self) -> None:
        """Start to read all files again, and show them in place once they are read."""
        raise NotImplementedError

    def compose(self) -> ComposeResult:
        """Put the title and the tabs above the views, of which one is shown, and the keys below."""
        with Horizontal(id="top"):
            yield Title(id="title")
            yield ViewTabs(id="tabs")
        views = (view(self) for view in self.VIEWS if view.NAME in self.numbers)
        yield ContentSwitcher(*views, id="views", initial=self.view_name)
        yield KeyBar(id="keys")

    def on_mount(self) -> None:
        """Show the first view; notice from now on when a file changes, and when the user chooses another theme."""
        self._enter()
        self.theme_changed_signal.subscribe(self, lambda theme: remember_theme(theme.name))
        self._stamps = stamps_of(self.watched)
        self.set_interval(LOOK_AGAIN, self._look_again)

    def action_show_view(self, name: str) -> None:
        """Show another view."""
        with self.batch_update():
            self._view.leave()
            self.view_name = self.query_one(ContentSwitcher).current = name
            self._enter()

    @property
    def _view(self) -> View[Any]:
        """The view that is shown."""
        return self.query_one(f"#{self.view_name}", View)

    def _enter(self) -> None:
        self._view.enter()
        self.on_resize()

    def on_resize(self) -> None:
        """Write the tabs in the room that there is."""
        tabs = [(self.numbers[view.NAME], view) for view in self.VIEWS if view.NAME in self.numbers]
        for line in self.query(ViewTabs):
            line.show(tabs, self.view_name)

    def read_in_thread(
        self, group: str, show: Callable[[object], object], read: Callable[..., object], *args: object
    ) -> None:
        """Read in a thread, instead of what the group read before, and show it as long as nothing else is read."""

        def shown(item: object) -> None:
            if not get_current_worker().is_cancelled:
                self.call_later(show, item)

        self.run_worker(partial(read, *args, shown), thread=True, exclusive=True, group=group)

    def show_read(self, item: object) -> None:
        """Show what a thread has read: what a run is comes before any rank of it."""
        if isinstance(item, Judged):
            self._show_document(cast("Opened", item))
        elif isinstance(item, RunRecord):
            self.run_record = item
        elif isinstance(item, str):
            self.note = item
        elif isinstance(item, ShardvizError):
            self.show_failure(item)

    def _show_document(self, document: Opened) -> None:
        """Show a document; a user who has not moved yet is taken to its first finding."""
        if document.is_partial and self.document is not None:
            return  # it is read again: what was read before says more
        if self.document is None or self.selection == self._opened_on:
            try:
                selection = self._opened_on = opened_on(document, self._tensor, self._rank)
            except ShardvizError as error:
                self._leave(error)
                return
        else:
            selection = carried_over(self.document, document, self.selection)
        if not document.is_partial:
            self.note, self.seconds = "", 0.0
        self.set_reactive(Viewer.selection, selection)
        self.document = document

    def show_failure(self, why: ShardvizError) -> None:
        """Exit if there is nothing to show; otherwise keep what there is, and note the failure."""
        if self.document is None:
            self._leave(why)
        else:
            self.note = why.message

    def _leave(self, why: ShardvizError) -> None:
        """Exit with an error that the terminal shows when the screen is gone."""
        self.failure = why
        self.exit()

    def watch_document(self) -> None:
        """Offer the keys that need a report."""
        self.refresh_bindings()

    def watch_selection(self, before: Selection, now: Selection) -> None:
        """Offer the way to a finding from a tensor that does not have it, and its fix on one that does."""
        if before.entry != now.entry and self.document is not None and self.document.findings:
            self.refresh_bindings()

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Add one that writes ASCII if the terminal shows nothing else, and one for colors, or against them."""
        filters = [*super().get_line_filters(), *([self._plain] if self._plain.enabled else [])]
        if self.no_color or not self.current_theme.dark:
            return [*filters, self._without_colors if self.no_color else self._on_light]
        return [*filters, self._on_dark_16] if self.console.color_system == "standard" else filters

    async def _look_again(self) -> None:
        """Count the seconds of a check; read again if any file is new, gone, longer, shorter or written again."""
        if self._is_checking:
            self.seconds += LOOK_AGAIN
            self.note = f"{self.seconds:.0f} s"
        if any(not worker.is_finished for worker in self.workers if worker.group.startswith("load")):
            return
        stamps = await asyncio.to_thread(stamps_of, self.watched)
        if stamps and stamps != self._stamps:
            self._reload(stamps)

    def reload(self) -> None:
        """Read all files again, keep what is chosen, and show when they changed, if they did.

        From another thread: `viewer.call_from_thread(viewer.reload)`.
        """
        self._reload(stamps_of(self.watched))

    action_reload = reload

    def _reload(self, stamps: Stamps) -> None:
        if stamps != self._stamps:
            self.changed = f"{datetime.now().astimezone():%H:%M}"
        self._stamps = stamps
        self.read_again()

    @property
    def chosen_name(self) -> str:
        """The name of the chosen tensor; empty if there is none."""
        return name_of(self.document, self.selection) if self.document is not None else ""

    def go(self, target: Target) -> None:
        """Go to a rank, a tensor or an element, in a view that shows it."""
        if self.document is not None:
            self.selection = at_target(self.document, self.selection, target)
        if target.rank is not None:
            if self.view_name not in ("mesh", "rank"):
                self.action_show_view("rank")
            return
        if self.view_name not in ("rank", "compare"):
            self.action_show_view(ExploreView.NAME)
            self.query_one(ExploreView).show_target(target)

    async def action_goto(self) -> None:
        """Ask where to go, and go there."""
        from .screens.dialogs import GotoScreen

        def leave(target: Target | None) -> None:
            if target is not None:
                with self.batch_update():
                    self.go(target)

        if (document := self.document) is not None:
            read = partial(parse_target, document=document, entry=self.selection.entry, name=self.chosen_name)
            with self.batch_update():  # or the screen below would be painted again with each layout of the dialog
                await self.push_screen(GotoScreen(read, partial(about, document)), leave)

    @on(TensorChosen)
    def _tensor_chosen(self, message: TensorChosen) -> None:
        if self.document is not None and message.entry != self.selection.entry:
            self.selection = of_entry(self.document, self.selection, message.entry, message.name)
        else:
            self.selection = replace(self.selection, name=message.name)

    @on(Picked)
    def _picked(self, message: Picked) -> None:
        now = self.selection
        rank = now.rank if message.rank is None else message.rank
        self.selection = replace(now, rank=rank, side=message.side or now.side, plane=message.plane or now.plane)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer nothing that needs a document before there is one, and nothing below a dialog."""
        document, selection = self.document, self.selection
        if action in ("goto", "copy_name", "copy_fix", "next_finding", "save_tensor", "reload") and document is None:
            return False
        if document is not None and action == "copy_fix":
            is_about = document.is_about(selection.finding, selection.entry)
            return bool(document.findings) if self.view_name == "findings" else is_about
        if document is not None and action == "next_finding" and not self._is_checking:
            only = document.by_finding.get(0)  # another finding, or the only one from a tensor that does not have it
            return len(document.findings) > 1 or (only is not None and only != selection.entry)
        if action == "show_view" and parameters not in [(name,) for name in self.numbers]:
            return False
        return not (action in ("show_view", "help", "goto") and isinstance(self.screen, ModalScreen))

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Offer every action that has a key and works now, but those of a cursor."""
        names = set()
        for active in screen.active_bindings.values():
            action, name = active.binding.action, active.binding.description
            if active.enabled and active.tooltip and action.partition("(")[0] not in AT_CURSOR and name not in names:
                names.add(name)
                command = partial(self.call_later, self.run_action, action, active.node)
                yield SystemCommand(name, f"{active.tooltip} ({self.get_key_display(active.binding)})", command)
        as_text = partial(self.action_save_screen, "txt")
        yield SystemCommand("Save screen as text", "Save the characters of the screen without colors", as_text)
        yield SystemCommand("Change theme", "Choose among light and dark themes", self.action_change_theme)

    async def action_help(self) -> None:
        """Show the help for the focused widget."""
        from .screens.dialogs import help_for

        with self.batch_update():
            await self.push_screen(help_for(self.screen))

    def action_copy_fix(self) -> None:
        """Copy the fix of the chosen finding."""
        if self.document is not None:
            finding = self.document.findings[self.selection.finding]
            self.copy(finding.fix or finding.summary, "Copied the fix")

    @property
    def _is_checking(self) -> bool:
        """Whether what is read is still being checked."""
        return self.document is not None and not (self.document.is_partial or self.document.is_judged)

    def action_next_finding(self, step: int) -> None:
        """Go to another finding and its place on the map."""
        if self._is_checking:
            self.notify("The check is still running")
        elif self.document is not None:
            self.selection = next_finding(self.document, self.selection, step)

    def copy(self, text: str, title: str = "Copied") -> None:
        """Copy a text, and say so."""
        copy(self, text)
        self.notify(printable(text), title=title, markup=False)

    def action_copy_name(self) -> None:
        """Copy the chosen tensor's name, as the model spells it."""
        if self.chosen_name:
            self.copy(self.chosen_name)

    def action_save_screen(self, kind: str) -> None:
        """Save the screen to a new file in the working folder."""
        self._save("shardviz", kind, partial(screen_svg if kind == "svg" else screen_text, self))

    def action_save_tensor(self) -> None:
        """Save the chosen tensor's picture to a new file in the working folder."""
        self._save(self.chosen_name, "svg", self.picture)

    def _save(self, name: str, kind: str, content: Callable[[], str]) -> None:
        """Save something, and show its path, or why it could not be saved."""
        try:
            path = save(name, kind, content())
        except (ShardvizError, OSError) as error:
            why = error.message if isinstance(error, ShardvizError) else error.strerror or str(error)
            self.notify(printable(why), title="Not saved", severity="error", markup=False)
        else:
            self.notify(str(path), title="Saved", markup=False)


def run(viewer: Viewer[Any]) -> None:
    """Run a viewer until it is left.

    Raises:
        ShardvizError: There was nothing to show.
        SystemExit: The viewer failed, and has printed why.
    """
    viewer.run()
    if viewer.return_code:
        print("shardviz: error: the viewer failed; this is a bug in shardviz", file=sys.stderr)
        raise SystemExit(viewer.return_code)
    if viewer.failure is not None:
        raise viewer.failure
