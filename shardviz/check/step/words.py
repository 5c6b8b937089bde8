"""Numbers and claims of a step, as findings say them, and the finding that is about all ranks of one result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.finding import Finding
from shardviz.layout.notation import write

if TYPE_CHECKING:
    from collections.abc import Iterable
    from fractions import Fraction

    from shardviz.check.finding import Kind, Severity
    from shardviz.check.step.advice import Advice
    from shardviz.check.step.compared import Compared


WHAT = {"grad": "gradient", "output": "output", "scalar": "value"}
"""Roles, as sentences call them."""


def number(value: float) -> str:
    """Return a number in at most five digits that matter."""
    return f"{value:.5g}"


def size_clause(ratio: Fraction | float, axes: str) -> str:
    """Return the clause that names the axes whose size a ratio is, or one over it; empty where there are none."""
    return f", {'' if ratio > 1 else '1 over '}the size of {axes}" if axes else ""


def claimed_text(one: Compared) -> str:
    """Return what is claimed of a tensor, in the notation, with the axes along which copies are equal."""
    return write(one.claimed, equal=True) if one.claimed else ""


def finding_of(
    one: Compared,
    kind: Kind,
    sentence: str,
    advice: Advice,
    *,
    ranks: Iterable[int] | None = None,
    held: str = "",
    severity: Severity = "error",
) -> Finding:
    """Return the finding of a result.

    Args:
        one: The result.
        kind: Which rule it breaks.
        sentence: What is wrong, in numbers.
        advice: Cause and fix.
        ranks: The ranks that have it; by default all that have the result.
        held: What ranks hold instead of what is claimed.
        severity: How bad it is.
    """
    cause, fix = advice
    own = tuple(sorted(one.values if ranks is None else ranks))
    return Finding(kind, severity, one.name, own, sentence, claimed=claimed_text(one), held=held, cause=cause, fix=fix)
