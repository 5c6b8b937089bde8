"""The verdict on a tensor, the same in text, on a page and in the viewer. `terminal.Glyphs` has its glyphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

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
