"""Help for the focused widget: a description, and the keys that work there now."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.table import Table
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Markdown, Static

if TYPE_CHECKING:
    from collections.abc import Iterable

    from textual.app import ComposeResult
    from textual.screen import Screen

GENERAL = """\
## shardviz

A dump records, for every tensor, what its placements *claim* and what each rank really *holds*.
The first view shows the tensors, the map of the chosen one, and below them its finding and how to fix it.
"""


class HelpScreen(ModalScreen[None]):
    """A dialog with the help of one widget, and a table of the keys that work in it.

    Args:
        text: The help of the focused widget, in Markdown.
        keys: Keys with what they do.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,f1,q", "dismiss", "Back", key_display="esc", id="help.back", tooltip="Close the help"),
    ]

    def __init__(self, text: str, keys: Iterable[tuple[str, str]]) -> None:
        super().__init__()
        self._text = text
        self._keys = list(keys)

    def compose(self) -> ComposeResult:
        """Show the text and the keys."""
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
        for key, what in self._keys:
            table.add_row(Text(key, "bold"), Text(what))
        with VerticalScroll(classes="dialog tall") as box:
            box.border_title, box.border_subtitle = "Help", "esc closes"
            yield Markdown(self._text, open_links=False)
            yield Static(table)


def help_for(screen: Screen[object]) -> HelpScreen:
    """Make the help for the focused widget of a screen."""
    focused = screen.focused
    places = focused.ancestors_with_self if focused is not None else [screen]
    text = next((found for place in places if (found := getattr(place, "HELP", None))), GENERAL)
    keys: dict[str, str] = {}
    for active in screen.active_bindings.values():
        if active.enabled and active.tooltip:
            shown = keys.get(active.tooltip)
            key = screen.app.get_key_display(active.binding)
            keys[active.tooltip] = f"{shown} {key}" if shown else key
    return HelpScreen(text, ((key, what) for what, key in keys.items()))
