"""The search line above the tensors; it is shown only while it is used."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import Input


class Search(Input):
    """An input for part of a name; enter keeps the tensors found, escape shows all again."""

    class Closed(Message):
        """The search is over."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "clear_and_close", "All tensors", id="search.close", tooltip="Show all tensors again"),
        Binding("enter,down", "close", "To the tensors", id="search.done", tooltip="Keep the tensors found"),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(placeholder="part of a name", compact=True, id=id, select_on_focus=False)
        self.display = False

    def open(self) -> None:
        """Show the line and type into it."""
        self.display = True
        self.focus()

    def action_close(self) -> None:
        """Keep the tensors found; without a text, hide the line."""
        self.display = bool(self.value)
        self.post_message(self.Closed())

    def action_clear_and_close(self) -> None:
        """Show all tensors again."""
        self.value = ""
        self.action_close()
