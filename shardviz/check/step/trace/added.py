"""A sum that has one of its terms too often or not at all: an output, or the gradient of an input."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from shardviz.check.step.rules.ratios.scale import size_in_words
from shardviz.explain.gradients import CutResidual
from shardviz.explain.sums import RepeatedTerm, TermLeftOut

if TYPE_CHECKING:
    from shardviz.check.step.evidence import Evidence
    from shardviz.check.step.trace.divergence import Divergence
    from shardviz.explain.finding import Finding

INPUT = "input"
"""What a module was given goes by this name."""


def check_added(evidence: Evidence, first: Divergence) -> Finding | None:
    """Return the finding if the sum has the same term too often, or lacks it, on every wrong rank."""
    point = first.point
    if point is None or point.what not in ("output", "gradient of input"):
        return None
    call = next(one for one in evidence.calls.by_module[point.module] if one.number == point.call)
    own = {
        rank: one
        for rank, points in call.points.items()
        for one in points
        if (one.what, one.index) == (point.what, point.index) and one.state not in ("right", "pending")
    }
    terms = {(one.added, one.times) for one in own.values()}
    if len(terms) != 1 or not point.added:
        return None
    ranks = tuple(sorted(own))
    if point.what == "output":
        return _finding(evidence, first, point.added, point.times, ranks)
    return _around(first, point.added, ranks) if point.times == -1 else None


def _around(first: Divergence, added: str, ranks: tuple[int, ...]) -> Finding:
    """Return the finding that a gradient lacks the part of it that should flow back through a residual."""
    name = first.module or "the model itself"
    return CutResidual(name).finding(
        name,
        ranks,
        f"the gradient of the input of {name} lacks that of the output of {added}, which should flow back to it",
    )


def _finding(evidence: Evidence, first: Divergence, added: str, times: int, ranks: tuple[int, ...]) -> Finding:
    name = first.module or "the model itself"
    term = f"the input of {name}" if added == INPUT else f"the output of {added}"
    if times < 0:
        return TermLeftOut(term, name).finding(
            name,
            ranks,
            f"the output lacks {term}" if times == -1 else f"{term} is subtracted from the output {-times} times",
            kind="wrong-value",
        )
    axes = size_in_words(evidence.dump.files.mesh, Fraction(times + 1))
    sentence = f"{term} is in the output {times + 1} times"
    return RepeatedTerm(term, axes, name).finding(name, ranks, sentence)
