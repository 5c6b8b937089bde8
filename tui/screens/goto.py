"""A dialog that asks for an element: its index, or its id."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from shardviz.text import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult


def parse_place(text: str, shape: Sequence[int]) -> tuple[int, ...] | str:
    """Read `3, 5` (an index) or `#42` (an id, from 1).

    Returns:
        The index, or one line that says why the text is not an element.
    """
    if match := re.fullmatch(r"\s*#\s*(\d{1,18})\s*", text):
        number, found = int(match[1]) - 1, []
        if not 0 <= number < math.prod(shape):
            return f"ids go from 1 to {math.prod(shape):,}"
        for size in reversed(shape):
            number, at = divmod(number, size)
            found.append(at)
        return tuple(reversed(found))
    numbers = re.findall(r"-?\d{1,18}", text)
    if len(numbers) != len(shape) or re.sub(r"[-\d\s,\[\]]", "", text):
        return f"enter {counted(len(shape), 'number')} for shape {list(shape)}, or an id such as #42"
    index = tuple(
        int(number) + (size if number.startswith("-") else 0) for number, size in zip(numbers, shape, strict=True)
    )
    outside = [dim for dim, (at, size) in enumerate(zip(index, shape, strict=True)) if not 0 <= at < size]
    return f"dim {outside[0]} has indices 0 to {shape[outside[0]] - 1}" if outside else index


class GotoScreen(ModalScreen[tuple[int, ...] | None]):
    """A dialog that takes an index or an id, and returns the index.

    Args:
        shape: The tensor's shape.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Back", id="goto.back", tooltip="Close without moving"),
    ]

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self._shape = tuple(shape)

    def compose(self) -> ComposeResult:
        """Put the input above a line with the shape, which also shows errors."""
        with Vertical(classes="dialog") as box:
            box.border_title = "Go to an element"
            yield Input(placeholder=", ".join("0" for _ in self._shape) + "   or an id: #1", id="goto")
            yield Static(f"shape {list(self._shape)}", id="goto-note", markup=False)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Return the index, or show the error."""
        place = parse_place(event.value, self._shape)
        if isinstance(place, str):
            self.query_one("#goto-note", Static).update(place)
        else:
            self.dismiss(place)
