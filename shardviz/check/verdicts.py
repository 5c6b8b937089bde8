"""The verdict on a tensor, the same in text, on a page and in the viewer. `terminal.Glyphs` has its glyphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from shardviz.check.step.compared import compared
from shardviz.dump.records import WEIGHTS
from shardviz.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardviz.check.finding import Report
    from shardviz.dump.dump import Dump, Tensor

Verdict = Literal["error", "warning", "unknown", "good", "pending"]

WORDS: dict[Verdict, str] = {
    "error": "finding",
    "warning": "warning",
    "unknown": "not checked",
    "good": "in order",
    "pending": "checking",
}
"""What each verdict is called, the worst first."""


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of some verdicts; of none, that all is in order."""
    return min(verdicts, key=list(WORDS).index, default="good")


def without_finding(dump: Dump, tensor: Tensor) -> Verdict:
    """Return the verdict on a tensor of which nothing is told: not checked where a rank of its mesh left no file."""
    mesh = tensor.claimed.mesh if tensor.claimed else dump.files.mesh
    return "unknown" if any(rank in mesh for rank in dump.files.missing_ranks) else "good"


def nothing_checked(dump: Dump, report: Report) -> str:
    """Say in a line that no tensor of a dump could be checked, and why; empty where some were."""
    if report.findings:
        return ""
    if not dump.tensors:
        return "nothing was checked: the dump has no tensors"
    weights = [tensor for tensor in dump.tensors if tensor.role in WEIGHTS and tensor.moment in ("stamped", "initial")]
    names = {name for tensor in weights for name in tensor.names if without_finding(dump, tensor) != "unknown"}
    unchecked = {one.tensor for one in report.not_checked if one.about in ("order", "no-ids")}
    if names - unchecked or next(compared(dump), None) is not None:
        return ""
    reasons = sorted({one.why for one in report.not_checked if one.about in ("order", "no-ids")})
    return f"nothing was checked in {counted(report.num_tensors, 'tensor')}" + (f": {reasons[0]}" if reasons else "")
