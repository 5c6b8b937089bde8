"""Walks by keys: what a user gets from where they start."""

from __future__ import annotations

import asyncio
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec import structs

from shardviz.errors import DumpError
from shardviz.layout.mesh import Mesh, parse_mesh
from shardviz.picture.model import sides
from shardviz.tui import viewer
from shardviz.tui.app import ShardvizApp, view
from tests.dumps import Made, make_dump
from tests.lanes import nightly
from tests.tui.driving import PATIENCE, Driven, rest, until, walk, walk_on
from tests.tui.steps import add_to_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardviz.tui.model.document import Document
    from shardviz.tui.model.selection import Selection


def selection(app: ShardvizApp) -> Selection:
    return app.selection


def test_the_next_finding_brings_its_tensor_to_the_map(shapes: Path) -> None:
    walks = walk_on(shapes, {"first": (), "next": "n", "around": "n"}, look=selection)
    assert [shown.result.finding for shown in walks.values()] == [0, 1, 0]
    assert "float32[2, 3/tp]" in walks["next"].text


def test_filters_leave_what_is_wrong_or_over_an_axis(even_bug: Path, shapes: Path) -> None:
    assert "Tensors: 3 of 4" in walk(even_bug, "f").text
    walks = walk_on(shapes, {"fsdp": "a", "tp": "a", "all": "a"})
    assert "Tensors: 3 of 12" in walks["fsdp"].text
    assert "axis fsdp" in walks["fsdp"].text
    assert "Tensors: 7 of 12" in walks["tp"].text
    assert " of 12 " not in walks["all"].text


@nightly
def test_search_finds_part_of_a_name_and_escape_takes_every_filter_away(healthy: Path) -> None:
    found = ("slash", "type down", "enter")
    first = {"found": ("slash", "type n.bi"), "closed": ("escape",)}
    walks = walk_on(healthy, {**first, "kept": found, "all": ("escape",), "none": "f", "again": ("escape",)})
    assert "Tensors: 1 of 4" in walks["found"].text
    assert "down.bias" not in walks["found"].text.replace("down.bias  float32", "")
    assert "Tensors: 2 of 4" in walks["kept"].text
    assert "esc: clear the filters (findings only)" in walks["none"].text
    for shown in ("closed", "all", "again"):
        assert "─ Tensors ─" in walks[shown].text
        assert "down" in walks[shown].text
        assert "up" in walks[shown].text


@nightly
def test_what_a_step_left_is_listed_when_asked_for(stepped: Path) -> None:
    walks = walk_on(stepped, {"own": "1", "all": "r", "searched": ("r", "r", "r", "slash", "type swap")})
    assert "r: show 2 of the step" in walks["own"].text
    assert "swap" not in walks["own"].text
    assert "role all" in walks["all"].text
    assert "swap (activation)" in walks["all"].text
    assert "swap (activation)" in walks["searched"].text


def test_the_name_of_the_chosen_tensor_is_copied_from_every_view(healthy: Path) -> None:
    walks = walk_on(healthy, {"tensors": "y", "mesh": ("down", "2", "y"), "rank": ("3", "down", "down", "y")})
    assert [shown.clipboard for shown in walks.values()] == ["up.weight", "up.bias", "down.weight"]


def test_arrows_move_by_elements_and_shift_arrows_by_blocks_which_are_copied_as_slices(healthy: Path) -> None:
    walks = {
        "element": ("enter", "down", "right", "right"),
        "block": ("shift+down", "shift+down"),
        "back": ("shift+up",),
        "copied": ("Y",),
    }
    shown = walk_on(healthy, walks, look=selection)
    assert [one.result.plane.at for one in shown.values()] == [(1, 2), (6, 2), (3, 2), (3, 2)]
    assert shown["copied"].clipboard == "up.weight[3:6, 0:12]"


@nightly
def test_pages_and_ends_move_the_cursor(healthy: Path) -> None:
    walks = {"page": ("enter", "+", "+", "pagedown"), "end": ("end",), "home": ("home",)}
    found = [shown.result.plane.at for shown in walk_on(healthy, walks, size=(80, 24), look=selection).values()]
    assert 3 <= found[0][0] <= 12
    assert found[1:] == [(23, 11), (0, 0)]


@nightly
def test_other_dims_and_slices_of_a_tensor_with_three_are_reached_by_keys(shapes: Path) -> None:
    walks = {"cube": ("slash", "type cube", "enter", "enter"), "slice": ("right_square_bracket",), "dims": ("x",)}
    shown = walk_on(shapes, walks)
    assert "at [↓, →, 0]" in shown["cube"].text, "it opens on the dims that are split"
    assert "at [↓, →, 1]" in shown["slice"].text
    assert "at [↓, 0, →]" in shown["dims"].text


def test_the_mesh_shows_who_holds_the_first_wrong_element_and_heat_in_turn(even_bug: Path) -> None:
    walks = {"first": (), "mesh": "2", "bytes": "b", "findings": "b", "places": "b"}
    shown = walk_on(even_bug, walks, look=selection)
    chosen = shown["first"].result
    assert (chosen.entry, chosen.side, chosen.plane.at) == (1, "difference", (2, 0))
    assert re.search(r"fsdp=0 +0 +○1 +✗2 +✗3", shown["mesh"].text)
    assert re.search(r"fsdp=1 +\+4 +✗5 +✗6 +7", shown["mesh"].text)
    assert "bytes held: 320 B on every rank" in shown["bytes"].text
    assert re.search(r"fsdp=0 +▁0 +▁1", shown["bytes"].text)
    assert "findings: ▁ 0 on ranks 0,7, █ 3 on ranks 1-6" in shown["findings"].text
    assert re.search(r"fsdp=1 +█4 +█5 +█6 +▁7", shown["findings"].text)
    assert re.search(r"fsdp=1 +\+4 +✗5 +✗6 +7", shown["places"].text)


@nightly
def test_a_rank_of_the_mesh_opens_with_all_that_it_holds(healthy: Path) -> None:
    shown = walk(healthy, "2", "down", "right", "enter")
    assert "rank 5 of 8" in shown.text
    assert "weight  144 B  [9:12, 0:12]" in shown.text
    assert re.search(r"│ +0 +9,0 +9,1 .*│ +9,0 +9,1 ", shown.text)


@nightly
def test_until_a_rank_was_chosen_every_view_is_of_the_first_one_of_the_mesh(tmp_path: Path) -> None:
    stages = {0: ("last.weight", "last.bias"), 1: ("first.weight", "first.bias")}
    tensors = dict.fromkeys((*stages[0], *stages[1]), Made(None, shape=(2,)))
    path = make_dump(tmp_path / "a", Mesh(("pp",), (2,), (1, 0)), tensors)
    add_to_ranks(
        path,
        lambda rank: structs.replace(rank, tensors=tuple(one for one in rank.tensors if one.name in stages[rank.rank])),
    )
    walks = walk_on(path, {"mesh": "2", "rank": "3", "down": ("down",), "next": "]"})
    assert "rank 1 of 2" in walks["mesh"].text
    assert "rank 1 of 2" in walks["rank"].text
    assert "first.weight on rank 1" in walks["down"].text
    assert "rank 0 of 2" in walks["next"].text


@nightly
def test_the_rank_without_a_file_says_so(damaged: Path) -> None:
    assert "no readable file for this rank" in walk(damaged, "2", "right", "right", "right").text


@nightly
def test_the_palette_offers_what_works_now(bug: Path) -> None:
    assert "Copy the fix of the finding below (c)" in walk(bug, "ctrl+p", "type copy fix").text


def test_the_palette_names_every_command_once_in_plain_words(stepped: Path) -> None:
    def names(app: ShardvizApp) -> list[str]:
        return [command.title for command in app.get_system_commands(app.screen)]

    for shown in walk_on(stepped, {"tree": (), "map": ("enter",), "rank": ("3",), "step": ("5",)}, look=names).values():
        assert len(shown.result) == len(set(shown.result))
        assert "Copy fix" not in shown.result, "there is no finding"
        assert all(re.fullmatch(r"[A-Z][a-z]+([ /][a-zA-Z]+){0,3}", name) for name in shown.result), shown.result


def saved_as(app: Driven) -> list[str]:
    return [Path(note).name for note in app.notes]


def test_tensor_and_screen_are_saved_beside_what_was_saved_before(
    bug: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shardviz-1.svg").write_text("mine")
    shown = walk(folder / bug, "s", "S", look=saved_as)
    assert shown.result == ["weight-1.svg", "shardviz-2.svg"]
    assert (tmp_path / "shardviz-1.svg").read_text() == "mine"
    screen, tensor = (tmp_path / name for name in ("shardviz-2.svg", "weight-1.svg"))
    assert screen.read_text().startswith("<svg")
    assert "@font-face" not in screen.read_text()
    assert "12/fsdp/tp" in tensor.read_text()
    assert "misordered" in tensor.read_text()


def test_a_picture_has_a_safe_name_and_a_folder_that_takes_none_says_so(
    shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = walk(folder / shapes, "slash", "type [red", "enter", "s", look=saved_as)
    (name,) = shown.result
    assert re.fullmatch(r"red_x_31m_(long)+(lo)?-1\.svg", name)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    shown = walk(folder / shapes, "S", look=lambda app: app.notes)
    assert shown.result == ["No such file or directory"]


def test_two_dumps_move_together(bug: Path, healthy: Path, folder: Path) -> None:
    shown = walk(bug, "7", "tab", "+", "+", other=folder / bug)
    assert shown.text.count("142 143") == 2


def test_a_tensor_that_cannot_be_drawn_says_why_beside_the_one_that_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sides, "MAX_SCATTERED", 1)
    scattered = Made("[4/tp]", ids={0: np.array([1, 0]), 1: np.array([2, 4])})
    good = make_dump(tmp_path / "good", parse_mesh("tp=2"), {"first": "[4/tp]", "second": "[4/tp]"})
    other = make_dump(tmp_path / "other", parse_mesh("tp=2"), {"first": scattered, "second": "[4/tp]"})
    walks = walk_on(good, {"scattered": ("7", "home"), "whole": ("down",)}, other=other)
    layouts = {name: re.findall(r"float32\[4/tp\]|\? not drawn: [^│]*ids", shown.text) for name, shown in walks.items()}
    assert layouts == {
        "scattered": ["float32[4/tp]", "? not drawn: first: rank 0 holds 2 scattered ids"],
        "whole": ["float32[4/tp]", "float32[4/tp]"],
    }


def test_what_was_read_while_the_viewer_closes_is_left_unread(healthy: Path) -> None:
    closed = threading.Event()

    def late(document: Document, show: Callable[[object], object]) -> None:
        closed.wait(PATIENCE)
        show(replace(document, failed="read again"))

    async def run() -> bool:
        app = ShardvizApp(healthy)
        async with app.run_test() as pilot:
            await rest(pilot)
            document = app.document
            app.read_in_thread("late", app.show_read, late, document)
        closed.set()
        return app.document is document

    assert asyncio.run(run())


def test_modules_open_and_close_and_stay_so(healthy: Path) -> None:
    walks = walk_on(healthy, {"closed": ("left", "left"), "inside": ("right", "down"), "again": ("left", "f", "f")})
    assert "▸ ✓ up" in walks["closed"].text
    assert "│ ✓ weight  [24/tp/fsdp, 12]" not in walks["closed"].text
    assert "│ ✓ weight  [24/tp/fsdp, 12]" in walks["inside"].text
    assert "▾ ✓ up" in walks["again"].text


def test_a_folder_that_is_not_a_dump_is_refused_before_anything_opens(folder: Path) -> None:
    with pytest.raises(DumpError, match=r"nowhere does not exist"):
        view(Path("nowhere"))


def test_ranks_appear_while_a_job_still_writes_them(
    tmp_path: Path, healthy: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewer, "LOOK_AGAIN", 0.02)
    live = tmp_path / "live.shardviz"
    live.mkdir()
    files = sorted((folder / healthy).iterdir(), key=lambda file: file.name != "run.json")
    for file in files[:4]:
        (live / file.name).write_bytes(file.read_bytes())

    async def run() -> list[int]:
        app, seen = ShardvizApp(live), []
        async with app.run_test() as pilot:
            for wanted, arriving in ((3, files[4:]), (8, [])):
                await until(pilot, lambda wanted=wanted: app.document and len(app.document.dump.files.ranks) == wanted)
                assert app.document is not None
                seen.append(len(app.document.dump.files.ranks))
                for file in arriving:
                    (live / file.name).write_bytes(file.read_bytes())
        return seen

    assert asyncio.run(run()) == [3, 8]


def test_the_mouse_chooses_sides_places_ranks_and_views(healthy: Path) -> None:
    async def run() -> tuple[object, ...]:
        app = ShardvizApp(healthy)
        async with app.run_test(size=(170, 40)) as pilot:
            await rest(pilot)
            await pilot.click("#sides", offset=(11, 0))
            await pilot.click("#map", offset=(12, 4))
            await pilot.click("#small-mesh", offset=(11, 2))
            await pilot.click("#tabs", offset=(13, 0))
            await rest(pilot)
            return app.selection.side, app.selection.plane.at, app.selection.rank, app.view_name

    assert asyncio.run(run()) == ("held", (3, 1), 5, "mesh")


def test_the_mouse_asks_who_holds_the_element_under_it(bug: Path, shapes: Path) -> None:
    async def run(files: Path, *keys: str) -> list[str]:
        app, found = ShardvizApp(files), []
        async with app.run_test(size=(120, 40)) as pilot:
            await rest(pilot)
            await pilot.press(*keys)
            await rest(pilot)
            for offset in ((10, 2), (10, 4), (0, 0)):
                await pilot.hover("#map", offset=offset)
                await pilot.pause()
                found.append(str(app.query_one("#map").tooltip or ""))
        return found

    right, wrong, beside = asyncio.run(run(bug))
    assert right == "[0, 1]\nclaimed by 0\nheld by 0"
    assert wrong == "[2, 1]\nclaimed by 1\nheld by 4 ✗"
    assert beside == ""
    assert asyncio.run(run(shapes, "slash", *"vector", "enter"))[0].splitlines()[0].count(",") == 0
