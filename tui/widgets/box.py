"""Boxes with titles in their borders, which are text and never markup: names of tensors and folders are strangers'."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text
from textual.containers import Vertical, VerticalScroll

if TYPE_CHECKING:
    from textual.widget import Widget

Titles = tuple[Text, Text]


class Box(Vertical):
    """A box whose parts stand below each other."""

    DEFAULT_CLASSES = "boxed"
    _titles: Titles | None = None

    def entitle(self, title: str | Text, subtitle: str | Text = "") -> None:
        """Write a title above and one below."""
        self._titles = _entitled(self, self._titles, (_text(title), _text(subtitle)))


class ScrollBox(VerticalScroll):
    """A box that scrolls."""

    DEFAULT_CLASSES = "boxed"
    _titles: Titles | None = None

    def entitle(self, title: str | Text, subtitle: str | Text = "") -> None:
        """Write a title above and one below."""
        self._titles = _entitled(self, self._titles, (_text(title), _text(subtitle)))


def _entitled(box: Widget, before: Titles | None, titles: Titles) -> Titles:
    """Write titles into a border, which paints all that is in it again, if they are others."""
    if titles != before:
        box.border_title, box.border_subtitle = titles
    return titles


def _text(title: str | Text) -> Text:
    return Text(title) if isinstance(title, str) else title
