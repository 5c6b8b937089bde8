"""Help for the focused widget: a description, and the keys that work there now."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll

from .dialog import Dialog
from .help_text import HelpText

if TYPE_CHECKING:
    from collections.abc import Mapping

    from textual.app import ComposeResult
    from textual.screen import Screen

GENERAL = """\
## shardviz

A dump records, for every tensor, what its placements *claim* and what each rank really *holds*.
The first view shows the tensors, the map of the chosen one, and below them its finding and how to fix it.
"""

SAID = {
    "quit": "Quit and restore the terminal",
    "app.focus_next": "Go to the next part of the screen",
    "app.focus_previous": "Go to the part before",
    "command_palette": "Find anything that can be done now by its name",
}
"""What the keys that Textual binds itself do."""

EVERYWHERE = "In all views"
HERE = "Here"


class HelpScreen(Dialog[None]):
    """A dialog with the help of one widget, and a table of the keys that work in it.

    Args:
        text: The help of the focused widget, in Markdown; keys are not in it, so that each is listed once.
        keys: For each part of the table its keys with what they do.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,f1,q", "dismiss", "Back", key_display="esc", id="help.back", tooltip="Close the help"),
    ]

    def __init__(self, text: str, keys: Mapping[str, Mapping[str, str]]) -> None:
        super().__init__()
        self._text = text
        self._keys = keys

    def compose(self) -> ComposeResult:
        """Show the text and the keys."""
        with VerticalScroll(classes="dialog tall") as box:
            box.border_title, box.border_subtitle = "Help", "esc closes"
            yield HelpText(self._text, self._keys)


def help_for(screen: Screen[object]) -> HelpScreen:
    """Make the help for the focused widget of a screen."""
    focused = screen.focused
    places = focused.ancestors_with_self if focused is not None else [screen]
    text = next((found for place in places if (found := getattr(place, "HELP", None))), GENERAL)
    keys: dict[str, dict[str, str]] = {HERE: {}, EVERYWHERE: {}}
    for active in screen.active_bindings.values():
        what = SAID.get(active.binding.action, active.tooltip)
        if active.enabled and what:
            part = keys[EVERYWHERE if active.node in (screen, screen.app) else HERE]
            shown, key = part.get(what), screen.app.get_key_display(active.binding)
            part[what] = f"{shown} {key}" if shown else key
    return HelpScreen(text, {part: known for part, known in keys.items() if known})
