"""Where a verb's answer and its talk go: stdout and stderr, whatever is at their other end."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Write to stdout until whoever reads it has enough: what the command found is its exit code all the same."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        forget(sys.stdout)


def forget(stream: TextIO) -> None:
    """Write no more to a stream that takes no more; Python would complain once again when it closes it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def talk(text: str) -> None:
    """Print a line to stderr, where that takes one."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        forget(sys.stderr)
