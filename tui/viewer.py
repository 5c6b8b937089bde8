"""What the viewers of dumps and of checkpoints share: themes, saving, copying, help, and reading again what changed."""

from __future__ import annotations

import asyncio
import gc
import sys
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual.app import App, SystemCommand
from textual.reactive import var

from shardviz.errors import ShardvizError
from shardviz.text import printable

from .colors import ON_DARK_16, ON_LIGHT, THEMES, Inks, PlainCharacters, shows_unicode
from .export import copy, save_picture, save_screen
from .keys import AT_CURSOR, keys
from .loading import Stamps, stamps_of
from .settings import remember_theme, remembered_theme

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from textual.binding import BindingType
    from textual.filter import LineFilter
    from textual.message import Message
    from textual.screen import Screen

    from .model.target import Known, Target


LOOK_AGAIN = 1.0
"""Seconds between two looks whether any file has changed."""


COLLECT = (50_000, 50, 50)
"""How seldom garbage is collected: by default passes over all widgets fall within most keys, 20 to 100 ms each."""


class Viewer(App[None]):
    """A viewer of files on disk. Subclasses say what is chosen, what is watched, and how all is read again."""

    TITLE = "shardviz"
    CSS_PATH = Path(__file__).with_name("shardviz.tcss")
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-normal"), (160, "-wide")]  # noqa: RUF012  Textual's own form
    VERTICAL_BREAKPOINTS = [(0, "-short"), (32, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        *keys(
            "viewer",
            [
                ("y", "copy_name", "Copy name", "Copy the name of the chosen tensor"),
                ("s", "save_tensor", "Save picture", "Save the chosen tensor's picture (SVG)"),
                ("S", "save_screen('svg')", "Save screen", "Save the screen as a picture (SVG)"),
                ("R", "reload", "Reload", "Read the files again"),
            ],
        ),
        *keys(
            "viewer",
            [
                ("g", "goto", "Go to", "Go to a rank, a tensor or an element, and see who has it"),
                ("f1,question_mark", "help", "Help", "Help for the focused part"),
                ("q,ctrl+c", "quit", "Quit", "Quit and restore the terminal"),
            ],
            show=True,
        ),
    ]

    changed: var[str] = var("")
    """When files on disk changed last, as `14:03`; empty until they do."""

    def __init__(self) -> None:
        super().__init__()
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

    @property
    def watched(self) -> Sequence[Path]:
        """The folders and files whose changes are noticed."""
        raise NotImplementedError

    @property
    def chosen_name(self) -> str:
        """The name of the chosen tensor; empty where there is none."""
        raise NotImplementedError

    def picture(self) -> str:
        """Draw the chosen tensor as SVG.

        Raises:
            ShardvizError: It cannot be drawn.
        """
        raise NotImplementedError

    def read_again(self) -> None:
        """Start to read all files again, and show them in place once they are read."""
        raise NotImplementedError

    def posting(self) -> Callable[[Message], object]:
        """Return what a thread posts its messages by: they are dropped once reading has begun again."""
        self._reading += 1
        number = self._reading

        def post(message: Message) -> object:
            return self.post_message(message) if number == self._reading else None

        return post

    @property
    def is_reading(self) -> bool:
        """Whether files are being read or checked now."""
        return any(not worker.is_finished for worker in self.workers if worker.group.startswith("load"))

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Add one that writes ASCII where the terminal shows nothing else, and one for the colours of verdicts."""
        ascii_only = [self._plain] if self._plain.enabled else []
        return [*super().get_line_filters(), *ascii_only, *self._inks()]

    def _inks(self) -> list[Inks]:
        """Return what changes the colours of verdicts: for light themes, and where there are 16 colours."""
        if not self.current_theme.dark:
            return [self._on_light]
        return [self._on_dark_16] if self.console.color_system == "standard" else []

    def watch_files(self) -> None:
        """Notice from now on when a file changes."""
        self._stamps = stamps_of(self.watched)
        self.set_interval(LOOK_AGAIN, self._look_again)

    async def _look_again(self) -> None:
        """Read again if any file is new, gone, longer, shorter or written again."""
        if self.is_reading:
            return
        stamps = await asyncio.to_thread(stamps_of, self.watched)
        if stamps and stamps != self._stamps and not self.is_reading:
            self._reload(stamps)

    def reload(self) -> None:
        """Read all files again, keep what is chosen, and show when they changed, if they did.

        From another thread: `viewer.call_from_thread(viewer.reload)`.
        """
        self._reload(stamps_of(self.watched))

    def _reload(self, stamps: Stamps) -> None:
        if stamps != self._stamps:
            self.changed = f"{datetime.now().astimezone():%H:%M}"
        self._stamps = stamps
        self.read_again()

    @property
    def known(self) -> Known:
        """What can be gone to."""
        raise NotImplementedError

    def about(self, target: Target) -> str:
        """Say where something is."""
        raise NotImplementedError

    async def go(self, target: Target) -> None:
        """Go somewhere."""
        raise NotImplementedError

    async def action_goto(self) -> None:
        """Ask where to go, and go there."""
        from .screens.dialogs import GotoScreen

        async def leave(target: Target | None) -> None:
            if target is not None:
                await self.go(target)

        await self.push_screen(GotoScreen(self.known, self.about), leave)

    def action_reload(self) -> None:
        """Read the files again, changed or not."""
        self.reload()

    def on_mount(self) -> None:
        """Remember the theme when the user chooses another."""
        self.theme_changed_signal.subscribe(self, lambda theme: remember_theme(theme.name))

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

        await self.push_screen(help_for(self.screen))

    def action_copy_name(self) -> None:
        """Copy the chosen tensor's name, as the model spells it."""
        if self.chosen_name:
            copy(self, self.chosen_name)
            self.notify(printable(self.chosen_name), title="Copied", markup=False)

    def action_save_screen(self, kind: str) -> None:
        """Save the screen to a new file in the working folder."""
        self._say_saved(partial(save_screen, self, kind))

    def action_save_tensor(self) -> None:
        """Save the chosen tensor's picture to a new file in the working folder."""
        self._say_saved(lambda: save_picture(self.chosen_name, self.picture()))

    def _say_saved(self, save: Callable[[], Path]) -> None:
        """Save something, and show its path, or why it could not be saved."""
        try:
            path = save()
        except (ShardvizError, OSError) as error:
            why = error.message if isinstance(error, ShardvizError) else error.strerror or str(error)
            self.notify(printable(why), title="Not saved", severity="error", markup=False)
        else:
            self.notify(str(path), title="Saved", markup=False)


def run(viewer: Viewer) -> None:
    """Run a viewer until it is left.

    Raises:
        SystemExit: The viewer failed, and has printed why.
    """
    viewer.run()
    if viewer.return_code:
        print("shardviz: error: the viewer failed; this is a bug in shardviz", file=sys.stderr)
        raise SystemExit(viewer.return_code)
