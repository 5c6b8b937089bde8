"""Where a verb's answer and its talk go: stdout and stderr, whatever is at their other end."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from shutil import get_terminal_size
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO

    from shardviz.errors import ShardvizError


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
