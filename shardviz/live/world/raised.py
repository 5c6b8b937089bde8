"""An exception, as a rank reports it: without the frames that brought the task to run, nor torch's plumbing."""

from __future__ import annotations

import importlib
import pickle
import time
import traceback
from pathlib import Path

from shardviz.errors import ShardvizError
from shardviz.live.world.protocol import Failed

_OURS = str(Path(__file__).parent)
_IMPORTLIB = importlib.__file__
_PLUMBING = (
    "torch/nn/modules/module.py",
    "torch/utils/_contextlib.py",
    "torch/distributed/c10d_logger.py",
    "torch/_compile.py",
    "torch/_dynamo/eval_frame.py",
)
"""Wrappers around every call of a module or a collective, which say nothing about a failure."""


def describe(error: BaseException) -> Failed:
    """Everything about an exception that the launcher will want, as plain data."""
    when = time.monotonic()
    told = traceback.TracebackException.from_exception(error)
    _trim(told)
    where = f"{told.stack[-1].filename}:{told.stack[-1].lineno}" if told.stack else ""
    text = "".join(told.format()).rstrip()
    if not told.stack and "\n" not in text:
        text = ""  # a task that cannot be found: the headline says it all
    return Failed(_name(error), str(error), text, where, when, _usage(error))


def _trim(told: traceback.TracebackException) -> None:
    kept = [frame for frame in told.stack if not _is_noise(frame.filename)]
    told.stack = traceback.StackSummary.from_list(kept)
    for earlier in (told.__cause__, told.__context__):
        if earlier is not None:
            _trim(earlier)


def _is_noise(filename: str) -> bool:
    return filename.startswith((_OURS, "<frozen importlib", _IMPORTLIB)) or filename.endswith(_PLUMBING)


def _name(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _usage(error: BaseException) -> bytes | None:
    if not isinstance(error, ShardvizError):
        return None
    return pickled(error) or pickle.dumps(ShardvizError(error.message, error.hint))


def pickled(raised: BaseException | type[BaseException]) -> bytes:
    """Return an exception, a warning or its class for another process to read; nothing where it would not come back.

    An exception's own pickling may raise anything, as may its constructor when it is read.
    """
    try:
        content = pickle.dumps(raised)
        pickle.loads(content)
    except Exception:
        return b""
    return content
