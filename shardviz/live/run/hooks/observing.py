"""How hooks call what is shardviz's: never inside each other, and without harm to the job."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from shardviz.live.run.options import VARIABLE, Note, Options, leave

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


DEBUG = "SHARDVIZ_DEBUG"


class _Depth(threading.local):
    value = 0


_DEPTH = _Depth()


@contextmanager
def nested(*, counts: bool = True) -> Iterator[bool]:
    """Yield whether a call is the outermost: calls between torch's own functions don't count."""
    is_outermost = _DEPTH.value == 0
    _DEPTH.value += counts
    try:
        yield is_outermost
    finally:
        _DEPTH.value -= counts


def is_inside() -> bool:
    """Whether this thread is inside a counted call, where calls are not the job's own."""
    return _DEPTH.value > 0


def quietly(what: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of shardviz's; an error is reported and goes no further."""
    try:
        return function(*args)
    except Exception as error:
        show_traceback()
        report(f"the hook on {what} failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        return None


def show_traceback() -> None:
    """Print the error that is handled now, if the environment asks for it."""
    if os.environ.get(DEBUG):
        import traceback

        traceback.print_exc()


def rank_of_environment() -> int:
    """Return the rank that a launcher gave this process; 0 if it gave none."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


def say(text: str) -> None:
    """Print a line to stderr, which a job may have closed."""
    with suppress(OSError, ValueError, AttributeError):
        print(f"shardviz: {text}", file=sys.stderr, flush=True)


_REPORTED: set[str] = set()


def report(text: str) -> None:
    """Say once what does not work: to whoever reads rank 0's stderr, and to the command."""
    if text in _REPORTED:
        return
    _REPORTED.add(text)
    rank = rank_of_environment()
    if rank == 0:
        say(text)
    if os.environ.get(VARIABLE):
        leave(Options.of_environment().session, Note("problem", rank, text))
