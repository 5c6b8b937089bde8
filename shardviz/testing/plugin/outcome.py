"""How a test ended on one rank when it did not pass: written by the rank to a file, read by pytest's process."""

from __future__ import annotations

import inspect
import pickle
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from shardviz.errors import ShardvizError
from shardviz.live.world.failures.raised import pickled
from shardviz.testing.plugin import compat

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardviz.testing.plugin.compat import ExceptionChainRepr
    from shardviz.testing.plugin.on_ranks.parcel import Style

Kind = Literal["failed", "skipped", "xfailed"]
Warned = tuple[bytes, str, int]
"""A pickled warning, the file and the line that it points to."""

_OURS = str(Path(__file__).parents[1])
_PACKAGE = str(Path(__file__).parents[2])
_MAX_TEXT = 1 << 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a test on a rank.

    Attributes:
        rank: The rank.
        kind: What pytest calls it.
        reason: The exception's text.
        when: `time.monotonic()`.
        error: The pickled exception; empty if it cannot pickle.
        type_: Its pickled class; empty if that cannot pickle.
        shown: The pickled representation that pytest would print; empty if it is none of an exception.
        text: The same as text.
    """

    rank: int
    kind: Kind
    reason: str
    when: float
    error: bytes
    type_: bytes
    shown: bytes
    text: str

    def exception(self) -> BaseException | None:
        """Return the exception that the test raised, or one of its class with its text; None if neither can be had."""
        with suppress(Exception):
            error = pickle.loads(self.error)
            if isinstance(error, BaseException):
                return error
        with suppress(Exception):
            kind = pickle.loads(self.type_)
            alike: BaseException = kind.__new__(kind, self.reason)
            return alike
        return None

    def representation(self) -> ExceptionChainRepr | None:
        """Return the text that pytest would print."""
        return compat.as_failure(pickle.loads(self.shown)) if self.shown else None


def describe(rank: int, error: BaseException, function: Callable[..., Any], style: Style) -> Outcome:
    """Put an exception of a test into plain data, with the traceback that pytest would show."""
    when = time.monotonic()
    kind: Kind = "failed"
    if isinstance(error, pytest.skip.Exception):
        kind = "skipped"
    elif isinstance(error, pytest.xfail.Exception):
        kind = "xfailed"
    shown = _shown(error, function, style)
    as_shown = pickle.dumps(shown) if compat.as_failure(shown) is not None else b""
    text = str(shown)[:_MAX_TEXT]
    return Outcome(rank, kind, str(error), when, pickled(error), pickled(type(error)), as_shown, text)


def write(folder: Path, outcome: Outcome) -> None:
    """Write an outcome for pytest's process to find."""
    file = folder / f"outcome_{outcome.rank:05d}"
    file.with_suffix(".tmp").write_bytes(pickle.dumps(outcome))
    file.with_suffix(".tmp").rename(file)


def read(folder: Path) -> list[Outcome]:
    """Return the outcomes of all ranks that wrote one, in rank order."""
    files = sorted(file for file in folder.glob("outcome_*") if not file.suffix)
    return [pickle.loads(file.read_bytes()) for file in files]


def _shown(error: BaseException, function: Callable[..., Any], style: Style) -> Any:
    """Show an exception as `pytest.Function.repr_failure` does."""
    excinfo = pytest.ExceptionInfo.from_exception(error)
    chosen: Any = "long" if style.full or style.traceback == "auto" else style.traceback
    if isinstance(error, pytest.fail.Exception) and not error.pytrace:
        chosen = "value"
    return excinfo.getrepr(
        funcargs=True,
        showlocals=style.show_locals,
        style=chosen,
        tbfilter=False if style.full else lambda info: _filtered(info, function, style),
        truncate_locals=style.verbosity <= 1,
    )


def _filtered(excinfo: pytest.ExceptionInfo[BaseException], function: Callable[..., Any], style: Style) -> Any:
    """Keep what is from the test on and not hidden; between the first and the last frame, a line each.

    A mistake that shardviz reports is shown where the test makes it.
    """
    code = inspect.unwrap(function).__code__
    kept = excinfo.traceback.cut(path=code.co_filename, firstlineno=code.co_firstlineno - 1)
    ours = _PACKAGE if isinstance(excinfo.value, ShardvizError) else _OURS
    kept = compat.traceback_of([entry for entry in kept if not str(entry.path).startswith(ours)]) or kept
    kept = kept.filter(excinfo)
    if style.traceback == "auto" and len(kept) > 2:
        kept = compat.traceback_of((kept[0], *(entry.with_repr_style("short") for entry in kept[1:-1]), kept[-1]))
    return kept
