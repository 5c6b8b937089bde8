"""Only what changed is painted: after every key an emulated terminal shows what a full repaint would."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pyte
import pytest
from rich.console import ColorSystem
from textual._compositor import CompositorUpdate

from shardviz.tui.app import ShardvizApp
from tests.lanes import at_night
from tests.tui.driving import SIZES, settle, until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

VIEWS = ("1", "2", "3", "4", "5", "6")
KEYS = (
    *VIEWS,
    *("tab", "shift+tab", "enter", "escape", "up", "down", "left", "right", "shift+down", "pagedown", "home", "end"),
    *("+", "-", "0", "v", "x", "f", "a", "o", "n", "u", "j", "l", "R", "[", "]"),
)
PRESSED = 25


class Emulated(ShardvizApp):
    """The app, with all that it paints written to an emulated terminal too."""

    def __init__(self, path: Path, size: tuple[int, int]) -> None:
        super().__init__(path)
        self.console._color_system = ColorSystem.TRUECOLOR
        self.terminal = pyte.Screen(*size)
        self.frames: list[list[str]] = []
        self._stream = pyte.Stream(self.terminal)

    def _display(self, screen: Any, renderable: Any) -> None:
        super()._display(screen, renderable)
        if isinstance(renderable, CompositorUpdate) and not self._batch_count and screen is self.screen:
            self._stream.feed(renderable.render_segments(self.console))
            self.frames.append(self.terminal.display)

    def repainted(self) -> pyte.Screen:
        """Return a terminal on which all of the screen was painted, with nothing kept from before."""
        for widget in self.screen.walk_children(with_self=True):
            widget._styles_cache.clear()
        terminal = pyte.Screen(self.size.width, self.size.height)
        update = self.screen._compositor.render_full_update()
        pyte.Stream(terminal).feed(update.render_segments(self.console))
        return terminal


def differences(one: pyte.Screen, other: pyte.Screen) -> list[tuple[int, int, str, str]]:
    """Return where two terminals differ: row, column, and what either has there, with colours."""
    return [
        (y, x, str(one.buffer[y][x]), str(other.buffer[y][x]))
        for y in range(one.lines)
        for x in range(one.columns)
        if one.buffer[y][x] != other.buffer[y][x]
    ]


WALKS = [("stepped", 0)]
AT_NIGHT = [("plan", 1), ("stepped", 1), ("bug", 0), ("bug", 1), ("shapes", 0), ("shapes", 1), ("plan", 2)]
"""A dump, and the size of the screen, by which the keys are drawn too."""


@pytest.mark.parametrize(("files", "seed"), [*WALKS, *at_night(AT_NIGHT)])
def test_the_terminal_shows_what_a_full_repaint_shows(files: str, seed: int, request: pytest.FixtureRequest) -> None:
    keys = random.Random(seed).choices(KEYS, k=PRESSED)

    async def run() -> None:
        app = Emulated(request.getfixturevalue(files), SIZES[seed])
        async with app.run_test(size=SIZES[seed]) as pilot:
            await settle(pilot)
            for pressed, key in enumerate(keys, start=1):
                await pilot.press(key)
                await settle(pilot)
                found = differences(app.terminal, app.repainted())
                assert not found, (keys[:pressed], found[:3])

    asyncio.run(run())


def test_an_emulated_terminal_sees_what_was_not_painted(bug: Path) -> None:
    async def run() -> int:
        app = Emulated(bug, SIZES[0])
        async with app.run_test(size=SIZES[0]) as pilot:
            await settle(pilot)
            app._display = lambda *_: None  # type: ignore[method-assign]
            await pilot.press("v")
            await settle(pilot)
            return len(differences(app.terminal, app.repainted()))

    assert asyncio.run(run()) > 0


def test_a_view_that_waits_for_its_place_is_not_painted_in_the_old_one(bug: Path) -> None:
    async def run() -> tuple[int, list[list[str]]]:
        app = Emulated(bug, SIZES[2])
        async with app.run_test(size=SIZES[2]) as pilot:
            await settle(pilot)
            await app.action_show_view("rank")
            app.frames = []
            app.screen.refresh()
            app.screen._on_timer_update()
            too_early = len(app.frames)
            await settle(pilot)
            assert not differences(app.terminal, app.repainted())
        return too_early, app.frames

    too_early, frames = asyncio.run(run())
    assert too_early == 0
    assert frames


def is_prepared(app: ShardvizApp) -> bool:
    """Whether all that is done ahead of keys is done."""
    return len(app._main._views) == len(app.view_names) and not app._main._working._active.is_set()


def frames_of(files: Path, keys: Sequence[str]) -> list[int]:
    """Return how many frames each key paints on a wide screen; what the terminal shows is compared with a repaint."""

    async def run() -> list[int]:
        app, found = Emulated(files, SIZES[2]), []
        async with app.run_test(size=SIZES[2]) as pilot:
            await settle(pilot)
            await until(pilot, lambda: is_prepared(app))
            for key in keys:
                app.frames = []
                await pilot.press(key)
                await settle(pilot)
                found.append(len(app.frames))
                assert not differences(app.terminal, app.repainted()), key
        return found

    return asyncio.run(run())


@pytest.mark.parametrize(
    "keys",
    [
        ("g",),
        ("6", "e"),  # the list of ranks gets a scroll bar
        *at_night(
            [
                (("down", "slash", "u", "p", "2", "1"),),  # the list has a line less, and scrolls
                (("6", "g", "x", "enter"),),  # to a tensor on a mesh of another width
            ]
        ),
    ],
)
def test_what_a_layout_changes_is_in_its_frame(keys: Sequence[str], plan: Path) -> None:
    assert frames_of(plan, keys)[-1] == 1


def test_a_dialog_that_closes_leaves_what_was_behind_it(bug: Path) -> None:
    async def run() -> None:
        app = Emulated(bug, SIZES[1])
        async with app.run_test(size=SIZES[1]) as pilot:
            await settle(pilot)
            before = app.terminal.display
            for key in ("g", "question_mark"):
                await pilot.press(key)
                await settle(pilot)
                assert app.terminal.display != before
                await pilot.press("escape")
                await settle(pilot)
                assert app.terminal.display == before
                assert not differences(app.terminal, app.repainted())

    asyncio.run(run())


def unpainted(app: ShardvizApp) -> list[str]:
    """Return the texts on screen that have no background of their own: the terminal's would be seen through them."""
    strips = app.screen._compositor.render_strips()
    return [segment.text for strip in strips for segment in strip if segment.style is None or not segment.style.bgcolor]


@pytest.mark.parametrize("theme", ["shardviz-light", *at_night(["shardviz-dark"])])
@pytest.mark.parametrize("files", ["bug", *at_night(["stepped", "pipelined", "damaged", "shapes"])])
def test_every_cell_of_every_view_has_a_background(files: str, theme: str, request: pytest.FixtureRequest) -> None:
    async def run() -> dict[str, list[str]]:
        app, found = ShardvizApp(request.getfixturevalue(files)), {}
        async with app.run_test(size=SIZES[2]) as pilot:
            app.theme = theme
            for key in (*VIEWS, "f1"):
                await pilot.press(key)
                await settle(pilot)
                found[key] = unpainted(app)
        return found

    assert not any(asyncio.run(run()).values())
