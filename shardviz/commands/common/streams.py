"""Where a verb's answer, its talk and its progress go: stdout and stderr, whatever is at their other end."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, TextIO

from shardviz.errors import ShardvizError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

INDENT = "  "


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Write to stdout until its reader closes the pipe; the exit code stays that of the verb."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        forget(sys.stdout)


def forget(stream: TextIO) -> None:
    """Send further output of a closed stream to /dev/null; Python would complain on exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def talk(text: str) -> None:
    """Print a line to stderr, if that takes one."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        forget(sys.stderr)


def say(message: str, *more: str) -> None:
    """Print talk to stderr, one line each, whatever characters a file's name has."""
    from shardviz.text import printable  # not for `shardviz --help`

    lines = [f"shardviz: {printable(message)}", *(printable(line) for line in more if line)]
    width = get_terminal_size((0, 0)).columns  # 0: a program reads it, and gets whole lines
    talk("\n".join(row for line in lines for row in (_rows(line, width) if width > len(INDENT) else [line])))


def _rows(line: str, width: int) -> list[str]:
    from textwrap import wrap

    return wrap(line, width, subsequent_indent=INDENT, break_long_words=False, break_on_hyphens=False)


def say_error(error: ShardvizError) -> None:
    """Print an error of the user's, with its hint and whatever else it has to say."""
    say(f"error: {error.message}", *str(error).removeprefix(error.message).splitlines())


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
    return columns or shutil.get_terminal_size().columns or 80  # 0 if Python 3.10 is not told


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


def write_file(content: str, output: Path, option: str = "-o") -> None:
    """Write a file in UTF-8, as a whole or not at all: one that is there stays as it is if there is no room.

    Args:
        option: The option that names the file.

    Raises:
        ShardvizError: It cannot be written.
    """
    target = Path(os.path.realpath(output))
    is_plain = target.is_file() or not target.exists()  # and no pipe or device
    is_beside = is_plain and os.access(target.parent, os.W_OK)
    written = target.with_name(f".shardviz-{os.getpid()}") if is_beside else target
    try:
        written.write_bytes(content.encode("utf-8"))
        if is_beside:
            if target.exists():
                shutil.copymode(target, written)
            written.replace(target)
    except OSError as error:
        raise ShardvizError(f"cannot write {output}: {error.strerror}", f"choose another file with {option}") from error
    finally:  # of Ctrl-C, too
        if is_beside:
            with suppress(OSError):
                written.unlink(missing_ok=True)
