"""The screen that has the views: the title above them, the keys below, one view at a time between."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING

from textual.containers import Horizontal
from textual.screen import Screen
from textual.widgets import ContentSwitcher

from ..widgets.frame import KeyBar, Title, ViewTabs
from .compare_view import CompareView
from .explore_view import ExploreView, FindingsView
from .memory_view import MemoryView
from .rank_view import MeshView, RankView
from .step_view import StepView

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult

    from ..app import ShardvizApp
    from .view import View


VIEWS: dict[str, type[View]] = {
    kind.NAME: kind for kind in (ExploreView, MeshView, RankView, FindingsView, StepView, MemoryView, CompareView)
}
KEYS = {name: str(number) for number, name in enumerate(VIEWS, start=1)}


READING, PAUSE = 1.0, 0.1
"""Seconds after which the views that nobody asked for are made, and between two of them."""


class MainScreen(Screen[None]):
    """All views on one screen, each made when it is first shown.

    Args:
        state: The state that the views share.
        names: The views, in order.
        first: The view that is shown first.
    """

    def __init__(self, state: ShardvizApp, names: Sequence[str], first: str) -> None:
        super().__init__()
        self._state = state
        self._names = list(names)
        self._views: dict[str, View] = {first: VIEWS[first](state)}
        self._switching = asyncio.Lock()
        self.view_name = first

    def compose(self) -> ComposeResult:
        """Put the title and the tabs above the first view, the keys below."""
        with Horizontal(id="top"):
            yield Title(id="title")
            tabs = [(name, KEYS[name], VIEWS[name].TITLE, VIEWS[name].TOOLTIP) for name in self._names]
            yield ViewTabs(tabs, self.view_name, id="tabs")
        yield ContentSwitcher(self._views[self.view_name], id="views", initial=self.view_name)
        yield KeyBar(id="keys")

    def on_mount(self) -> None:
        """Focus the first view, and make the others while the user reads it."""
        self._views[self.view_name].enter()
        self.set_timer(READING, self._make_next)

    async def _make_next(self) -> None:
        """Make a view before it is asked for: what is made when its key is pressed is late by as much."""
        name = next((name for name in self._names if name not in self._views), None)
        if name is None:
            gc.freeze()  # the collector would walk all widgets every few frames
        elif self.is_running and self.app.return_code is None:
            async with self._switching:
                await self._make(name)
            self.set_timer(PAUSE, self._make_next)

    async def _make(self, name: str) -> None:
        if name not in self._views:
            self._views[name] = VIEWS[name](self._state)
            await self.query_one(ContentSwitcher).add_content(self._views[name])

    async def show_view(self, name: str) -> None:
        """Show a view instead of the current one; make it if it is not there yet."""
        async with self._switching:
            await self._make(name)
            if not self.is_running:
                return  # the app closed while the view was made
            self._views[self.view_name].leave()
            self.view_name = name
            with self.app.batch_update():
                self.query_one(ContentSwitcher).current = name
                self._views[name].enter()
                self.query_one(ViewTabs).show(name)
