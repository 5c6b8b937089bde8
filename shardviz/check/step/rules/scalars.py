"""`unreduced-scalar`: a logged value is another one on every rank, where each has only its own part of the whole.

What a training loop prints is of the whole batch and the whole model: the same on every rank. `.item()` of a DTensor
whose placement is Partial reads this rank's contribution and asks nobody (pytorch#144054).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.step.rules.reductions import Unreduced, missing_reduction, own_part
from shardviz.check.step.words import claimed_text
from shardviz.explain.losses import NormOfPart, ScalarNotReduced, ScalarOfPart
from shardviz.explain.templates import number
from shardviz.text import listed

if TYPE_CHECKING:
    from shardviz.check.step.compared import Compared
    from shardviz.check.step.rules.reductions import Reduction
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding

MAX_LISTED = 4


def check_scalar(one: Compared) -> Finding | None:
    """Return the finding if a scalar differs along an axis, and is not just wrong on some ranks."""
    missing = missing_reduction(one)
    if not one.copies_differ_along or (missing is None and len(one.wrong) < len(one.reduced)):
        return None
    axes = " and ".join(missing[1] if missing else one.copies_differ_along)
    shown = listed(dict.fromkeys(number(float(values.sum())) for values in one.reduced.values()), MAX_LISTED)
    finding = _cause(missing[0] if missing else None, axes).finding(
        one.name,
        one.wrong,
        f"ranks log {shown} where the unsharded model logs {number(float(one.wanted.sum()))}",
        details=(f"their {missing[0]} over {axes} is the unsharded model's value",) if missing else (),
        claimed=claimed_text(one),
        held=own_part(*missing[:2]) if missing else "a value of each rank's own",
    )
    return finding.seen_in(Unreduced(one, *missing[:2])) if missing else finding


def _cause(missing: Reduction | None, axes: str) -> Cause:
    """Return why ranks log different values, by the reduction that makes them right."""
    if missing is None:
        return ScalarOfPart(axes)
    return NormOfPart(axes) if missing == "norm" else ScalarNotReduced(axes, "AVG" if missing == "mean" else "SUM")
