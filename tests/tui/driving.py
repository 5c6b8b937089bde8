"""Drive the real app by keys, and compare what is on its screen with pictures kept as text."""

from __future__ import annotations

import asyncio
import io
import os
import tempfile
import time
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from textual import events

from shardviz.tui.app import ShardvizApp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from textual.app import App
    from textual.pilot import Pilot

GOLDEN = Path(__file__).parent / "golden"
FAILED = Path(os.environ.get("SHARDVIZ_ARTEFACTS", tempfile.gettempdir())) / "shardviz-golden"
PATIENCE = 120.0
"""Seconds until a test gives up: far more than a loaded machine takes, as only a test that fails waits for them."""
SIZES = [(80, 24), (120, 40), (200, 60)]


@dataclass(frozen=True)
class Shown:
    """What there was after the last key.

    Attributes:
        text: The screen's characters; none if the app ended.
        screen: What was drawn, to be kept as a picture.
        clipboard: What was copied.
        exited: The app's return code; None while it runs.
        result: What `look` returned.
    """

    text: str
    screen: Console = field(repr=False)  # asyncio prints what a run returned, for an error that nobody sees
    clipboard: str
    exited: int | None
    result: Any


class Driven(ShardvizApp):
    """The viewer, which keeps what it notifies the user of."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.notes: list[str] = []

    def notify(self, message: str, **options: Any) -> None:
        self.notes.append(message)
        super().notify(message, **options)


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
    look: Callable[[Driven], Any] = lambda app: None,
) -> dict[str, Shown]:
    """Open a dump, make several walks one after the other, and return what is shown at the end of each."""

    async def run() -> dict[str, Shown]:
        app, shown = Driven(files, other), {}
        async with app.run_test(size=size) as pilot:
            await rest(pilot)
            for name, keys in walks.items():
                await press(pilot, *keys)
                screen = await settled(pilot)
                shown[name] = Shown(text_of(screen), screen, app.clipboard, app.return_code, look(app))
        return shown

    return asyncio.run(run())


async def press(pilot: Pilot[Any], *keys: str) -> None:
    """Press keys, each when the one before is done: `Pilot.press` would wait 40 ms and more for every key.

    `type TEXT` stands for a text that is pasted at once: each key that is typed draws the screen anew.
    """
    for key in keys:
        if key.startswith("type "):
            pilot.app.post_message(events.Paste(key.removeprefix("type ")))
            await answered(pilot.app)
            continue
        if len(key) > 1 or key.isalnum():
            name = key
        else:
            name = SIGNS.get(key) or unicodedata.name(key).lower().replace(" ", "_")
        pilot.app.post_message(events.Key(name, key if len(key) == 1 else None))
        await answered(pilot.app)


SIGNS = {"+": "plus", "-": "minus", "/": "slash", "?": "question_mark"}
"""Textual's names of keys; others are those that Unicode has."""
TURNS = 12
"""Turns of the event loop without a message after which nothing follows from a key any more."""
LOOK = 4
"""Turns after which widgets are listed again: a walk through them takes longer than a turn."""


LAYOUTS = 3
"""Layouts that follow from each other at most: a longer text, a scroll bar, and less room beside it."""


async def answered(app: App[Any]) -> None:
    """Wait until no widget has a message to handle, and none comes."""
    quiet, pumps = 0, ()
    while quiet < TURNS and app.return_code is None:
        await asyncio.sleep(0)
        if quiet % LOOK == 0:
            pumps = (app, *(node for screen in app.screen_stack for node in screen.walk_children(with_self=True)))
        quiet = 0 if any(pump.message_queue_size for pump in pumps) else quiet + 1


async def rest(pilot: Pilot[Any]) -> None:
    """Wait until all is read and nothing is left to do, or the app ended."""
    app = pilot.app
    while app.return_code is None:
        await app.workers.wait_for_complete()
        for _ in range(LAYOUTS):
            await answered(app)
            await pilot.pause(0)
        await pilot.pause()
        if all(worker.is_finished for worker in app.workers):
            return


async def settle(pilot: Pilot[Any]) -> str:
    """Wait until nothing is left to do; return the screen's characters, none if the app ended."""
    return text_of(await settled(pilot))


async def settled(pilot: Pilot[Any]) -> Console:
    """Wait until nothing is left to do; return what is drawn, nothing if the app ended.

    `App.export_screenshot` writes SVG, which takes a hundred times longer than the characters in it.
    """
    await rest(pilot)
    app = pilot.app
    screen = Console(width=app.size.width, height=app.size.height, file=io.StringIO(), force_terminal=True, record=True)
    if app.return_code is None:
        screen.print(app.screen._compositor.render_update(full=True, screen_stack=app._background_screens))
    return screen


def text_of(screen: Console) -> str:
    """Return the characters of a screen, without spaces at the ends of lines."""
    return "".join(f"{line.rstrip()}\n" for line in screen.export_text(clear=False).splitlines())


async def until(pilot: Pilot[Any], condition: Callable[[], object]) -> None:
    """Wait for what other threads or a timer do; a test looks itself at what there is when it never comes."""
    end = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < end:
        await pilot.pause(0.01)


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
        shown.screen.save_svg(str(FAILED / f"{name}.svg"), title=name)
    assert shown.text == expected, f"see {FAILED / name}.svg; SHARDVIZ_GOLDEN=write keeps it"
