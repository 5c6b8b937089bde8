"""The verdict on a tensor, the same in text, on a page and in the viewer. `terminal.Glyphs` has its glyphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

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
