"""The base of the grids and lists that paint their own lines, each when it is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.style import Style
from textual.geometry import Region
from textual.scroll_view import ScrollView
from textual.strip import Strip

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.segment import Segment

DIM = Style(dim=True)
BOLD = Style(bold=True)


class Grid(ScrollView, can_focus=True):
    """A widget that scrolls, and paints only the lines on screen; `base` is looked up once for all of them."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.base = Style()
        """The style of plain text here."""

    def render_lines(self, crop: Region) -> list[Strip]:
        """Paint some lines."""
        self.base = self.rich_style
        return super().render_lines(crop)

    @property
    def palette(self) -> str:
        """The kind of palette that the terminal has, as `Console.color_system` names it."""
        return self.app.console.color_system or "truecolor"

    def on_resize(self) -> None:
        """Fit the content into its room."""
        self.fit()

    def fit(self) -> None:
        """Fit the content into its new room, if that changes anything."""

    def bring_into_view(self, box: Region) -> None:
        """Scroll as far as is needed to show a part of the grid. A grid without a size scrolls when it gets one."""
        if self.size:
            wanted = box.intersection(Region(0, 0, *self.virtual_size))
            self.scroll_to_region(wanted, animate=False, force=True)

    def strip_of(self, segments: Iterable[Segment]) -> Strip:
        """Return a line as wide as the grid."""
        return Strip(segments).adjust_cell_length(self.size.width, self.base)

    @property
    def blank(self) -> Strip:
        """A line with nothing on it."""
        return Strip.blank(self.size.width, self.base)
