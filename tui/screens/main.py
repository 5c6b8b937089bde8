"""The screen that the views are on: the title above them, the keys below, one of them at a time between."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from textual.containers import Horizontal
from textual.reactive import Reactive
from textual.screen import Screen
from textual.widgets import ContentSwitcher

from ..views import VIEWS
from ..widgets.box import Entitled
from ..widgets.key_bar import KeyBar
from ..widgets.title import Title
from ..widgets.view_tabs import ViewTabs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult
    from textual.widget import Widget

    from ..document import Document
    from .view import View

MAKE_AHEAD = 0.25
"""Seconds after which the next view is made that nobody has asked for yet, so that a key finds it ready."""


class MainScreen(Screen[None]):
    """The screen.

    Args:
        names: The views that there are, in order; the first is made at once, the others soon after.
    """

    focused: Reactive[Widget | None] = Reactive(None, repaint=False)  # Textual paints the whole screen again for it

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = list(names)
        self._views: dict[str, View] = {self._names[0]: VIEWS[self._names[0]]()}
        self._lit: Entitled | None = None
        self.view_name = self._names[0]

    def compose(self) -> ComposeResult:
        """Make the screen, with its first view."""
        with Horizontal(id="top"):
            yield Title(id="title")
            yield ViewTabs(self._names, id="tabs")
        with ContentSwitcher(id="views", initial=self.view_name):
            yield self._views[self.view_name]
        yield KeyBar(id="keys")

    def on_mount(self) -> None:
        """Go to the first view, and make the others."""
        self._views[self.view_name].enter()
        self.set_timer(MAKE_AHEAD, self._make_ahead)

    async def _make_ahead(self) -> None:
        """Make one view that nobody has asked for yet, unless the app is just opening or closing."""
        missing = [name for name in self._names if name not in self._views]
        if missing:
            if any(views.is_attached for views in self.query(ContentSwitcher)):
                await self._view(missing[0])
            self.set_timer(MAKE_AHEAD, self._make_ahead)
        elif not missing:
            gc.freeze()  # the collector would walk all widgets every few frames, for 20 ms

    async def _view(self, name: str) -> View:
        """Return a view, made if it was not yet."""
        if name not in self._views:
            view = self._views[name] = VIEWS[name]()
            view.display = False
            await self.query_one(ContentSwitcher).mount(view)
        return self._views[name]

    async def show_view(self, name: str) -> None:
        """Show a view in place of the one before."""
        view = await self._view(name)
        with self.app.batch_update():
            self._views[self.view_name].leave()
            self.query_one(ContentSwitcher).current = self.view_name = name
            view.enter()
        self.query_one(ViewTabs).show(name)

    def entitle(self, document: Document | None, note: str) -> None:
        """Say what is shown, and how far it is read."""
        for title in self.query(Title):
            title.show(document, note)

    def set_focus(self, widget: Widget | None, scroll_visible: bool = True, from_app_focus: bool = False) -> None:
        """Move the focus, and the light of the box around it, so that one frame has both."""
        super().set_focus(widget, scroll_visible, from_app_focus)
        around = self.focused.ancestors_with_self if self.focused is not None else []
        box = next((node for node in around if isinstance(node, Entitled)), None)
        if box is not self._lit:
            for changed, on in ((self._lit, False), (box, True)):
                if changed is not None:
                    changed.light(on=on)
            self._lit = box
