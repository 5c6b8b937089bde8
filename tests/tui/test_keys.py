"""Keys: letters move as the arrows do, and help lists each key once, wherever it is asked."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from shardviz.tui.app import ShardvizApp
from shardviz.tui.screens.dialogs import HelpScreen
from tests.lanes import at_night
from tests.tui.driving import press, rest, walk, walk_on

if TYPE_CHECKING:
    from pathlib import Path

    from textual.pilot import Pilot


def place(app: ShardvizApp) -> tuple[object, ...]:
    chosen = app.selection
    return chosen.entry, chosen.plane and chosen.plane.at, chosen.rank, type(app.focused).__name__


@pytest.mark.parametrize(
    ("first", "arrows", "letters"),
    [
        ([], ["down", "down", "up"], ["j", "j", "k"]),
        (["enter"], ["down", "right", "right", "left"], ["j", "l", "l", "h"]),
        (["2"], ["right", "down", "left"], ["l", "j", "h"]),
        *at_night([(["enter"], ["shift+down", "shift+right"], ["J", "L"]), (["3"], ["down", "down"], ["j", "j"])]),
    ],
    ids=["tree", "map", "mesh", "blocks", "rank"],
)
def test_letters_move_as_the_arrows_do(healthy: Path, first: list[str], arrows: list[str], letters: list[str]) -> None:
    assert walk(healthy, *first, *arrows, look=place).result == walk(healthy, *first, *letters, look=place).result


def test_letters_are_text_where_text_is_typed(healthy: Path) -> None:
    assert "Tensors: 2 of 4" in walk(healthy, "slash", *"down").text
    assert "no tensor has hjkl" in walk(healthy, "g", *"hjkl").text


@pytest.mark.parametrize("files", ["stepped", *at_night(["pipelined"])])
def test_help_lists_each_key_once_in_every_part(files: str, request: pytest.FixtureRequest) -> None:
    found: dict[str, HelpScreen] = {}

    async def ask(pilot: Pilot[None], view: str, parts: int) -> None:
        await press(pilot, view)
        for _ in range(parts):
            await press(pilot, "f1")
            await rest(pilot)
            screen = pilot.app.screen
            assert isinstance(screen, HelpScreen)
            await press(pilot, "escape", "tab")
            found[f"{view} {pilot.app.focused} {len(found)}"] = screen

    async def run(path: Path) -> None:
        app = ShardvizApp(path)
        async with app.run_test(size=(120, 40)) as pilot:
            await rest(pilot)
            for view, parts in (("1", 2), ("2", 3), ("3", 2), ("4", 1), ("5", 3)):
                await ask(pilot, view, parts)

    asyncio.run(run(request.getfixturevalue(files)))
    for name, screen in found.items():
        listed = [key for part in screen.keys.values() for keys in part.values() for key in keys.split()]
        assert {"F1", "q", "g", "R", "tab"} <= set(listed), name
        assert {key: count for key, count in Counter(listed).items() if count > 1} == {}, name
        assert not re.search(r"\*\*", screen.text), name


def test_help_is_about_the_view_first_and_then_about_all(healthy: Path) -> None:
    text = walk_on(healthy, {"help": ("f1",)}, size=(120, 70))["help"].text
    assert text.index("Here") < text.index("↑ k") < text.index("In all views") < text.index("Go to a rank, a tensor")
