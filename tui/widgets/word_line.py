"""A line of words that can be clicked. It paints itself: a widget a word is styled and laid out a millisecond each."""

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
"""How the one of several words looks that is chosen."""


@dataclass(frozen=True)
class Word:
    """What stands in the line.

    Attributes:
        segments: The characters with their styles.
        action: What a click does, as in a binding; empty for text that does nothing.
        tooltip: What is said under the mouse.
    """

    segments: tuple[Segment, ...]
    action: str = ""
    tooltip: str = ""

    @property
    def width(self) -> int:
        """Its columns."""
        return sum(segment.cell_length for segment in self.segments)


class WordLine(Widget):
    """Words beside each other, each with a click and a tooltip. Subclasses give `words`, and refresh on a change."""

    def words(self) -> Sequence[Word]:
        """Return what stands in the line now."""
        raise NotImplementedError

    def get_content_width(self, container: Size, viewport: Size) -> int:
        """Take as many columns as the words have."""
        return sum(word.width for word in self.words())

    def render_line(self, y: int) -> Strip:
        """Paint the line."""
        segments = [segment for word in self.words() for segment in word.segments]
        return Strip(segments).adjust_cell_length(self.size.width, self.rich_style)

    def _at(self, x: int) -> Word | None:
        words = self.words()
        ends = accumulate(word.width for word in words)
        return next((word for word, end in zip(words, ends, strict=True) if x < end), None)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        """Say what the word under the mouse does."""
        word = self._at(event.x)
        self.tooltip = (word and word.tooltip) or None

    async def on_click(self, event: events.Click) -> None:
        """Do what the word under the mouse does."""
        event.stop()
        if (word := self._at(event.x)) and word.action:
            await self.run_action(word.action)
