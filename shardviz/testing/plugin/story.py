"""The report of a failed test: the traceback of the rank at fault, then the other ranks in a line each."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from shardviz.live.world import RankFailedError
from shardviz.live.world.failures.failure import is_echo
from shardviz.live.world.protocol import Failed
from shardviz.testing.assertions.message import ShardAssertionError
from shardviz.testing.plugin import compat
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from shardviz.errors import ShardvizError
    from shardviz.testing.plugin.compat import ExceptionChainRepr
    from shardviz.testing.plugin.outcome import Outcome

OWN_ERROR = f"{ShardAssertionError.__module__}.{ShardAssertionError.__qualname__}: "
"""Text left out of pytest's line for a failed test: it is cut at the screen's edge, and the finding comes last."""


@dataclass(frozen=True)
class Story:
    """A failure, to be shown in place of pytest's own report.

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


STORY: pytest.StashKey[Story] = pytest.StashKey()
"""How the last run of a test on ranks failed, until its report is made."""


def report_story(item: pytest.Item, report: pytest.TestReport) -> None:
    """Replace the report of pytest's own process on a test that did not pass, and say where its dump is."""
    story = item.stash.get(STORY, None)
    if story is not None:
        del item.stash[STORY]
        story.put_into(report)
    folder = getattr(item, "funcargs", {}).get("shard_dump")
    if folder is not None and folder.is_dir():
        report.sections.append(("dump", f"look at it with: shardviz view {shlex.quote(str(folder))}"))


def find_root(failure: ShardvizError, ends: list[Outcome]) -> Outcome | None:
    """Return how the test ended on the rank that the others follow from; None if that rank could not say.

    Failures come before skips, causes before echoes of another rank's failure, then the earliest comes first.

    Args:
        failure: What launching raised.
        ends: How the test ended on the ranks that could say.
    """
    if isinstance(failure, RankFailedError) and failure.rank not in {end.rank for end in ends}:
        return None
    order = sorted(ends, key=lambda end: (end.kind != "failed", _is_echo(end), end.when))
    same = [end for end in order if _is_same(end, order[0])]
    return min(same, key=lambda end: end.rank, default=None)


def story_of(root: Outcome, failure: ShardvizError, ends: list[Outcome], coords: list[str], seed: int) -> Story:
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
    return Story(shown, f"rank {root.rank} ({coords[root.rank]})", "\n".join(lines))


def plain_story(failure: ShardvizError, item: pytest.Item) -> Story:
    """Tell a failure that has no traceback of a rank: one died or hangs, or none could be started."""
    path, line, _ = item.location
    return Story(compat.plain_failure(str(failure), path, (line or 0) + 1))


def _is_echo(end: Outcome) -> bool:
    return is_echo(Failed(type(end.exception()).__name__, end.reason, "", "", end.when))


def _is_same(end: Outcome, other: Outcome) -> bool:
    def line(outcome: Outcome) -> tuple[str, str]:
        return outcome.kind, outcome.text.strip().rpartition("\n")[2]

    return line(end) == line(other)


def _other_failures(ends: list[Outcome], shown: list[int]) -> list[str]:
    by_line: dict[str, list[int]] = {}
    for end in ends:
        if end.rank not in shown:
            what = "lost the connection" if _is_echo(end) else end.reason.strip().partition("\n")[0] or end.kind
            by_line.setdefault(what, []).append(end.rank)
    return [f"{named_ranks(ranks)}: {what}" for what, ranks in by_line.items()]
