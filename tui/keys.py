"""Key bindings from short tables, so that each has a name, a stable id and a tooltip."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.binding import Binding, BindingType

if TYPE_CHECKING:
    from collections.abc import Sequence

KeySpec = tuple[str, str, str, str]
"""The key, or several separated by commas; the action; its name; its tooltip."""


def keys(place: str, shown: Sequence[KeySpec] = (), hidden: Sequence[KeySpec] = ()) -> list[BindingType]:
    """Return bindings whose ids are `place.name`: those that the key bar shows, and those that only the help lists."""
    return [
        Binding(key, action, name, show=rows is shown, id=f"{place}.{name.lower().replace(' ', '_')}", tooltip=tooltip)
        for rows in (shown, hidden)
        for several, action, name, tooltip in rows
        for key in several.split(",")
    ]


AT_CURSOR = frozenset({"move", "jump", "page", "end", "choose", "open", "command_palette"})
"""Actions that the command palette leaves out: they move a cursor or open what it is on, by keys and the mouse."""

ARROWS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
LETTERS = {"up": "k", "down": "j", "left": "h", "right": "l"}
"""The keys beside the arrows that move as they do; with shift they are capitals."""


def arrows(action: str, tooltip: str, modifier: str = "") -> list[KeySpec]:
    """Return four arrow keys for an action that takes steps down and right; `{}` in the tooltip is the direction."""
    return [
        (
            f"{modifier}{way},{LETTERS[way].upper() if modifier else LETTERS[way]}",
            f"{action}({down}, {right})",
            f"{action} {way}".capitalize(),
            tooltip.format(way),
        )
        for way, (down, right) in ARROWS.items()
    ]
