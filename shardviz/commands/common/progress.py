"""Progress of a long verb: one line on stderr, only on a terminal, and only after a while."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE = 1.0
"""Seconds before anything is shown."""

INTERVAL = 0.2
"""Seconds between two looks at what there is to show."""

CLEAR = "\r\x1b[K"


@contextmanager
def progress(words: Callable[[], str]) -> Iterator[None]:
    """Show how far the work inside is, and clear the line after it.

    Args:
        words: Returns the text to show; called again and again from another thread.
    """
    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_show, args=(words, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _show(words: Callable[[], str], done: threading.Event) -> None:
    begin = time.monotonic()
    if done.wait(PATIENCE):
        return
    while not done.wait(INTERVAL):
        seconds = time.monotonic() - begin
        took = f", {seconds:.0f} s"
        room = _columns() - len(took) - 1  # a line wider than the screen would not be cleared
        print(f"{CLEAR}{words()[:room]}{took}", end="", file=sys.stderr, flush=True)
    print(CLEAR, end="", file=sys.stderr, flush=True)


def _columns() -> int:
    """Return the width of the terminal that stderr is; stdout may be a file."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):  # it was replaced by an object without a file
        columns = 0
    return columns or shutil.get_terminal_size().columns


class Count:
    """A progress count, `3 of 8`; called with both numbers, as readers do."""

    def __init__(self, words: str) -> None:
        self.words = words
        self.done = self.of = 0

    def __call__(self, done: int, of: int) -> None:
        """Note how far it is."""
        self.done, self.of = done, of

    def __str__(self) -> str:
        return self.words.format(done=f"{self.done:,}", of=f"{self.of:,}")
