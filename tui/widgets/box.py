"""Boxes with titles in their borders, which are text and never markup: names of tensors and folders are strangers'."""

from __future__ import annotations

from rich.text import Text
from textual.containers import Vertical, VerticalScroll
from textual.widget import Widget

Titles = tuple[Text, Text]


class Entitled(Widget):
    """What boxes share: a border that is lit where the focus is within, and titles in it."""

    DEFAULT_CLASSES = "boxed"
    _titles: Titles | None = None

    def entitle(self, title: str | Text, subtitle: str | Text = "") -> None:
        """Write a title above and one below, if they are others: a border paints all that is in it again."""
        titles = (_text(title), _text(subtitle))
        if titles != self._titles:
            self._titles = titles
            self.border_title, self.border_subtitle = titles

    def light(self, *, on: bool) -> None:
        """Style the border alone: `:focus-within` would style all that is in it again."""
        self.set_class(on, "lit", update=False)
        self.app.stylesheet.update_nodes([self])


class Box(Vertical, Entitled):
    """A box whose parts stand below each other."""


class ScrollBox(VerticalScroll, Entitled):
    """A box that scrolls."""


def _text(title: str | Text) -> Text:
    return Text(title) if isinstance(title, str) else title
