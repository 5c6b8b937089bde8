"""The screen that has the views: the title above them, the keys below, one view at a time between."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

from textual.css.query import NoMatches
from textual.reactive import Reactive

from ..widgets.box import Column, Row
from ..widgets.key_bar import KeyBar
from ..widgets.title import Opened, Title
from ..widgets.view_tabs import ViewTabs
from .arranging import ArrangedOnce
from .frames import PaintedOnce
from .views.all import KEYS, VIEWS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult
    from textual.widget import Widget

    from ..model.state import State
    from .views.view import View

PAUSE = 0.05
"""Seconds between two parts of the work that is done ahead, so that a view is ready when its key is pressed."""


class MainScreen(PaintedOnce[None]):
    """All views on one screen, laid out once: the current one in place, the others beside it.

    Args:
        state: The state that the views share.
        names: The views, in order.
        first: The view that is shown first, and made at once; the others are made soon after.
    """

    BLANK: ClassVar[bool] = True
    focused: Reactive[Widget | None] = Reactive(None, repaint=False)  # Textual would repaint the whole screen

    def __init__(self, state: State, names: Sequence[str], first: str) -> None:
        super().__init__()
        self._compositor = ArrangedOnce()
        self._state = state
        self._names = list(names)
        self._views: dict[str, View] = {first: VIEWS[first](state)}
        self._making = asyncio.Lock()
        self._is_put_off = False
        self.view_name = first

    def compose(self) -> ComposeResult:
        """Put the title and the tabs above the first view, the keys below."""
        with Row(id="top"):
            yield Title(id="title")
            tabs = [(name, KEYS[name], VIEWS[name].TITLE, VIEWS[name].TOOLTIP) for name in self._names]
            yield ViewTabs(tabs, self.view_name, id="tabs")
        with Column(id="views"):
            yield self._views[self.view_name]
        yield KeyBar(id="keys")

    def on_mount(self) -> None:
        """Show the first view, and start to make the others."""
        self._views[self.view_name].put(on_screen=True)
        self._views[self.view_name].enter()
        self._working = self.set_interval(PAUSE, self._work_ahead, pause=True)
        self.call_after_refresh(self._working.resume)  # nothing comes before the first frame
        self.watch(self.app, "document", self._working.resume, init=False)

    async def _work_ahead(self) -> None:
        """Make a view before it is asked for, or prepare it for a new document: one part of the work at a time."""
        if not any(views.is_attached for views in self.query("#views")):
            return  # the app is just opening or closing
        for name in self._names:
            if name not in self._views:
                await self._view(name)
                return
            with suppress(NoMatches):  # the app is closing: the parts of a view go before the view does
                if self._views[name].make_ready() or self._views[name].work_ahead():
                    return
        self._working.pause()
        gc.freeze()  # the collector would walk all widgets every few frames, for 20 ms

    async def _view(self, name: str) -> View:
        """Return a view; if it does not exist yet, make it beside the screen."""
        async with self._making:  # a key may ask for the view that is being made
            if name not in self._views:
                view = VIEWS[name](self._state)
                view.put(on_screen=False)
                await self.query_one("#views").mount(view)
                self._views[name] = view
        return self._views[name]

    async def show_view(self, name: str) -> None:
        """Show a view instead of the current one."""
        before, view = self._views[self.view_name], await self._view(name)
        self.view_name = name
        with self.app.batch_update():
            before.leave()
            before.put(on_screen=False)
            view.put(on_screen=True)
            view.enter()
        self.query_one(ViewTabs).show(name)

    def _on_timer_update(self) -> None:
        """Paint a frame, once all that is waiting is in it: before, a view would be painted in its old place."""
        is_moving = any(view.is_running and view._layout_required for view in self._views.values())
        self._is_put_off = is_moving or (not self._is_put_off and self._message_queue.qsize() > 0)
        if self._is_put_off:
            self._update_timer.pause()  # with nothing left to do the screen asks for a frame again
            return
        super()._on_timer_update()

    def entitle(self, about: Opened) -> None:
        """Show the dump's title, and how far it has been read."""
        for title in self.query(Title):
            title.show(about)

    def set_focus(self, widget: Widget | None, scroll_visible: bool = True, from_app_focus: bool = False) -> None:
        """Move the focus, and light the box around it in the same frame."""
        super().set_focus(widget, scroll_visible, from_app_focus)
        self._views[self.view_name].light(self.focused)
