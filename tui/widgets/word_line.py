"""A line of words that can be clicked. It paints itself: one widget per word would cost a millisecond each."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.segment import Segment
    from textual import events
    from textual.geometry import Size

CHOSEN = Style(bold=True, reverse=True)
"""The style of the word that is chosen among several."""


@dataclass(frozen=True)
class Word:
    """One word of the line.

    Attributes:
        segments: The characters with their styles.
        action: The action that a click runs, as in a binding; empty for none.
        tooltip: The tooltip under the mouse.
    """

    segments: tuple[Segment, ...]
    action: str = ""
    tooltip: str = ""

    @property
    def width(self) -> int:
        """Its columns."""
        return sum(segment.cell_length for segment in self.segments)


class WordLine(Widget):
    """Words in a line, each with an action and a tooltip. Subclasses define `words`, and refresh on a change."""

    def words(self) -> Sequence[Word]:
        """Return the words of the line as they are now."""
        raise NotImplementedError

    def get_content_width(self, container: Size, viewport: Size) -> int:
        """Take as many columns as the words have."""
        return sum(word.width for word in self.words())

    def render_line(self, y: int) -> Strip:
        """Paint the line."""
        segments = [segment for word in self.words() for segment in word.segments]
        strip = Strip(segments).apply_style(self.rich_style)
        return strip.adjust_cell_length(self.size.width, self.rich_style)

    def _at(self, x: int) -> Word | None:
        words = self.words()
        ends = accumulate(word.width for word in words)
        return next((word for word, end in zip(words, ends, strict=True) if x < end), None)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        """Show the tooltip of the word under the mouse."""
        word = self._at(event.x)
        self.tooltip = (word and word.tooltip) or None

    async def on_click(self, event: events.Click) -> None:
        """Run the action of the word under the mouse."""
        event.stop()
        if (word := self._at(event.x)) and word.action:
            await self.run_action(word.action)
