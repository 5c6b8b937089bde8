"""An activation, or its gradient, that is the unsharded model's times one number where a module begins to go wrong.

Nothing but the module itself can have done that: no optimizer, no wrapper and no loss scale.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from shardviz.check.step.rules.factors import size_clause, size_in_words
from shardviz.explain.step.gradients import AveragedBackward, RepeatedBackwardSum, ScaledOnTheWayBack
from shardviz.explain.step.modules import (
    AveragedForward,
    RepeatedForwardSum,
    ScaledBetweenModules,
    ScaledByMicroBatches,
)
from shardviz.explain.templates import times_text
from shardviz.relate.factors import MOST_RATIO, ratio_near
from shardviz.relate.measures import factor_of_all
from shardviz.relate.tolerance import LEAST_FACTOR_OF_MODULE, near_ratio

if TYPE_CHECKING:
    from shardviz.check.step.comparison import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.check.step.trace.divergence import Divergence
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding


def check_times(evidence: Evidence, comparison: Compared, first: Divergence) -> Finding | None:
    """Return the finding if every rank has the unsharded model's values times one number."""
    factor = factor_of_all([comparison])
    if factor is None or abs(factor - 1) < LEAST_FACTOR_OF_MODULE:
        return None
    ratio = ratio_near(factor, MOST_RATIO, near_ratio(comparison.rounding.epsilon)) or Fraction(0)
    size = " or ".join(_axes(comparison, ratio))
    cause = _cause(evidence, first, ratio, factor, size)
    times = times_text(ratio or factor)
    return comparison.finding(cause, f"the {comparison.what} is {times} {comparison.whose}{size_clause(ratio, size)}")


def _axes(comparison: Compared, ratio: Fraction) -> list[str]:
    """Return the axes, or sets of them, of this size over which the tensor may have been reduced: it is not split."""
    if not ratio or ratio == 1:
        return []
    named = size_in_words(comparison.mesh, ratio)
    return [
        text
        for text in named.split(" or ")
        if text and not any(comparison.is_split(axis) for axis in text.split(" * "))
    ]


def _cause(evidence: Evidence, first: Divergence, ratio: Fraction, factor: float, axes: str) -> Cause:
    name = first.module or "the model itself"
    parts = evidence.activations.num_micro_batches
    if parts > 1 and ratio in (Fraction(1, parts), Fraction(parts)):
        return ScaledByMicroBatches(name, first.direction, parts, is_divided=ratio < 1)
    if first.direction == "backward":
        if first.way == "between" and first.after:
            over = size_in_words(evidence.dump.files.mesh, ratio) if ratio else ""
            return ScaledOnTheWayBack(name, first.after, over, factor > 1)
        return times_in_backward(name, ratio, axes)
    if (first.way, first.before) == ("between", first.module) and first.after:
        return ScaledBetweenModules(first.after, name)
    return (RepeatedForwardSum if ratio >= 1 else AveragedForward)(name, axes)


def times_in_backward(name: str, ratio: Fraction, axes: str) -> Cause:
    """Return the cause of a gradient that is multiplied by a number in a module's backward."""
    return (RepeatedBackwardSum if ratio >= 1 else AveragedBackward)(name, axes)
