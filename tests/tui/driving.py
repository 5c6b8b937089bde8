"""Drive the real app by keys, and compare what is on its screen with pictures kept as text."""

from __future__ import annotations

import asyncio
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardviz.tui.app import ShardvizApp
from shardviz.tui.saving import screen_svg, screen_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from textual.pilot import Pilot

GOLDEN = Path(__file__).parent / "golden"
FAILED = Path(os.environ.get("SHARDVIZ_ARTEFACTS", tempfile.gettempdir())) / "shardviz-golden"
SIZES = [(80, 24), (120, 40), (200, 60)]


@dataclass(frozen=True)
class Shown:
    """What there was after the last key.

    Attributes:
        text: The screen's characters.
        svg: The screen as a picture.
        clipboard: What was copied.
        exited: The app's return code; None while it runs.
        result: What `look` returned.
    """

    text: str
    svg: str
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
                svg = screen_svg(app) if app.return_code is None else ""
                shown[name] = Shown(text, svg, app.clipboard, app.return_code, look(app))
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
        (FAILED / f"{name}.svg").write_text(shown.svg, encoding="utf-8")
    assert shown.text == expected, f"see {FAILED / name}.svg; SHARDVIZ_GOLDEN=write keeps it"
