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


def check_unreduced(one: Compared, batch: Batch | None = None) -> Finding | None:
    """Return the finding if copies of a gradient or output differ along an axis, and a reduction makes them right.

    Args:
        one: The result.
        batch: Whether each axis of the run splits the batch; None if that is not known.
    """
    missing = missing_reduction(one) if one.copies_differ_along else None
    if missing is None:
        return _among_holders(one)
    reduction, over, ratio = missing
    axes = " and ".join(over)
    low, high, worst = _farthest(one, one.mesh.groups(one.copies_differ_along[0]))
    whole = one.whose if ratio == 1 else f"{times_text(ratio)} {one.whose}"
    what = "gradient" if one.role == "grad" else "output"
    op = OPS[reduction]
    cause: Cause = GradientNotReduced(over, op) if one.role == "grad" else OutputNotReduced(over, op)
    if one.role == "grad" and ratio != 1:  # two things are wrong, and mending one of them leaves the other
        cause = GradientNotReduced(over, op, ratio=ratio, rest=cause_of_ratio(one, ratio, over, batch))
    return cause.finding(
        one.name,
        one.wrong,
        f"the {what} differs along {axes}: {apart_text(low, high, worst)}",
        details=(f"their {reduction} over {axes} is {whole}",),
        claimed=claimed_text(one),
        held=own_part(reduction, over),
    ).seen_in(Unreduced(one, reduction, over, ratio))


def _among_holders(one: Compared) -> Finding | None:
    """Return the finding if a reduction over the ranks that hold the same part, fewer than along any axis, is right."""
    holders = ranks_by_part(one)
    if one.role != "grad" or max(map(len, holders), default=0) < 2:
        return None
    low, high, worst = _farthest(one, holders)
    reduction = reduction_over(one, holders) if worst > one.tolerance else None
    if reduction is None:
        return None
    return UnreducedSharedPart(len(holders), len(one.reduced), OPS[reduction], tuple(holders)).finding(
        one.name,
        one.wrong,
        f"the gradient differs between ranks that hold the same part: {apart_text(low, high, worst)}",
        details=(f"the {reduction} over those that do is {one.whose}",),
        claimed=claimed_text(one),
        held="each rank's own contribution",
    )


def _farthest(one: Compared, groups: Sequence[Sequence[int]]) -> tuple[int, int, float]:
    """Return the two neighbors within groups whose copies of one part are farthest apart, and how far."""
    return max(one.neighbors_apart(groups), key=lambda pair: pair[2])
