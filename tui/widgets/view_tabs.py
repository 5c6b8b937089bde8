"""The views by name, on the right of the title: where you are, and the key that goes elsewhere."""

from __future__ import annotations

from rich.segment import Segment

from ..views import KEYS, VIEWS
from .grid import DIM
from .word_line import CHOSEN, Word, WordLine


class ViewTabs(WordLine):
    """A key and a title for each view, the shown one marked; a click goes there."""

    def __init__(self, names: list[str], current: str, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._names = names
        self._current = current

    def show(self, current: str) -> None:
        """Mark the view that is shown."""
        self._current = current
        self.refresh()

    def words(self) -> list[Word]:
        """Return a word a view."""
        return [
            Word(
                (Segment(f" {KEYS[name]} {VIEWS[name].TITLE} ", CHOSEN if name == self._current else DIM),),
                f"app.show_view('{name}')",
                VIEWS[name].TOOLTIP,
            )
            for name in self._names
        ]
