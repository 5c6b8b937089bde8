"""What both viewers do alike: read again what changed on disk, remember the theme, write ASCII where it must be."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shardviz.check import run as check_run
from shardviz.tui import viewer
from shardviz.tui.app import ShardvizApp
from shardviz.tui.colors import SAME, plain
from shardviz.tui.export import remember_theme, remembered_theme, screen_text
from shardviz.tui.loading import stamps_of
from tests.lanes import nightly
from tests.tui.driving import PATIENCE, Driven, rest, settle, until, walk

if TYPE_CHECKING:
    from collections.abc import Callable


def copied(folder: Path, dump: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder / dump, tmp_path / dump.name))


def after_change(dump: Path, change: Callable[[], object], wanted: str) -> str:
    """Open a dump, change its files, and return the screen once it says what is wanted."""

    async def run() -> str:
        app = ShardvizApp(dump)
        async with app.run_test(size=(120, 40)) as pilot:
            await rest(pilot)
            change()
            await until(pilot, lambda: re.search(wanted, screen_text(app)))
            return await settle(pilot)

    return asyncio.run(run())


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:200])


def completed(file: Path, content: bytes) -> None:
    file.write_bytes(content)


def test_a_rank_file_that_is_cut_short_is_noticed_and_shown_with_the_time(
    healthy: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewer, "LOOK_AGAIN", 0.02)
    dump = copied(folder, healthy, tmp_path)
    text = after_change(dump, lambda: cut(dump / "rank_00003.json"), r"1 rank missing.*changed \d\d:\d\d")
    assert re.search(r"1 rank missing · changed \d\d:\d\d", text)


@nightly
def test_a_rank_file_that_is_completed_later_is_noticed(
    healthy: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewer, "LOOK_AGAIN", 0.02)
    dump = copied(folder, healthy, tmp_path)
    file = dump / "rank_00003.json"
    content = file.read_bytes()
    cut(file)
    text = after_change(dump, lambda: file.write_bytes(content), r"no findings.*changed")
    assert "missing" not in text.splitlines()[0]
    assert re.search(r"✓ no findings · changed \d\d:\d\d", text)


def test_a_dump_that_nobody_changes_is_left_alone_and_r_reads_it_again(
    healthy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewer, "LOOK_AGAIN", 0.01)

    async def run() -> tuple[bool, bool, str]:
        app = ShardvizApp(healthy)
        async with app.run_test(size=(120, 40)) as pilot:
            await rest(pilot)
            first = app.document
            await pilot.pause(0.3)
            same = app.document is first
            await pilot.press("down", "R")
            text = await settle(pilot)
            return same, app.document is first, text

    same, still, text = asyncio.run(run())
    assert (same, still) == (True, False)
    assert "changed" not in text.splitlines()[0]
    assert "up.bias  float32[24/tp/fsdp]" in text


def test_while_a_check_runs_its_seconds_are_counted_and_n_says_that_it_runs(
    even_bug: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewer, "LOOK_AGAIN", 0.5)
    is_checked, report_on = threading.Event(), check_run.report_on
    monkeypatch.setattr(check_run, "report_on", lambda dump: is_checked.wait(PATIENCE) and report_on(dump))

    async def during_and_after() -> tuple[list[str], str, str]:
        app = Driven(even_bug)
        async with app.run_test(size=(120, 40)) as pilot:
            await until(pilot, lambda: "checking · 1 s" in screen_text(app))
            during = screen_text(app)
            await pilot.press("n")
            is_checked.set()
            return app.notes, during, await settle(pilot)

    notes, during, after = asyncio.run(during_and_after())
    assert notes == ["The check is still running"]
    assert "n Next finding" in during
    assert after.startswith(" even_bug  ✗ 1 finding · 8 ranks")


def test_every_file_of_a_folder_counts_and_unfinished_ones_do_not(tmp_path: Path) -> None:
    inner = tmp_path / "global_step1" / "zero"
    inner.mkdir(parents=True)
    for name in ("a.json", "b.safetensors", ".b.json.tmp", "global_step1/c.pt", "global_step1/zero/d.pt"):
        (tmp_path / name).write_bytes(b"x")
    found = stamps_of([tmp_path])
    assert sorted(os.path.relpath(name, tmp_path) for name in found) == [
        "a.json",
        "b.safetensors",
        "global_step1/c.pt",
        "global_step1/zero/d.pt",
    ]
    (tmp_path / "b.safetensors").write_bytes(b"xy")
    assert stamps_of([tmp_path]) != found
    assert [size for _, size in stamps_of([tmp_path / "b.safetensors"]).values()] == [2]
    assert stamps_of([tmp_path / "nowhere"]) == {}


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    outside, dump = tmp_path / "outside", tmp_path / "dump"
    outside.mkdir()
    dump.mkdir()
    (outside / "secret").write_text("x")
    (dump / "link").symlink_to(outside)
    assert [Path(name).name for name in stamps_of([dump])] == ["link"]


def test_the_theme_that_was_chosen_is_there_the_next_time(healthy: Path) -> None:
    async def choose() -> None:
        app = ShardvizApp(healthy)
        async with app.run_test() as pilot:
            app.theme = "shardviz-light"
            await rest(pilot)

    assert ShardvizApp(healthy).theme == "shardviz-dark"
    asyncio.run(choose())
    assert ShardvizApp(healthy).theme == "shardviz-light"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"theme": 3}', '{"theme": "no such theme"}', "\x00" * 9])
def test_damaged_settings_are_ignored(settings: Path, healthy: Path, content: str) -> None:
    (settings / "shardviz").mkdir()
    (settings / "shardviz" / "viewer.json").write_text(content)
    assert ShardvizApp(healthy).theme == "shardviz-dark"
    remember_theme("shardviz-light")
    assert remembered_theme() == "shardviz-light"


def test_settings_that_cannot_be_written_are_forgotten(settings: Path) -> None:
    (settings / "shardviz").write_text("a file where the folder should be")
    remember_theme("shardviz-light")
    assert remembered_theme() == ""


def test_where_the_terminal_shows_only_ascii_so_does_the_viewer(bug: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = walk(bug, "2").text
    monkeypatch.setattr(viewer, "shows_unicode", lambda: False)
    text = walk(bug, "2").text
    assert not usual.isascii()
    assert text.isascii()
    assert "x 1 finding" in text
    assert list(map(len, text.splitlines())) == list(map(len, usual.splitlines()))


def test_each_character_takes_the_room_that_it_took() -> None:
    assert all(len(key) == len(value) == 1 for key, value in SAME.items())
    assert plain("✗ 層 é ▾") == "x ?? ? v"
