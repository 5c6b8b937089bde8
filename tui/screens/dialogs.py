"""The dialogs: where to go, and help for the focused widget."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Markdown, Static

from ..keys import keys
from ..model.selection import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from textual.app import ComposeResult
    from textual.screen import Screen


class GotoScreen(ModalScreen[Target | None]):
    """A dialog that takes a rank, a name or an index, reads where that leads, and returns it."""

    BINDINGS = keys("goto", [("escape", "dismiss(None)", "Back", "Close without moving")])

    def __init__(self, read: Callable[[str], Target | str], about: Callable[[Target], str]) -> None:
        super().__init__()
        self._about = about
        self._target = lru_cache(maxsize=1)(read)  # once for a text: of many tensors all names are looked at

    def compose(self) -> ComposeResult:
        """Put the input above the lines that say where it leads, or why it leads nowhere."""
        with Vertical(classes="dialog") as box:
            box.border_title, box.border_subtitle = "Go to", "enter goes there, esc closes"
            yield Input(id="goto")
            yield Static(str(self._target("")), id="goto-note", markup=False)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Say where the text leads."""
        target = self._target(event.value)
        self.query_one("#goto-note", Static).update(target if isinstance(target, str) else self._about(target))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Return where to go, or show why the text leads nowhere."""
        target = self._target(event.value)
        if isinstance(target, Target):
            self.dismiss(target)


GENERAL = """\
## shardviz

A dump records, for every tensor, what its placements *claim* and what each rank really *holds*.
The first view shows the tensors, the map of the chosen one, and below them its finding and how to fix it.
"""

TEXTUAL_KEYS = {
    "quit": "Quit and restore the terminal",
    "app.focus_next": "Go to the next part of the screen",
    "app.focus_previous": "Go to the part before",
    "command_palette": "Find anything that can be done now by its name",
}
"""What the keys that Textual binds itself do."""

EVERYWHERE = "In all views"
HERE = "Here"


class HelpScreen(ModalScreen[None]):
    """A dialog with the help of one widget, and a table of the keys that work in it.

    Args:
        text: The help of the focused widget, in Markdown; keys are not in it, so that each is listed once.
        keys: For each part of the table its keys with what they do.
    """

    BINDINGS = keys("help", [("escape,f1,q", "dismiss", "Back", "Close the help")])

    def __init__(self, text: str, keys: Mapping[str, Mapping[str, str]]) -> None:
        super().__init__()
        self.text = text
        self.keys = keys

    def compose(self) -> ComposeResult:
        """Show the text and the keys."""
        table = Table.grid(padding=(0, 2))
        for part, listed in self.keys.items():
            table.add_row("", Text(part, "dim"))
            for what, key in listed.items():
                table.add_row(Text(key, "bold"), what)
        with VerticalScroll(classes="dialog tall") as box:
            box.border_title, box.border_subtitle = "Help", "esc closes"
            yield Markdown(self.text)
            yield Static(table)


def help_for(screen: Screen[object]) -> HelpScreen:
    """Make the help for the focused widget of a screen."""
    focused = screen.focused
    places = focused.ancestors_with_self if focused is not None else [screen]
    text = next((text for place in places if (text := getattr(place, "HELP", None))), GENERAL)
    keys: dict[str, dict[str, str]] = {HERE: {}, EVERYWHERE: {}}
    for active in screen.active_bindings.values():
        what = TEXTUAL_KEYS.get(active.binding.action, active.tooltip)
        if active.enabled and what:
            part = keys[EVERYWHERE if active.node in (screen, screen.app) else HERE]
            known, key = part.get(what), screen.app.get_key_display(active.binding)
            part[what] = f"{known} {key}" if known else key
    return HelpScreen(text, {part: listed for part, listed in keys.items() if listed})
