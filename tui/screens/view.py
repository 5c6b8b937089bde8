"""What all views share: the app's document and selection come down to them, and each keeps its own focus."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.containers import Vertical

if TYPE_CHECKING:
    from textual.widget import Widget

    from ..app import ShardvizApp
    from ..document import Document
    from ..selection import Selection


class View(Vertical):
    """A view of the dump. Subclasses compose it and give `show`.

    `NAME` is its id, `TITLE` what it is called, `TOOLTIP` what it shows, `FOCUS` selects what has the focus at first.
    """

    app: ShardvizApp
    NAME: ClassVar[str]
    TITLE: ClassVar[str]
    TOOLTIP: ClassVar[str]
    FOCUS: ClassVar[str]

    def __init__(self) -> None:
        super().__init__(id=self.NAME)
        self._shown: tuple[Document | None, Selection] | None = None
        self._focused: Widget | None = None

    def show(self, document: Document | None, selection: Selection) -> None:
        """Show a document and what is chosen in it."""
        raise NotImplementedError

    def on_mount(self) -> None:
        """Follow the app, and show what it has already."""
        self.watch(self.app, "document", self.follow, init=False)
        self.watch(self.app, "selection", self.follow, init=False)
        self.follow()

    def follow(self) -> None:
        """Show the app's state; a view that is not on screen waits until it is."""
        state = (self.app.document, self.app.selection)
        is_new = self._shown is None or state[0] is not self._shown[0] or state[1] != self._shown[1]
        if is_new and self.display:
            self._shown = state
            self.show(*state)

    def enter(self) -> None:
        """Come on screen: catch up with what changed meanwhile, and take the focus to where it was here."""
        self.follow()
        self.screen.set_focus(self._focused or self.query_one(self.FOCUS))

    def leave(self) -> None:
        """Go off screen."""
        focused = self.screen.focused
        self._focused = focused if focused is not None and self in focused.ancestors else None
