"""What the viewers of dumps and of checkpoints share: the selection, themes, saving, help, and reading again."""

from __future__ import annotations

import asyncio
import gc
import sys
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from textual import on
from textual.app import App, SystemCommand
from textual.reactive import var
from textual.screen import ModalScreen

from shardviz.errors import ShardvizError
from shardviz.text import printable

from .colors import ON_DARK_16, ON_LIGHT, THEMES, Inks, PlainCharacters, shows_unicode
from .export import copy, remember_theme, remembered_theme, save, screen_svg, screen_text
from .keys import AT_CURSOR, keys
from .loading import Stamps, stamps_of
from .model.selection import Picked, Selection, TensorChosen, about, at_target, name_of, of_entry, parse_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from textual.filter import LineFilter
    from textual.screen import Screen

    from .model.document import Document
    from .model.selection import Target
    from .model.stored import StoredDocument


LOOK_AGAIN = 1.0
"""Seconds between two looks whether any file has changed."""


COLLECT = (50_000, 50, 50)
"""How seldom garbage is collected: by default passes over all widgets fall within most keys, 20 to 100 ms each."""

Opened = TypeVar("Opened", bound="Document | StoredDocument")


class Viewer(App[None], Generic[Opened]):
    """A viewer of files on disk. Subclasses show `document` and `selection`, and read all again.

    Args:
        watched: The folders and files whose changes are noticed.
    """

    TITLE = "shardviz"
    CSS_PATH = Path(__file__).with_name("shardviz.tcss")
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-normal"), (160, "-wide")]  # noqa: RUF012  Textual's own form
    VERTICAL_BREAKPOINTS = [(0, "-short"), (32, "-tall")]  # noqa: RUF012
    BINDINGS = keys(
        "viewer",
        [
            ("g", "goto", "Go to", "Go to a rank, a tensor or an element, and see who has it"),
            ("f1,question_mark", "help", "Help", "Help for the focused part"),
            ("q,ctrl+c", "quit", "Quit", "Quit and restore the terminal"),
        ],
        hidden=[
            ("y", "copy_name", "Copy name", "Copy the name of the chosen tensor"),
            ("s", "save_tensor", "Save picture", "Save the chosen tensor's picture (SVG)"),
            ("S", "save_screen('svg')", "Save screen", "Save the screen as a picture (SVG)"),
            ("R", "reload", "Reload", "Read the files again"),
        ],
    )

    document: var[Opened | None] = var(None)
    selection: var[Selection] = var(Selection())
    note: var[str] = var("")
    """How far the files are read, or why they cannot be read again."""
    changed: var[str] = var("")
    """When files on disk changed last, as `14:03`; empty until they do."""

    def __init__(self, *watched: Path) -> None:
        super().__init__()
        self.watched = watched
        self._stamps: Stamps = {}
        self._reading = 0
        gc.set_threshold(*COLLECT)
        self.animation_level = "none"  # a page down would be painted a dozen times, and over ssh be late
        self._plain = PlainCharacters(enabled=not shows_unicode())
        self._on_light, self._on_dark_16 = Inks(ON_LIGHT), Inks(ON_DARK_16)
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

    def on_mount(self) -> None:
        """Notice from now on when a file changes, and when the user chooses another theme."""
        self.theme_changed_signal.subscribe(self, lambda theme: remember_theme(theme.name))
        self._stamps = stamps_of(self.watched)
        self.set_interval(LOOK_AGAIN, self._look_again)

    def showing(self) -> Callable[[Callable[[object], object], object], object]:
        """Return how threads show what they read: it is dropped once reading began again, or the viewer closed."""
        self._reading += 1
        number = self._reading

        def shown(show: Callable[[object], object], item: object) -> None:
            if number == self._reading and self.screen_stack and self.return_code is None:
                show(item)

        return partial(self.call_later, shown)

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Add one that writes ASCII if the terminal shows nothing else, and one for the colors of verdicts."""
        filters = [*super().get_line_filters(), *([self._plain] if self._plain.enabled else [])]
        if not self.current_theme.dark:
            return [*filters, self._on_light]
        return [*filters, self._on_dark_16] if self.console.color_system == "standard" else filters

    async def _look_again(self) -> None:
        """Read again if any file is new, gone, longer, shorter or written again."""
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
        """Go somewhere."""
        if self.document is not None:
            self.selection = at_target(self.document, self.selection, target)

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
        if action in ("goto", "copy_name", "save_tensor", "reload") and self.document is None:
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


def run(viewer: App[None]) -> None:
    """Run a viewer until it is left.

    Raises:
        SystemExit: The viewer failed, and has printed why.
    """
    viewer.run()
    if viewer.return_code:
        print("shardviz: error: the viewer failed; this is a bug in shardviz", file=sys.stderr)
        raise SystemExit(viewer.return_code)
