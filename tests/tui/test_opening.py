"""Opening: what is on the screen before all is read, what a link opens on, what a small screen leaves out first."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shardviz.cli import main
from shardviz.dump import read
from shardviz.errors import ShardvizError
from shardviz.tui import app as tui_app
from shardviz.tui.app import ShardvizApp, view
from shardviz.tui.export import screen_text
from shardviz.tui.widgets.frame import title_text
from tests.tui.driving import PATIENCE, rest, settle, until

if TYPE_CHECKING:
    from textual.pilot import Pilot


async def matching(pilot: Pilot[Any], pattern: str) -> str:
    """Wait until the screen matches, and return it."""
    await until(pilot, lambda: re.search(pattern, screen_text(pilot.app), re.DOTALL))
    return screen_text(pilot.app)


def test_title_and_tree_are_there_while_other_ranks_are_still_being_read(
    even_bug: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = {name: threading.Event() for name in ("rank_00000.json", "rank_00002.json")}
    read_rank = read._read_rank

    def slowly(folder: Path, name: str, *rest: Any) -> Any:
        if name in gates:
            assert gates[name].wait(PATIENCE)
        return read_rank(folder, name, *rest)

    monkeypatch.setattr(read, "_read_rank", slowly)

    async def run() -> tuple[str, str, str]:
        app = ShardvizApp(even_bug)
        async with app.run_test(size=(120, 40)) as pilot:
            title = await matching(pilot, "8 ranks")
            gates["rank_00000.json"].set()
            tree = await matching(pilot, r"reading rank 2.*layers\.\[0-2\]")
            await pilot.press("down", "down")
            gates["rank_00002.json"].set()
            return title, tree, await settle(pilot)

    title, tree, whole = asyncio.run(run())
    assert title.splitlines()[0].startswith(" even_bug  ◌ · 8 ranks (fsdp=2, tp=4)")
    assert "layers" not in title
    assert "even_bug  ◌ · reading rank 2 of 8" in tree
    assert "weight  [16/fsdp/tp, 8]" in tree
    assert "no readable file" not in tree
    assert "missing" not in tree
    assert "✗ 1 finding" in whole
    assert "layers.0.weight  float32" in whole  # the user had moved there: the first finding does not take him away


def test_a_link_opens_on_a_tensor_and_a_rank(even_bug: Path) -> None:
    texts = []

    def opened(**link: Any) -> tuple[str, str, int | None]:
        app = ShardvizApp(even_bug, **link)

        async def run() -> None:
            async with app.run_test(size=(120, 40)) as pilot:
                texts.append(await settle(pilot))

        asyncio.run(run())
        return app.view_name, app.chosen_name, app.selection.rank

    assert opened(tensor="embedding") == ("explore", "embedding", 1)
    assert opened(tensor="layers.2.weight", rank=3) == ("rank", "layers.2.weight", 3)
    assert "layers.2.weight on rank 3" in texts[-1]
    assert "rank 3 of 8" in texts[-1]
    assert opened(rank=5) == ("rank", "layers.0.weight", 5)


def test_a_link_to_nothing_says_what_there_is(even_bug: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ShardvizError, match=r"has no rank 8") as raised:
        view(even_bug, rank=8)
    assert raised.value.hint == "its ranks are 0 to 7"
    monkeypatch.setattr(tui_app.ShardvizApp, "run", run_headless)
    with pytest.raises(ShardvizError, match="the dump has no tensor 'embeding'") as raised:
        view(even_bug, tensor="embeding")
    assert raised.value.hint == "did you mean embedding?"


def run_headless(self: ShardvizApp) -> None:
    async def run() -> None:
        async with self.run_test() as pilot:
            await rest(pilot)

    asyncio.run(run())


def test_in_a_pipe_the_named_tensor_is_printed(even_bug: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(even_bug), "embedding"]) == 0
    printed = capsys.readouterr().out
    assert "float32[32/tp/fsdp, 8]" in printed
    assert "layers" not in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rank", "3"], "--rank 3 opens the viewer, and stdout is not a terminal"),
        (["healthy.shardviz", "--rank", "3"], "--rank 3 opens one dump, and two are given"),
        (["nowhere.shardviz"], "nowhere.shardviz does not exist"),
        (["embeding"], "did you mean embedding?"),
    ],
)
def test_what_cannot_be_opened_says_why(
    even_bug: Path, healthy: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", str(even_bug), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_long_name_leaves_room_for_the_verdict() -> None:
    text = title_text(Path("x" * 300), room=50).plain
    assert re.fullmatch(r"x{7}…x{14}  ◌", text)
