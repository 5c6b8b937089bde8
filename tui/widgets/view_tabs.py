"""The views by name, to the right of the title: where you are, and which key leads elsewhere."""

from __future__ import annotations

from rich.segment import Segment

from .grids.grid import DIM
from .title import FOR_VERDICT
from .word_line import CHOSEN, Word, WordLine

Tab = tuple[str, str, str, str]
"""A view's name, its key, its title, and its tooltip."""


class ViewTabs(WordLine):
    """A key and a title for each view, the current one marked; a click shows a view."""

    def __init__(self, tabs: list[Tab], current: str, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._tabs = tabs
        self._current = current

    def show(self, current: str) -> None:
        """Mark the current view."""
        self._current = current
        self.refresh(layout=self.is_narrow)

    @property
    def is_narrow(self) -> bool:
        """Whether only the current view has its title: the verdict has room for its words in any case."""
        whole = sum(len(f" {key} {title}") for _, key, title, _ in self._tabs)
        return whole > self.app.size.width - FOR_VERDICT

    def words(self) -> list[Word]:
        """Return one word per view."""
        is_narrow = self.is_narrow
        return [
            Word(
                (Segment(f" {key} " if is_narrow and not is_current else f" {key} {title}{' ' * is_current}", style),),
                f"app.show_view('{name}')",
                f"{title}: {tooltip}" if is_narrow else tooltip,
            )
            for name, key, title, tooltip in self._tabs
            for is_current in (name == self._current,)
            for style in (CHOSEN if is_current else DIM,)
        ]
