"""`shardviz probe --watch`: run a probe again whenever one of its files is saved.

The process that imported torch stays, and ranks are forked from it. A newer save ends the run in progress.
`shardviz view mine.py --watch` runs this in the background. The viewer reloads when the dump is written, and its
title shows what the probe prints.
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
from datetime import datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING, Any, NoReturn

from shardviz.commands.common.streams import say_error, talk
from shardviz.errors import DumpError, ShardvizError
from shardviz.live.noting import Stamp, read_notes, stamp_of
from shardviz.text import counted, listed, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardviz.tui.viewer import Viewer


PAUSE = 0.02
"""Seconds between two looks at the files, and for which they must stay as they are: editors write in several steps.

A save that takes longer overtakes the run that it began.
"""


ENDS_WITH = "SHARDVIZ_ENDS_WITH"
"""The environment variable with the process that started this one and must not be outlived."""


class SourceChangedError(Exception):
    """A file of the probe was saved while ranks ran its earlier version."""


class WatchedFiles:
    """The files of a probe, and the stamp of each from before it was read.

    Args:
        notes: Where a rank notes the modules that it imports.

    Attributes:
        written: The folders of the dumps that runs have written, which the next ones replace.
    """

    def __init__(self, probe: Path, notes: Path) -> None:
        self.notes = notes
        self.written: set[Path] = set()
        self._probe = probe
        self._stamps: dict[Path, Stamp] = {probe: stamp_of(probe)}

    @property
    def paths(self) -> list[Path]:
        """The files that are there, the probe's own first."""
        return [path for path, stamp in self._stamps.items() if stamp is not None]

    def begin(self) -> None:
        """Look at all files before they are read."""
        self._stamps = {path: stamp_of(path) for path in self._stamps}
        self.notes.write_text("", encoding="utf-8")

    def end(self) -> None:
        """Forget files that a run which came to its end did not import."""
        read = {self._probe, *read_notes(self.notes)}
        self._stamps = {path: stamp for path, stamp in self._stamps.items() if path in read}

    def changed(self) -> list[Path]:
        """Return the files that are not as they were read, those that are new or gone among them."""
        for path, stamp in read_notes(self.notes).items():
            self._stamps.setdefault(path, stamp)
        return [path for path, stamp in self._stamps.items() if stamp_of(path) != stamp]

    def wait(self) -> list[Path]:
        """Wait until a file has changed and all have come to rest, and return those that changed."""
        while not (changed := self.changed()):
            _end_with_parent()
            time.sleep(PAUSE)
        before = None
        while before != (before := [stamp_of(path) for path in self._stamps]):
            time.sleep(PAUSE)
        return changed

    @contextmanager
    def ending_when_overtaken(self) -> Iterator[None]:
        """End what is done inside once a file changes.

        Raises:
            SourceChangedError: One has.
        """
        noticed, over = threading.Event(), threading.Event()
        thread = threading.Thread(target=self._interrupt, args=(noticed, over), daemon=True)
        try:
            with _heeding_interrupts(noticed):
                thread.start()
                try:
                    yield
                finally:
                    over.set()
                    thread.join()
        except KeyboardInterrupt:
            if not noticed.is_set():
                raise
            raise SourceChangedError from None

    def _interrupt(self, noticed: threading.Event, over: threading.Event) -> None:
        """Interrupt the main thread, as Ctrl-C would, once a file changes."""
        while not over.wait(PAUSE):
            if self.changed():
                noticed.set()
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                return


@contextmanager
def _heeding_interrupts(noticed: threading.Event) -> Iterator[None]:
    """Handle Ctrl-C in a background job, whose shell ignores it."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        yield
        return

    def interrupted(number: int, frame: object) -> None:
        if noticed.is_set():
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def watch(probe: Path, run: Callable[[WatchedFiles], object]) -> NoReturn:
    """Run a probe now and whenever one of its files is saved, until Ctrl-C.

    Args:
        probe: The probe's file.
        run: Runs it once and reports; may raise what is wrong with the probe, which is shown.

    Raises:
        DumpError: The first run cannot write its dump.
        KeyboardInterrupt: Ctrl-C, which is how it ends.
    """
    with TemporaryDirectory(prefix="shardviz-watch-") as folder:
        watched = WatchedFiles(probe, Path(folder, "notes"))
        is_first = True
        while True:
            watched.begin()
            try:
                run(watched)
                watched.end()
            except SourceChangedError:
                pass
            except ShardvizError as error:
                if is_first and isinstance(error, DumpError):
                    raise
                say_error(error)
            is_first = False
            if not watched.changed():
                talk(f"watching {_all_of(probe, watched.paths)}; Ctrl-C ends")
            names = listed(printable(path.name) for path in watched.wait())
            talk(f"\n{datetime.now().astimezone():%H:%M:%S} {names} changed")


def _end_with_parent() -> None:
    """Exit if this process was started by another one of shardviz, which is gone."""
    if os.environ.get(ENDS_WITH) not in (None, str(os.getppid())):
        sys.exit()


def _all_of(probe: Path, paths: Sequence[Path]) -> str:
    """Name the probe's file, and say how many others there are."""
    others = sum(path != probe for path in paths)
    name = printable(probe.name) + ("" if probe in paths else ", which is gone,")
    return f"{name} and {counted(others, 'file')} that it imports" if others > 0 else name


GRACE = 10.0
"""Seconds that the probe has to end its ranks."""

SHOWN = 15.0
"""Seconds that a message stays on screen."""

_NEWS = re.compile(r"shardviz: error: (?P<error>.*)|[0-9:]{8} (?P<names>.*) changed|(?P<done>watching ).*")
"""The lines of `shardviz probe --watch` that say how far it is."""


class BackgroundProbe:
    """A probe that is watched in the background, next to a viewer."""

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

    def follow(self, viewer: Viewer[Any]) -> None:
        """Show in the viewer, from now on, that the probe runs or why it failed."""
        threading.Thread(target=self._pass_on, args=(viewer,), daemon=True).start()

    def _pass_on(self, viewer: Viewer[Any]) -> None:
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

    def _fail(self, viewer: Viewer[Any], why: str) -> None:
        """Say why there is no dump of what was saved: the one on screen is older."""
        shown = partial(viewer.notify, why, title="Not run", severity="error", timeout=SHOWN, markup=False)
        viewer.call_from_thread(shown)
        viewer.call_from_thread(setattr, viewer, "note", f"older than the file: {why}")


@contextmanager
def probing(probe: str, mesh: str, folder: Path) -> Iterator[BackgroundProbe]:
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
        yield BackgroundProbe(process.stderr, folder)
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
