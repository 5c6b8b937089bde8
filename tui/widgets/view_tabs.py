"""The views by name, on the right of the title: where you are, and the key that goes elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.containers import Horizontal
from textual.widgets import Label

if TYPE_CHECKING:
    from textual import events
    from textual.app import ComposeResult

VIEWS = {"explore": "Tensors", "mesh": "Mesh", "rank": "Rank", "findings": "Findings", "compare": "Compare"}
"""What the views are called, in the order of their keys 1, 2, ..."""


class ViewTabs(Horizontal):
    """The names."""

    def __init__(self, modes: list[str], *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._modes = modes

    def compose(self) -> ComposeResult:
        """Make a name a view."""
        for mode in self._modes:
            yield ViewTab(mode)

    def show(self, current: str) -> None:
        """Mark the view that is shown."""
        for tab in self.query(ViewTab):
            tab.set_class(tab.mode == current, "chosen")


class ViewTab(Label):
    """One view's name."""

    def __init__(self, mode: str) -> None:
        super().__init__(f" {list(VIEWS).index(mode) + 1} {VIEWS[mode]} ", markup=False, id=f"view-{mode}")
        self.mode = mode

    def on_click(self, event: events.Click) -> None:
        """Go there."""
        event.stop()
        self.app.switch_mode(self.mode)
