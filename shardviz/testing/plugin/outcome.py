"""How a test ended: each rank that didn't pass writes a file, and pytest reports one."""

from __future__ import annotations

import inspect
import pickle
import shlex
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from shardviz.errors import ShardvizError
from shardviz.live.world import RankFailedError
from shardviz.live.world.failures import is_echo, pickled
from shardviz.live.world.protocol import Failed
from shardviz.testing.assertions.message import ShardAssertionError
from shardviz.testing.plugin import compat
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardviz.testing.plugin.compat import ExceptionChainRepr
    from shardviz.testing.plugin.parcel import FailureStyle


Kind = Literal["failed", "skipped", "xfailed"]
Warned = tuple[bytes, str, int]
"""A pickled warning, the file and the line that it points to."""

_OURS = str(Path(__file__).parents[1])
_PACKAGE = str(Path(__file__).parents[2])
_MAX_TEXT = 1 << 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a test ended on a rank.

    Attributes:
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
        """Return the test's exception, or one of its class with its text; None if unpicklable."""
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


def describe(rank: int, error: BaseException, function: Callable[..., Any], style: FailureStyle) -> Outcome:
    """Put an exception of a test into plain data, with the traceback that pytest would show."""
    when = time.monotonic()
    kind: Kind = "failed"
    if isinstance(error, pytest.skip.Exception):
        kind = "skipped"
    elif isinstance(error, pytest.xfail.Exception):
        kind = "xfailed"
    shown = _representation(error, function, style)
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


def _representation(error: BaseException, function: Callable[..., Any], style: FailureStyle) -> Any:
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


def _filtered(excinfo: pytest.ExceptionInfo[BaseException], function: Callable[..., Any], style: FailureStyle) -> Any:
    """Keep a traceback's frames from the test on; those in between take one line each.

    An error that shardviz reports is shown where the test makes it.
    """
    code = inspect.unwrap(function).__code__
    frames = excinfo.traceback.cut(path=code.co_filename, firstlineno=code.co_firstlineno - 1)
    package = _PACKAGE if isinstance(excinfo.value, ShardvizError) else _OURS
    frames = compat.traceback_of([entry for entry in frames if not str(entry.path).startswith(package)]) or frames
    frames = frames.filter(excinfo)
    if style.traceback == "auto" and len(frames) > 2:
        frames = compat.traceback_of(
            (frames[0], *(entry.with_repr_style("short") for entry in frames[1:-1]), frames[-1])
        )
    return frames


OWN_ERROR = f"{ShardAssertionError.__module__}.{ShardAssertionError.__qualname__}: "
"""Text left out of pytest's line for a failed test: it is cut at the screen's edge, and the finding comes last."""


@dataclass(frozen=True)
class FailureStory:
    """A failure's text, shown in place of pytest's own report.

    Attributes:
        shown: pytest's representation of it.
        title: Which rank it is about; empty if it is about no single one.
        rest: What the other ranks did, and the seed.
    """

    shown: ExceptionChainRepr
    title: str = ""
    rest: str = ""

    def put_into(self, report: pytest.TestReport) -> None:
        """Let a report show this failure instead of the frames of pytest's own process."""
        if self.title:
            if self.shown.reprcrash is not None:
                message = self.shown.reprcrash.message.removeprefix(OWN_ERROR)
                self.shown.reprcrash.message = f"{self.title}: {message}"
            self.shown.addsection(self.title, self.rest)
        report.longrepr = self.shown


STORY: pytest.StashKey[FailureStory] = pytest.StashKey()
"""How the last run of a test on ranks failed, until its report is made."""


def report_story(item: pytest.Item, report: pytest.TestReport) -> None:
    """Replace pytest's own report of a failed test, and say where its dump is."""
    story = item.stash.get(STORY, None)
    if story is not None:
        del item.stash[STORY]
        story.put_into(report)
    folder = getattr(item, "funcargs", {}).get("shard_dump")
    if folder is not None and folder.is_dir():
        report.sections.append(("dump", f"look at it with: shardviz view {shlex.quote(str(folder))}"))


def find_root(failure: ShardvizError, ends: list[Outcome]) -> Outcome | None:
    """Return the outcome on the rank that failed first; None if that rank left none.

    Failures come before skips, causes before echoes of another rank's failure, then the earliest comes first.

    Args:
        ends: How the test ended on the ranks that could say.
    """
    if isinstance(failure, RankFailedError) and failure.rank not in {end.rank for end in ends}:
        return None
    order = sorted(ends, key=lambda end: (end.kind != "failed", _is_echo(end), end.when))
    same = [end for end in order if _is_same(end, order[0])]
    return min(same, key=lambda end: end.rank, default=None)


def story_of(root: Outcome, failure: ShardvizError, ends: list[Outcome], coords: list[str], seed: int) -> FailureStory:
    """Tell a failure by the rank at fault, with a label for every rank in `coords`."""
    same = [end.rank for end in ends if _is_same(end, root)]
    lines = []
    if others := [rank for rank in same if rank != root.rank]:
        lines.append(f"{named_ranks(others)}: the same")
    lines += _other_failures(ends, same)
    if isinstance(failure, RankFailedError) and failure.waiting:
        lines.append(failure.waiting)
    lines.append(f"seed {seed} on every rank")
    shown = root.representation() or compat.plain_failure(root.text, "", 0)
    return FailureStory(shown, f"rank {root.rank} ({coords[root.rank]})", "\n".join(lines))


def plain_story(failure: ShardvizError, item: pytest.Item) -> FailureStory:
    """Describe a failure without a traceback: a rank died, hangs or couldn't be started."""
    path, line, _ = item.location
    return FailureStory(compat.plain_failure(str(failure), path, (line or 0) + 1))


def _is_echo(end: Outcome) -> bool:
    return is_echo(Failed(type(end.exception()).__name__, end.reason, "", "", end.when))


def _is_same(end: Outcome, second: Outcome) -> bool:
    def line(outcome: Outcome) -> tuple[str, str]:
        return outcome.kind, outcome.text.strip().rpartition("\n")[2]

    return line(end) == line(second)


def _other_failures(ends: list[Outcome], shown: list[int]) -> list[str]:
    by_line: dict[str, list[int]] = {}
    for end in ends:
        if end.rank not in shown:
            what = "lost the connection" if _is_echo(end) else end.reason.strip().partition("\n")[0] or end.kind
            by_line.setdefault(what, []).append(end.rank)
    return [f"{named_ranks(ranks)}: {what}" for what, ranks in by_line.items()]
