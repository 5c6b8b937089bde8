"""`shardviz view mine.py --watch`: a `shardviz probe --watch` in the background, whose dump the viewer shows.

The viewer notices by itself that the dump was written again. What the probe says goes into the viewer's title.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol

from shardviz.commands.common.streams import talk
from shardviz.commands.common.watching import ENDS_WITH, PAUSE
from shardviz.errors import ShardvizError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import IO

GRACE = 10.0
"""Seconds that the probe has to end its ranks."""

SHOWN = 15.0
"""Seconds that a message stays on screen."""

_NEWS = re.compile(r"shardviz: error: (?P<error>.*)|[0-9:]{8} (?P<names>.*) changed|(?P<done>watching ).*")
"""The lines of `shardviz probe --watch` that say how far it is."""


class Noted(Protocol):
    """A viewer: its title has a note, and it runs in another thread."""

    note: str

    @property
    def is_running(self) -> bool:
        """Whether it is on screen."""

    def call_from_thread(self, callback: Callable[..., object], *args: object) -> object:
        """Call something in its thread."""

    def notify(self, message: str, *, title: str, severity: Literal["error"], timeout: float, markup: bool) -> None:
        """Show a message for some seconds."""

    def clear_notifications(self) -> None:
        """Take away the messages that are shown."""


class Beside:
    """A probe that is watched in the background.

    Attributes:
        folder: Its dump.
    """

    def __init__(self, lines: IO[str], folder: Path) -> None:
        self.folder = folder
        self._lines = lines
        self._error = ""

    def wait(self) -> None:
        """Wait until the dump is there, and pass on what is said until then.

        Raises:
            ShardvizError: The probe ended.
        """
        for text in self._lines:
            talk(text.rstrip("\n"))
            if news := _NEWS.match(text):
                self._error = news["error"] or (self._error if news["done"] else "")
                if news["done"] and self.folder.exists():
                    return
        raise ShardvizError("the probe ended before it wrote a dump")

    def follow(self, viewer: Noted) -> None:
        """Show in the viewer, from now on, that the probe runs or why it failed."""
        threading.Thread(target=self._pass_on, args=(viewer,), daemon=True).start()

    def _pass_on(self, viewer: Noted) -> None:
        while not viewer.is_running:
            time.sleep(PAUSE)
        with suppress(RuntimeError):  # the viewer is gone
            if self._error:
                self._fail(viewer, self._error)
            for text in self._lines:
                news = _NEWS.match(text)
                if news and news["error"]:
                    self._fail(viewer, news["error"])
                elif news and news["names"]:
                    viewer.call_from_thread(viewer.clear_notifications)  # they are about what was saved before
                    viewer.call_from_thread(setattr, viewer, "note", f"{news['names']} changed: running")

    def _fail(self, viewer: Noted, why: str) -> None:
        """Say why there is no dump of what was saved: the one on screen is older."""
        shown = partial(viewer.notify, why, title="Not run", severity="error", timeout=SHOWN, markup=False)
        viewer.call_from_thread(shown)
        viewer.call_from_thread(setattr, viewer, "note", f"older than the file: {why}")


@contextmanager
def probing(probe: str, mesh: str, folder: Path) -> Iterator[Beside]:
    """Watch a probe in a process of its own, which ends with this one."""
    command = [sys.executable, "-m", "shardviz", "probe", probe, "--mesh", mesh, "--watch"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=os.environ | {ENDS_WITH: str(os.getpid())},
        start_new_session=True,
    )
    assert process.stderr is not None
    try:
        yield Beside(process.stderr, folder)
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """End the probe as Ctrl-C does, so that it takes its ranks with it."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
