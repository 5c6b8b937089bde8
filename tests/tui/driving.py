"""Drive the real app by keys, and compare what is on its screen with pictures kept as text."""

from __future__ import annotations

import asyncio
import io
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.segment import Segments

from shardviz.tui.app import ShardvizApp
from shardviz.tui.saving import screen_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from textual.app import App
    from textual.pilot import Pilot
    from textual.strip import Strip

GOLDEN = Path(__file__).parent / "golden"
FAILED = Path(os.environ.get("SHARDVIZ_ARTEFACTS", tempfile.gettempdir())) / "shardviz-golden"
PATIENCE = 120.0
"""Seconds until a test gives up: far more than a loaded machine takes, as only a test that fails waits for them."""
SIZES = [(80, 24), (120, 40), (200, 60)]


@dataclass(frozen=True)
class Shown:
    """What there was after the last key.

    Attributes:
        text: The screen's characters.
        lines: The same with their styles.
        clipboard: What was copied.
        exited: The app's return code; None while it runs.
        result: What `look` returned.
    """

    text: str
    lines: Sequence[Strip] = field(repr=False)  # asyncio prints what a run returned, for an error that nobody sees
    clipboard: str
    exited: int | None
    result: Any


def walk(files: Path, *keys: str, **options: Any) -> Shown:
    """Open a dump, press keys one after the other, and return what is shown then."""
    (shown,) = walk_on(files, {"": keys}, **options).values()
    return shown


def walk_on(
    files: Path,
    walks: Mapping[str, Sequence[str]],
    *,
    size: tuple[int, int] = (120, 40),
    other: Path | None = None,
    look: Callable[[ShardvizApp], Any] = lambda app: None,
) -> dict[str, Shown]:
    """Open a dump, make several walks one after the other, and return what is shown at the end of each."""

    async def run() -> dict[str, Shown]:
        app, shown = ShardvizApp(files, other), {}
        async with app.run_test(size=size) as pilot:
            await settle(pilot)
            for name, keys in walks.items():
                await pilot.press(*keys)
                text = await settle(pilot)
                shown[name] = Shown(text, screen_lines(app), app.clipboard, app.return_code, look(app))
        return shown

    return asyncio.run(run())


async def settle(pilot: Pilot[Any]) -> str:
    """Wait until all is read and the screen does not change any more; return its characters, none if the app ended."""
    app, before = pilot.app, None
    while app.return_code is None:
        await app.workers.wait_for_complete()
        await pilot.pause()
        text = screen_text(app)
        if text == before:
            return text
        before = text
    return ""


async def until(pilot: Pilot[Any], condition: Callable[[], object]) -> None:
    """Wait for what other threads or a timer do; a test looks itself at what there is when it never comes."""
    end = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < end:
        await pilot.pause(0.01)


def screen_lines(app: App[None]) -> Sequence[Strip]:
    """Return the lines on screen, none if the app ended. A picture of them takes far longer: few are looked at."""
    return app.screen._compositor.render_strips() if app.return_code is None else []


def _svg(lines: Sequence[Strip]) -> str:
    width = max((line.cell_length for line in lines), default=80)
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor", record=True)
    for line in lines:
        console.print(Segments(line), no_wrap=True)
    return console.export_svg(title="shardviz")


def assert_golden(shown: Shown, name: str) -> None:
    """Compare a screen with the one that is kept; where they differ, write the one there is, as text and as a picture.

    `SHARDVIZ_GOLDEN=write` keeps what is shown now: review it as a diff.
    """
    kept = GOLDEN / f"{name}.txt"
    if os.environ.get("SHARDVIZ_GOLDEN") == "write":
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(shown.text, encoding="utf-8")
    expected = kept.read_text(encoding="utf-8") if kept.exists() else ""
    if shown.text != expected:
        FAILED.mkdir(parents=True, exist_ok=True)
        (FAILED / f"{name}.txt").write_text(shown.text, encoding="utf-8")
        (FAILED / f"{name}.svg").write_text(_svg(shown.lines), encoding="utf-8")
    assert shown.text == expected, f"see {FAILED / name}.svg; SHARDVIZ_GOLDEN=write keeps it"
