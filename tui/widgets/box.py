"""Boxes with titles in their borders, which are text and never markup: names of tensors and folders are strangers'."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text
from textual.containers import Vertical, VerticalScroll
from textual.geometry import Region
from textual.widget import Widget

if TYPE_CHECKING:
    from typing_extensions import Self

Titles = tuple[Text, Text]


class Entitled(Widget):
    """What boxes share: a border that is lit where the focus is within, and titles in it."""

    DEFAULT_CLASSES = "boxed"
    _titles: Titles | None = None
    _border_only = False

    def entitle(self, title: str | Text, subtitle: str | Text = "") -> None:
        """Write a title above and one below, if they are others: a border paints all that is in it again."""
        titles = (_text(title), _text(subtitle))
        if titles != self._titles:
            self._titles = titles
            self.border_title, self.border_subtitle = titles

    def light(self, *, on: bool) -> None:
        """Style and paint the border alone: `:focus-within` would do all that is in it again."""
        self.set_class(on, "lit", update=False)
        self._border_only = True
        self.app.stylesheet.update_nodes([self])
        self._border_only = False

    def refresh(self, *regions: Region, repaint: bool = True, layout: bool = False, recompose: bool = False) -> Self:
        """Paint again, while the light changes no more than the border."""
        if self._border_only and not regions and not layout:
            width, height = self.outer_size
            regions = (
                Region(0, 0, width, 1),
                Region(0, height - 1, width, 1),
                Region(0, 0, 1, height),
                Region(width - 1, 0, 1, height),
            )
        return super().refresh(*regions, repaint=repaint, layout=layout, recompose=recompose)


class Box(Vertical, Entitled):
    """A box whose parts stand below each other."""


class ScrollBox(VerticalScroll, Entitled):
    """A box that scrolls."""


def _text(title: str | Text) -> Text:
    return Text(title) if isinstance(title, str) else title
