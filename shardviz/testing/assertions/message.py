"""The text of a failed assertion: mistake, claimed / held / intended, picture, and fix."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.report import grouped, ranks_by_name, ungrouped
from shardviz.errors import ShardvizError
from shardviz.explain.finding import MOST_NAMES
from shardviz.text import counted, folded_names, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.check.order.case import LaidOut
    from shardviz.check.report import Report
    from shardviz.dump.dump import Dump
    from shardviz.explain.finding import Finding

MAX_IN_FULL = 3
"""Number of findings that are reported in full; the others are only named."""
MAX_NAMED = 12
"""Number of the others that are named."""
MAX_UNCHECKED = 12
"""Number of checks that could not be made that are listed."""
WIDTH = 100
INDENT = 2
COLUMN = 10


is_reported_once: ContextVar[bool] = ContextVar("is_reported_once", default=False)
"""Whether pytest reports the failure of all ranks once. In a user's own job, rank 0 has the full report."""


class ShardAssertionError(AssertionError):
    """A failed assertion about layouts or values. Its text is the full report."""

    __module__ = "shardviz.testing"


def raise_for(dump: Dump | None, findings: Sequence[Finding], laid_out: LaidOut | None = None) -> None:
    """Raise if there are findings; in a user's own job, in one line on all ranks except rank 0.

    Args:
        findings: Worst first.

    Raises:
        ShardAssertionError: There are findings.
    """
    __tracebackhide__ = True
    if findings:
        text = report(dump, findings, laid_out)
        rank = _rank_in_job()
        raise ShardAssertionError(text if not rank else f"{text.splitlines()[0]} (see rank 0 for the full report)")


def refuse_unchecked(report: Report) -> None:
    """Raise if a check could not be made, naming each once for identical layers.

    Raises:
        ShardAssertionError: Something was not checked.
    """
    __tracebackhide__ = True
    if report.reasons:
        fix = _rows([("fix", "make these checks possible, or leave out strict=True to allow them")])
        first = f"{counted(len(report.reasons), 'check')} could not be made, and strict=True requires all"
        raise ShardAssertionError("\n".join([first, *_unchecked_lines(report), *fix]))


def refuse_unordered(report: Report) -> None:
    """Fail if the order of a tensor wasn't checked, unless it is a mask or flag.

    Raises:
        ShardAssertionError: Elements of a tensor could not be placed.
    """
    __tracebackhide__ = True
    unchecked = tuple(one for one in report.not_checked if one.about == "order")
    if unchecked:
        names = folded_names((one.tensor for one in unchecked), MOST_NAMES)
        lines = "\n".join(_unchecked_lines(replace(report, not_checked=unchecked)))
        raise ShardAssertionError(
            f"the order of {printable(names)} cannot be checked:\n{lines}\n"
            "  fix       cast the model before stamp(model), not afterwards; or let shardviz.capture_sharding fill "
            "it with values that outlast the cast"
        )


def _unchecked_lines(report: Report) -> list[str]:
    """Return the first reasons why checks could not be made, each once for identical layers."""
    lines = report.reasons
    more = [f"and {len(lines) - MAX_UNCHECKED} more"] if len(lines) > MAX_UNCHECKED else []
    return [f"{'':{INDENT}}{printable(line)}" for line in (*lines[:MAX_UNCHECKED], *more)]


def _rank_in_job() -> int:
    """Return this rank in a user's own job; 0 in pytest's process or if pytest runs the ranks."""
    distributed = sys.modules.get("torch.distributed")
    if is_reported_once.get() or distributed is None or not distributed.is_initialized():
        return 0
    return int(distributed.get_rank())


def report(dump: Dump | None, findings: Sequence[Finding], laid_out: LaidOut | None = None) -> str:
    """Return the text for findings: the first ones in full, and one cause on many tensors once."""
    return in_words(dump, grouped(ungrouped(findings), ranks_by_name(dump) if dump else {}), laid_out)


def in_words(
    dump: Dump | None, whole: Sequence[Finding], laid_out: LaidOut | None = None, most: int = MAX_IN_FULL
) -> str:
    """Return the text of grouped findings: the first ones in full, the others by name."""
    parts = [_in_full(dump, finding, laid_out) for finding in whole[:most]]
    if more := [finding.title or finding.kind for finding in whole[most:]]:
        dots = "; ..." if len(more) > MAX_NAMED else ""
        parts.append(f"and {len(more)} more: {printable('; '.join(more[:MAX_NAMED]))}{dots}")
    return "\n\n".join(parts)


def _in_full(dump: Dump | None, finding: Finding, laid_out: LaidOut | None) -> str:
    lines = [printable(f"{finding.title or finding.kind}: {finding.summary}")]
    ranks = _ranks(finding)
    lines += _rows([*([("ranks", ranks)] if ranks else []), *finding.layouts])
    if picture := _picture(dump, finding.tensor, laid_out):
        lines += ["", *picture, ""]
    return "\n".join([*lines, *_rows(finding.advice)])


def _rows(rows: Sequence[tuple[str, str]]) -> list[str]:
    return [f"{'':{INDENT}}{title:<{COLUMN}}{printable(text)}" for title, text in rows]


def _picture(dump: Dump | None, name: str, laid_out: LaidOut | None) -> list[str]:
    """Draw a tensor as `shardviz show` does, if there is something to draw."""
    tensor = dump.first_captured.get(name) if dump is not None else None
    if dump is None or tensor is None or not (tensor.claimed or tensor.moment == "stamped"):
        return []
    from shardviz.picture.model.subject import of_tensor
    from shardviz.picture.text.page import picture_lines
    from shardviz.picture.text.terminal import Terminal

    terminal = Terminal(WIDTH)
    try:
        text = terminal.render(picture_lines(of_tensor(dump, tensor, name, laid_out=laid_out), terminal))
    except ShardvizError as error:
        return [f"{'':{INDENT}}no picture: {error.message}"]
    return [f"{'':{INDENT}}{line}".rstrip() for line in text.rstrip().splitlines()]


def _ranks(finding: Finding) -> str:
    from shardviz.picture.model.holders import mask_of, ranks_text

    return ranks_text(mask_of(finding.ranks)) if finding.ranks else ""
