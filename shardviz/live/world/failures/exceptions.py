"""An exception as a rank reports it, without the frames of the runner or of torch."""

from __future__ import annotations

import importlib
import os
import pickle
import time
import traceback
from pathlib import Path

from shardviz.errors import ShardvizError
from shardviz.live.world.protocol import Failed

MAX_LINES = 20
MAX_COLUMNS = 500
"""Lines of an exception's message, and characters of a line, that are shown."""

_OURS = str(Path(__file__).parents[1])
_PACKAGE = str(Path(__file__).parents[3]) + os.sep
_PROBES = str(Path(_PACKAGE, "probes")) + os.sep
_IMPORTLIB = importlib.__file__
_LOADER = str(Path(_PACKAGE, "live/noting.py"))
_PLUMBING = (
    "torch/nn/modules/module.py",
    "torch/utils/_contextlib.py",
    "torch/distributed/c10d_logger.py",
    "torch/_compile.py",
    "torch/_dynamo/eval_frame.py",
)
"""Wrappers around every call of a module or a collective, which say nothing about a failure."""


def describe(error: BaseException) -> Failed:
    """Return everything about an exception that the launcher will want, as plain data."""
    when = time.monotonic()
    summary = traceback.TracebackException.from_exception(error)
    _trim(summary)
    where = f"{summary.stack[-1].filename}:{summary.stack[-1].lineno}" if summary.stack else ""
    text = _with_short_messages("".join(summary.format()).rstrip(), error)
    if not summary.stack and "\n" not in text:
        text = ""  # a task that cannot be found: the headline says it all
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return Failed(name, shortened(_message(error)), text, where, when, _usage(error))


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # of a class of the user's own
        return ""


def shortened(message: str) -> str:
    """Cut a message to the size of a screen, and say how much was left out."""
    lines = message.split("\n")
    shown = [line if len(line) <= MAX_COLUMNS else f"{line[:MAX_COLUMNS]}..." for line in lines[:MAX_LINES]]
    num_left = len(lines) - MAX_LINES
    return "\n".join([*shown, *([f"... {num_left:,} more lines"] if num_left > 0 else [])])


def _with_short_messages(text: str, error: BaseException) -> str:
    """Cut the messages of an exception, and of those that led to it, in a traceback."""
    visited: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        cause = waiting.pop()
        if cause is None or id(cause) in visited:
            continue
        visited.add(id(cause))
        message = _message(cause).rstrip()
        if shortened(message) != message:
            text = text.replace(message, shortened(message))
        waiting += [cause.__cause__, cause.__context__]
    return text


def _trim(summary: traceback.TracebackException) -> None:
    noise = (_OURS, "<frozen importlib", _IMPORTLIB, _LOADER)
    frames = (frame for frame in summary.stack if not frame.filename.startswith(noise))
    user_frames = [frame for frame in frames if not frame.filename.endswith(_PLUMBING)]
    outside_shardviz = [index for index, frame in enumerate(user_frames) if not is_of_shardviz(frame.filename)]
    summary.stack = traceback.StackSummary.from_list(
        user_frames[outside_shardviz[0] :] if outside_shardviz else user_frames
    )
    for earlier in (summary.__cause__, summary.__context__):
        if earlier is not None:
            _trim(earlier)


def is_of_shardviz(filename: str) -> bool:
    """Whether a file is shardviz's own; its recipes count as probes."""
    return filename.startswith(_PACKAGE) and not filename.startswith(_PROBES)


def _usage(error: BaseException) -> bytes | None:
    if not isinstance(error, ShardvizError):
        return None
    return pickled(error) or pickle.dumps(ShardvizError(error.message, error.hint))


def pickled(raised: BaseException | type[BaseException]) -> bytes:
    """Return an exception, a warning or its class pickled; empty if it would not come back.

    An exception's own pickling may raise anything, as may its constructor when it is read.
    """
    try:
        content = pickle.dumps(raised)
        pickle.loads(content)
    except Exception:
        return b""
    return content
