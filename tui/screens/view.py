"""The base of all views: shows the shared state, changes it when something is chosen, and keeps its own focus."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Generic, get_args

from textual.containers import Vertical
from textual.widget import Widget

from shardviz.picture.text.paint import Side

from ..model.selection import Opened
from ..model.tree import after

if TYPE_CHECKING:
    from textual.geometry import Size

    from ..model.selection import Selection
    from ..viewer import Viewer


SIDES: tuple[Side, ...] = get_args(Side)


class View(Vertical, Generic[Opened]):
    """A view of a document. Subclasses define `compose` and `show`; they set `state.selection`, and all views follow.

    `NAME` is its id, `TITLE` and `TOOLTIP` are shown in the tabs, `FOCUS` selects the widget that is focused at first.
    """

    NAME: ClassVar[str]
    TITLE: ClassVar[str]
    TOOLTIP: ClassVar[str]
    FOCUS: str

    def __init__(self, state: Viewer[Opened]) -> None:
        super().__init__(id=self.NAME)
        self.state = state
        self._shown: tuple[Opened | None, Selection] | None = None
        self._focused: Widget | None = None

    def show(self, document: Opened, selection: Selection) -> None:
        """Show a document and the selection in it."""
        raise NotImplementedError

    def on_mount(self) -> None:
        """Follow the shared state."""
        self.watch(self.app, "document", self.follow, init=False)
        self.watch(self.app, "selection", self.follow, init=False)

    def follow(self) -> None:
        """Show the shared state, if it changed; a view that is not on screen waits until it is."""
        document, selection = self.state.document, self.state.selection
        is_new = self._shown is None or document is not self._shown[0] or selection != self._shown[1]
        if self.display and is_new:
            self._shown = (document, selection)
            if document is not None:
                self.show(document, selection)

    def show_again(self) -> None:
        """Show the shared state after something else changed that the view depends on."""
        self._shown = None
        self.follow()

    @property
    def room(self) -> Size:
        """The lines and columns that a view has, on screen or not."""
        return self.parent.size if isinstance(self.parent, Widget) else self.size

    def enter(self) -> None:
        """Come on screen: show changes made meanwhile, and focus the widget that was focused here before."""
        self.follow()
        self.screen.set_focus(self._focused or self.query_one(self.FOCUS))

    def leave(self) -> None:
        """Remember the focused widget before another view is shown."""
        focused = self.screen.focused
        self._focused = focused if focused is not None and self in focused.ancestors else None

    def action_next_side(self) -> None:
        """Go from claimed to held to difference; the views that show a side bind a key to it."""
        self.state.selection = replace(self.state.selection, side=after(SIDES, self.state.selection.side))
