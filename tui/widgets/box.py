"""Boxes with titles in their borders. Titles are text and never markup: names of tensors and folders are strangers'."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.text import Text
from textual.containers import Vertical, VerticalScroll
from textual.widget import Widget

from ..model.names import fitted

if TYPE_CHECKING:
    from collections.abc import Sequence


LEAST_NAME = 8
"""Columns of a name in the title of a narrow box."""

CORNERS = 6
"""Columns of a border above that have no title."""


class Titled(Widget):
    """The look of all boxes: a border that is lit if the focus is within, with a title above and one below."""

    DEFAULT_CLASSES = "boxed"

    _titles: tuple[Text, Text] | None = None
    _name_title: tuple[str, str, Sequence[str]] | None = None

    def set_titles(self, title: str | Text, subtitle: str | Text = "") -> None:
        """Write a title above and one below."""
        self._name_title = None
        self._write(_text(title), _text(subtitle))

    def _write(self, title: Text, subtitle: Text) -> None:
        if self._titles != (title, subtitle):
            self._titles = title, subtitle
            self.border_title, self.border_subtitle = title, subtitle

    def set_name_title(self, name: str, *, before: str = "", after: Sequence[str] = ("",)) -> None:
        """Write a name above, cut to the room that is left, now and whenever the width of the box changes.

        Args:
            name: The name.
            before: The words before it.
            after: The words after it, longest first: the first that leave room for the whole name are shown.
        """
        self._name_title = before, name, after
        self._fit_name()

    def on_resize(self) -> None:
        """Cut the name in the title to its new room."""
        self._fit_name()

    def _fit_name(self) -> None:
        if self._name_title is None:
            return
        before, name, after = self._name_title
        room = (self.outer_size.width - CORNERS if self.size else cell_len(before + name + after[0])) - cell_len(before)
        behind = next((text for text in after if cell_len(name + text) <= room), after[-1])
        self._write(Text(before + fitted(name, max(room - cell_len(behind), LEAST_NAME)) + behind), Text())


class Box(Vertical, Titled):
    """A box whose parts are below each other."""


class ScrollBox(VerticalScroll, Titled):
    """A box that scrolls."""


def _text(title: str | Text) -> Text:
    return Text(title) if isinstance(title, str) else title
