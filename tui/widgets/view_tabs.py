"""The views by name, to the right of the title: where you are, and which key leads elsewhere."""

from __future__ import annotations

from rich.segment import Segment

from .grid import DIM
from .word_line import CHOSEN, Word, WordLine

Tab = tuple[str, str, str]
"""A view's name, its key and title in the line, and its tooltip."""


class ViewTabs(WordLine):
    """A key and a title for each view, the current one marked; a click shows a view."""

    def __init__(self, tabs: list[Tab], current: str, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._tabs = tabs
        self._current = current

    def show(self, current: str) -> None:
        """Mark the current view."""
        self._current = current
        self.refresh()

    def words(self) -> list[Word]:
        """Return one word per view."""
        return [
            Word((Segment(f" {text} ", CHOSEN if name == self._current else DIM),), f"app.show_view('{name}')", tooltip)
            for name, text, tooltip in self._tabs
        ]
