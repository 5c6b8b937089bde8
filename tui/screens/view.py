"""What all views share: the title above, the keys below, and the app's document and selection coming down."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.containers import Horizontal
from textual.screen import Screen
from textual.widgets import Footer

from ..widgets.title import Title
from ..widgets.view_tabs import ViewTabs

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from ..app import ShardvizApp
    from ..document import Document
    from ..selection import Selection


class View(Screen[None]):
    """A view of the dump. Subclasses give `compose_view` and `show`."""

    app: ShardvizApp
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-normal"), (160, "-wide")]  # noqa: RUF012  Textual's own form
    VERTICAL_BREAKPOINTS = [(0, "-short"), (32, "-tall")]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self._shown: tuple[Document | None, Selection] | None = None

    def compose(self) -> ComposeResult:
        """Put the view between the title and the keys."""
        with Horizontal(id="top"):
            yield Title(id="title")
            yield ViewTabs(self.app.view_names, id="tabs")
        yield from self.compose_view()
        yield Footer(show_command_palette=False)

    def compose_view(self) -> ComposeResult:
        """Make the widgets of the view."""
        raise NotImplementedError

    def show(self, document: Document | None, selection: Selection) -> None:
        """Show a document and what is chosen in it."""
        raise NotImplementedError

    def on_mount(self) -> None:
        """Follow the app."""
        self.watch(self.app, "document", self._changed, init=False)
        self.watch(self.app, "selection", self._changed, init=False)
        self.watch(self.app, "other_document", self._other_changed, init=False)
        self.watch(self.app, "note", self._changed, init=False)

    def on_screen_resume(self) -> None:
        """Catch up with what changed while another view was shown."""
        self._changed()

    def _other_changed(self) -> None:
        """Show the other dump, if this view does."""
        self._shown = None
        self._changed()

    def _changed(self) -> None:
        """Show the app's state; a view that is not on screen waits until it is."""
        if not self.is_current and self._shown is not None:
            return
        self.query_one(Title).show(self.app.document, self.app.note)
        self.query_one(ViewTabs).show(self.app.current_mode)
        state = (self.app.document, self.app.selection)
        if self._shown is None or state[0] is not self._shown[0] or state[1] != self._shown[1]:
            self._shown = state
            self.show(*state)
