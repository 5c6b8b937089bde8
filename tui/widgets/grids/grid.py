"""The base of the big grids: lines are painted when they are shown, in styles that are looked up once per theme."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from .side_scroll import SideScroll
from .unframed import Unframed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from textual import events
    from textual.scrollbar import ScrollBar

DIM = Style(dim=True)
BOLD = Style(bold=True)


def columns_of(text: str) -> int:
    """Return the columns that a text takes; of most the number of characters, which Rich would look for in a cache."""
    return len(text) if text.isascii() else cell_len(text)


class Grid(ScrollView, can_focus=True):
    """A grid that paints its own lines. Textual computes a widget's style each time; here once is enough."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._styles_cache = Unframed()
        self._base: Style | None = None
        self._behind = ""
        self._colours = ""
        self._laid_out = Size(0, 0)
        self._scrolled: tuple[object, ...] = ()
        self._painted_at: Size | None = None

    @property
    def vertical_scrollbar(self) -> ScrollBar:
        """Its scroll bar, which is as tall as the grid: made where Textual would make its own."""
        if self._vertical_scrollbar is None:
            self._vertical_scrollbar = bar = SideScroll(self.scrollbar_size_vertical)
            bar.display = False
            self.app._start_widget(self, bar)
        return self._vertical_scrollbar

    @property
    def size(self) -> Size:
        """Its room; looked up once while it is painted: Textual walks up to the screen each time."""
        return self._painted_at or super().size

    def render_lines(self, crop: Region) -> list[Strip]:
        """Paint some lines, which all ask for the same size."""
        self._painted_at = super().size
        try:
            return super().render_lines(crop)
        finally:
            self._painted_at = None

    @property
    def base(self) -> Style:
        """The style of plain text here."""
        if self._base is None:
            self._base = self.rich_style
        return self._base

    @property
    def behind(self) -> str:
        """The colour of the background, as hex."""
        if not self._behind:
            self._behind = self.background_colors[1].hex
        return self._behind

    @property
    def colours(self) -> str:
        """The kind of palette that the terminal has, as `Console.color_system` names it."""
        if not self._colours:
            self._colours = self.app.console.color_system or "truecolor"
        return self._colours

    def watch_has_focus(self, _has_focus: bool) -> None:
        """Leave styles alone: no rule is about a grid's focus, and Textual would style its scroll bars again too."""

    def on_focus(self, event: events.Focus) -> None:
        """Take the focus; Textual would paint all of the grid again for it."""
        event.prevent_default()
        self.has_focus = True
        self.show_focus()

    def on_blur(self, event: events.Blur) -> None:
        """Leave the focus to others."""
        event.prevent_default()
        self.has_focus = False
        self.show_focus()

    def show_focus(self) -> None:
        """Repaint the parts that look different with the focus."""

    def notify_style_update(self) -> None:
        """Look styles up again after the theme changed."""
        self._base, self._behind = None, ""
        super().notify_style_update()

    def on_resize(self) -> None:
        """Fit the content into its room; Textual calls this each time that the grid comes on screen."""
        if self.size != self._laid_out:
            self._laid_out = self.size
            self.fit()

    def fit(self) -> None:
        """Fit the content into its new room, where that changes anything."""

    def extend(self, size: Size) -> None:
        """Set the size of the whole; the screen is laid out again only where scroll bars appear or go, and once."""
        bars = self._bars(size)
        if not self.size or bars != (self.show_vertical_scrollbar, self.show_horizontal_scrollbar):
            self.virtual_size = size
            if self.size:
                self.show_vertical_scrollbar, self.show_horizontal_scrollbar = bars
                for bar, is_shown in zip((self.vertical_scrollbar, self.horizontal_scrollbar), bars, strict=True):
                    bar.display = is_shown  # Textual would do that within the layout, and need a second one
            return
        self.set_reactive(ScrollView.virtual_size, size)
        if bars[0]:
            self.vertical_scrollbar.window_virtual_size = size.height
        if bars[1]:
            self.horizontal_scrollbar.window_virtual_size = size.width
        self.scroll_x, self.scroll_y = self.validate_scroll_x(self.scroll_x), self.validate_scroll_y(self.scroll_y)

    def _size_updated(self, size: Size, virtual_size: Size, container_size: Size, layout: bool = True) -> bool:
        """Fit the scroll bars; Textual would paint them at each layout, and with them all lines that they cross."""
        scrolled = (size, self.virtual_size, self.show_vertical_scrollbar, self.show_horizontal_scrollbar)
        if scrolled == self._scrolled:
            return False
        self._scrolled = scrolled
        is_changed = super()._size_updated(size, virtual_size, container_size, layout)
        self.on_resize()  # in the frame that has the new size, and not when Textual says so, in the next one
        return is_changed

    def _bars(self, size: Size) -> tuple[bool, bool]:
        """Return whether there are bars for down and across, which take room from each other."""
        width, height = self.size
        across = size.width > width
        down = size.height > height - self.styles.scrollbar_size_horizontal * across
        return down, size.width > width - self.styles.scrollbar_size_vertical * down

    def bring_into_view(self, box: Region) -> None:
        """Scroll as far as is needed to show a part of the grid; Textual would always lay out the screen again.

        A grid that is not on screen has no size: it scrolls when it gets one, in `fit`.
        """
        if not self.size:
            return
        wanted = box.intersection(Region(0, 0, *self.virtual_size))
        if not Region(*self.scroll_offset, *self.size).contains_region(wanted):
            self.scroll_to_region(wanted, animate=False, force=True)

    def strip_of(self, segments: Iterable[Segment]) -> Strip:
        """Return a line as wide as the grid."""
        line, width = [*segments], self.size.width
        taken = sum(columns_of(text) for text, _, _ in line)
        if taken > width:
            return Strip(line, taken).adjust_cell_length(width)
        return Strip([*line, Segment(" " * (width - taken), self.base)] if taken < width else line, width)

    @property
    def blank(self) -> Strip:
        """A line with nothing on it."""
        return Strip.blank(self.size.width, self.base)
