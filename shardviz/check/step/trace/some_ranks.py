"""Why an output is wrong on some ranks and right on others: these alone add a term, or the others have zeros."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.trace.causes import INPUT, compared_at
from shardviz.explain.step.sums import TermOfSomeRanks, ZerosOfSomeRanks
from shardviz.explain.step.whole_step import RankDependentCode
from shardviz.relate.measures import vector_added
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from shardviz.check.step.comparison import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.check.step.trace.divergence import Divergence
    from shardviz.explain.finding import Finding


def with_term_of_some_ranks(evidence: Evidence, finding: Finding) -> Finding:
    """Return a finding of an output that some ranks have right, with what the others lack in the first wrong module."""
    first = evidence.divergence if isinstance(finding.explanation, RankDependentCode) else None
    if first is None or (first.direction, first.way) != ("forward", "within"):
        return finding
    name = first.module or "the model itself"
    for comparison in compared_at(evidence, first):
        wrong = comparison.wrong
        if comparison.incomparable or not wrong or len(wrong) == len(comparison.reduced):
            continue
        if not any(np.any(comparison.reduced[rank]) for rank in wrong):
            detail = f"{name} returns the whole on some ranks and zeros on {named_ranks(wrong)}"
            return replace(finding, details=(*finding.details, detail)).because(ZerosOfSomeRanks(name, wrong))
        terms = {_term(evidence, comparison, first, rank) for rank in wrong}
        term, times = terms.pop() if len(terms) == 1 else ("", 0)
        if term and times in (-1, 1):
            has = "lacks" if times < 0 else "adds"
            detail = f"the output of {name} on {named_ranks(wrong)} {has} {term}"
            cause = TermOfSomeRanks(term, wrong, name, is_extra=times > 0)
            return replace(finding, details=(*finding.details, detail)).because(cause)
    return finding


def _term(evidence: Evidence, comparison: Compared, first: Divergence, rank: int) -> tuple[str, int]:
    """Return the term that a rank's output has too often, and how often: -1 if it lacks it; empty if there is none."""
    names, vectors = evidence.dump.vectors(comparison.reduced[rank].shape[-1:])
    alone = replace(comparison, values={rank: comparison.values[rank]}, regions={rank: comparison.regions[rank]})
    if names and (added := vector_added(alone, vectors)) is not None:
        return names[added[0]], added[1]
    point = first.point
    for record in first.call.points.get(rank, ()):
        if point is not None and (record.what, record.index) == (point.what, point.index) and record.added:
            module = first.module or "the model itself"
            term = f"the input of {module}" if record.added == INPUT else f"the output of {record.added}"
            return term, record.times
    return "", 0
