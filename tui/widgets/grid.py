"""The base of what paints its own lines when they are shown: grids, and lists of lines with a cursor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from ..keys import keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from textual import events


PLAIN = Style()
DIM = Style(dim=True)
BOLD = Style(bold=True)
CHOSEN = Style(bold=True, reverse=True)
"""What the cursor is on, or the chosen one of several words."""


class Grid(ScrollView, can_focus=True):
    """A widget that scrolls, and paints only the lines on screen; `base` is looked up once for all of them."""

    base = PLAIN
    """The style of plain text here."""
    _last_size = Size(0, 0)

    def render_lines(self, crop: Region) -> list[Strip]:
        """Paint some lines."""
        self.base = self.rich_style
        return super().render_lines(crop)

    @property
    def palette(self) -> str:
        """The kind of palette that the terminal has, as `Console.color_system` names it."""
        return self.app.console.color_system or "truecolor"

    @property
    def room(self) -> Size:
        """Its size, or that which it had when it was last on screen: most often it comes back to the same."""
        return self.size or self._last_size

    def on_resize(self) -> None:
        """Fit the content into its room; if that is the same as when it was last on screen, only scroll."""
        if self.size == self._last_size:
            self.scroll_to_cursor()
        else:
            self._last_size = self.size
            self.fit()

    def fit(self) -> None:
        """Fit the content into its new room, and bring the cursor into view."""
        self.scroll_to_cursor()

    def scroll_to_cursor(self) -> None:
        """Scroll as far as is needed to show the cursor, if there is one."""

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


class Lines(Grid):
    """The list, with a cursor on one line."""

    @dataclass
    class Highlighted(Message):
        """The cursor came to a line."""

        lines: Lines
        index: int

        @property
        def control(self) -> Lines:
            """The list, for `@on` selectors."""
            return self.lines

    @dataclass
    class Chosen(Highlighted):
        """A line was chosen."""

    BINDINGS = keys(
        "lines",
        hidden=[
            ("up,k", "move(-1)", "Up", "To the line above"),
            ("down,j", "move(1)", "Down", "To the line below"),
            ("pageup", "page(-1)", "Page up", "A page up"),
            ("pagedown", "page(1)", "Page down", "A page down"),
            ("home", "end(0)", "First", "To the first line"),
            ("end", "end(-1)", "Last", "To the last line"),
            ("enter", "choose", "Open", "Open this line"),
        ],
    )

    count = cursor = 0
    _line: Callable[[int], Text] | None = None

    def show(self, count: int, line: Callable[[int], Text], cursor: int | None = None) -> None:
        """Show so many lines, each made when it is on screen; the cursor stays by default."""
        self.count, self._line = count, line
        self.virtual_size = Size(0, count)
        self.put_cursor(self.cursor if cursor is None else cursor)

    @property
    def text_width(self) -> int:
        """The columns that a line has."""
        return self.size.width - self.scrollbar_size_vertical

    def render_line(self, y: int) -> Strip:
        """Paint one line of the screen."""
        index = y + self.scroll_offset.y
        if self._line is None or index >= self.count:
            return self.blank
        text, style = self._line(index), self.base
        text.truncate(self.text_width, overflow="ellipsis")
        if index == self.cursor and self.has_focus:
            text, style = Text(text.plain), style + CHOSEN  # in its own colors and grays it cannot be read
        elif index == self.cursor:
            style += BOLD
        segments = Segment.apply_style(text.render(self.app.console), style)
        return Strip(segments).adjust_cell_length(self.size.width, style)

    def put_cursor(self, index: int) -> None:
        """Put the cursor on a line, or on the nearest one that there is."""
        self.cursor = min(max(index, 0), max(self.count - 1, 0))
        self.scroll_to_cursor()
        self.refresh()

    def scroll_to_cursor(self) -> None:
        """Keep the cursor in view."""
        self.bring_into_view(Region(0, self.cursor, 1, 1))

    def action_move(self, step: int) -> None:
        """Move the cursor."""
        if self.count:
            self.put_cursor(self.cursor + step)
            self.post_message(self.Highlighted(self, self.cursor))

    def action_end(self, index: int) -> None:
        """Move the cursor to the first or the last line."""
        if self.count:
            self.action_move(index % self.count - self.cursor)

    def action_page(self, step: int) -> None:
        """Move the cursor by a screenful."""
        self.action_move(step * max(self.size.height - 1, 1))

    def action_choose(self) -> None:
        """Choose the line under the cursor."""
        if self.count:
            self.post_message(self.Chosen(self, self.cursor))

    def on_click(self, event: events.Click) -> None:
        """Put the cursor under the mouse; a double click chooses."""
        index = event.y + self.scroll_offset.y
        if index < self.count:
            self.action_move(index - self.cursor)
            if event.chain > 1:
                self.action_choose()
