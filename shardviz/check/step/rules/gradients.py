"""`unreduced-gradient`, `unreduced-output`: copies of one gradient or output were never made to agree.

Along an axis that does not split it every rank must have the same gradient, and the same output. Where they differ
along such an axis and their sum or mean is the unsharded model's, each rank has only its own part. Quiet where `.grad`
is None (HSDP between backward and all-reduce) and where a Partial placement says that the sum is still to come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.step.compared import ranks_by_part
from shardviz.check.step.rules.ratios.scale import cause_of_ratio
from shardviz.check.step.rules.reductions import Unreduced, missing_reduction, own_part, reduction_over
from shardviz.check.step.words import apart_text, claimed_text
from shardviz.explain.sums import GradientNotReduced, OutputNotReduced, UnreducedSharedPart
from shardviz.explain.templates import times_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.check.step.compared import Compared
    from shardviz.check.step.rules.ratios.factors import Batch
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding

OPS = {"mean": "AVG", "sum": "SUM", "norm": "SUM"}
"""Reductions, as torch calls what is sent."""


def check_unreduced(result: Compared, batch: Batch | None = None) -> Finding | None:
    """Return the finding if copies of a gradient or output differ along an axis, and a reduction makes them right.

    Args:
        result: The result.
        batch: Whether each axis of the run splits the batch; None if that is not known.
    """
    missing = missing_reduction(result) if result.copies_differ_along else None
    if missing is None:
        return _among_holders(result)
    reduction, over, ratio = missing
    axes = " and ".join(over)
    low, high, worst = _farthest(result, result.mesh.groups(result.copies_differ_along[0]))
    whole = result.whose if ratio == 1 else f"{times_text(ratio)} {result.whose}"
    what = "gradient" if result.role == "grad" else "output"
    op = OPS[reduction]
    cause: Cause = GradientNotReduced(over, op) if result.role == "grad" else OutputNotReduced(over, op)
    if result.role == "grad" and ratio != 1:  # two things are wrong, and mending one of them leaves the other
        cause = GradientNotReduced(over, op, ratio=ratio, rest=cause_of_ratio(result, ratio, over, batch))
    return cause.finding(
        result.name,
        result.wrong,
        f"the {what} differs along {axes}: {apart_text(low, high, worst)}",
        details=(f"their {reduction} over {axes} is {whole}",),
        claimed=claimed_text(result),
        held=own_part(reduction, over),
    ).seen_in(Unreduced(result, reduction, over, ratio))


def _among_holders(result: Compared) -> Finding | None:
    """Return the finding if a reduction over the ranks that hold the same part, fewer than along any axis, is right."""
    holders = ranks_by_part(result)
    if result.role != "grad" or max(map(len, holders), default=0) < 2:
        return None
    low, high, worst = _farthest(result, holders)
    reduction = reduction_over(result, holders) if worst > result.tolerance else None
    if reduction is None:
        return None
    return UnreducedSharedPart(len(holders), len(result.reduced), OPS[reduction], tuple(holders)).finding(
        result.name,
        result.wrong,
        f"the gradient differs between ranks that hold the same part: {apart_text(low, high, worst)}",
        details=(f"the {reduction} over those that do is {result.whose}",),
        claimed=claimed_text(result),
        held="each rank's own contribution",
    )


def _farthest(result: Compared, groups: Sequence[Sequence[int]]) -> tuple[int, int, float]:
    """Return the two neighbors within groups whose copies of one part are farthest apart, and how far."""
    return max(result.neighbors_apart(groups), key=lambda pair: pair[2])
