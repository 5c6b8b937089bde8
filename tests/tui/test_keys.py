"""Keys: letters move as the arrows do, and help lists each key once, wherever it is asked."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from shardviz.tui.app import ShardvizApp
from shardviz.tui.keys import LETTERS
from shardviz.tui.screens.dialogs import HelpScreen, help_for
from shardviz.tui.screens.step_view import ScheduleGrid
from shardviz.tui.widgets.grid import Lines
from shardviz.tui.widgets.listing import ModuleTree
from shardviz.tui.widgets.mesh_grid import MeshGrid
from shardviz.tui.widgets.tensor_map import TensorMap
from tests.lanes import at_night, nightly
from tests.tui.driving import press, rest, walk_on

if TYPE_CHECKING:
    from pathlib import Path

    from textual.pilot import Pilot
    from textual.widget import Widget


@pytest.mark.parametrize(
    ("widget", "ways"),
    [(ModuleTree, "hjkl"), (Lines, "jk"), (TensorMap, "hjklHJKL"), (MeshGrid, "hjkl"), (ScheduleGrid, "hjkl")],
)
def test_letters_are_bound_to_what_the_arrows_do(widget: type[Widget], ways: str) -> None:
    actions = {key: bindings[0].action for key, bindings in widget._merged_bindings.key_to_bindings.items()}
    arrows = {letter: arrow for arrow, letter in LETTERS.items()}
    for way in ways:
        assert actions[way] == actions[f"shift+{arrows[way.lower()]}" if way.isupper() else arrows[way]]


def test_letters_move_the_cursor(healthy: Path) -> None:
    walks = walk_on(healthy, {"tree": "jjj", "map": ("enter", *"jll"), "mesh": "2lj"}, look=lambda app: app.selection)
    chosen = [shown.result for shown in walks.values()]
    assert (chosen[0].entry, chosen[1].plane.at, chosen[2].rank) == (2, (1, 2), 5)


def test_letters_are_text_where_text_is_typed(healthy: Path) -> None:
    walks = walk_on(healthy, {"search": ("slash", *"down"), "goto": ("escape", "g", *"hjkl")})
    assert "Tensors: 2 of 4" in walks["search"].text
    assert "no tensor has hjkl" in walks["goto"].text


@pytest.mark.parametrize("files", ["stepped", *at_night(["pipelined"])])
def test_help_lists_each_key_once_in_every_part(files: str, request: pytest.FixtureRequest) -> None:
    found: dict[str, HelpScreen] = {}

    async def ask(pilot: Pilot[None], view: str, parts: int) -> None:
        await press(pilot, view)
        for _ in range(parts):
            found[f"{view} {pilot.app.focused} {len(found)}"] = help_for(pilot.app.screen)
            await press(pilot, "tab")

    async def run(path: Path) -> None:
        app = ShardvizApp(path)
        async with app.run_test(size=(120, 40)) as pilot:
            await rest(pilot)
            for view, parts in (("1", 2), ("2", 3), ("3", 2), ("4", 1), ("5", 3)):
                await ask(pilot, view, parts)

    asyncio.run(run(request.getfixturevalue(files)))
    for name, screen in found.items():
        listed = [key for part in screen.keys.values() for keys in part.values() for key in keys.split()]
        assert {"f1", "q", "g", "R", "tab"} <= set(listed), name
        assert {key: count for key, count in Counter(listed).items() if count > 1} == {}, name
        assert not re.search(r"\*\*", screen.text), name


@nightly
def test_help_is_about_what_is_focused_first_and_then_about_all(healthy: Path) -> None:
    walks = walk_on(healthy, {"tree": ("f1",), "map": ("escape", "enter", "f1")}, size=(120, 70))
    text = walks["tree"].text
    assert "Every tensor of the model" in text
    assert "Find tensors by name" in text
    assert "rows downwards, columns to the right" in walks["map"].text
    assert text.index("Here") < text.index("↑ k") < text.index("In all views") < text.index("Go to a rank, a tensor")
