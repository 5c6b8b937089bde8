"""An activation, or its gradient, that is the unsharded model's times one number where a module begins to go wrong.

Nothing but the module itself can have done that: no optimizer, no wrapper and no loss scale.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.rules.ratios.factors import splits
from shardviz.check.step.rules.ratios.scale import size_in_words, times_text
from shardviz.check.step.words import WHAT, claimed_text, number, size_clause
from shardviz.explain.finding import Finding

if TYPE_CHECKING:
    from shardviz.check.step.advice import Advice
    from shardviz.check.step.compared import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.check.step.trace.divergence import Divergence

MAX_DENOMINATOR = 64
NEAR = 1e-6
"""A factor this near to a ratio of small numbers, relative to it and rounding apart, is that one."""

LEAST_SCALE = 0.01
"""Factors nearer to 1 than this are errors that happen to be proportional."""


def check_times(evidence: Evidence, one: Compared, first: Divergence) -> Finding | None:
    """Return the finding if every rank has the unsharded model's values times one number."""
    factor = _factor(one)
    if factor is None or abs(factor - 1) < LEAST_SCALE:
        return None
    ratio = Fraction(factor).limit_denominator(MAX_DENOMINATOR)
    is_ratio = bool(ratio) and abs(factor - ratio) <= max(NEAR, one.rounding.epsilon) * abs(factor)
    axes = _axes(one, ratio) if is_ratio else []
    size = " or ".join(axes)
    times = times_text(ratio) if is_ratio else f"{number(factor)} times"
    cause, fix = _advice(evidence, first, ratio if is_ratio else Fraction(0), size)
    return Finding(
        "wrong-scale",
        "error",
        one.name,
        one.wrong,
        f"the {WHAT[one.role]} is {times} {one.whose}{size_clause(ratio, size)}",
        claimed=claimed_text(one),
        cause=cause,
        fix=fix,
    )


def _factor(one: Compared) -> float | None:
    """Return the one number by which every rank's values are those wanted; None where there is none."""
    got = np.concatenate([values.ravel() for values in one.reduced.values()])
    due = np.concatenate([one.wanted_of(rank).ravel() for rank in one.reduced])
    square = float(np.sum(due * due))
    if not square or not np.all(np.isfinite(got)):
        return None
    factor = float(np.sum(got * due)) / square
    return factor if factor and one.near(got, due * factor, scale=abs(factor)) else None


def _axes(one: Compared, ratio: Fraction) -> list[str]:
    """Return the axes, or sets of them, of this size over which the tensor may have been reduced: it is not split."""
    if not ratio or ratio == 1:
        return []
    named = size_in_words(one.mesh, ratio)
    return [text for text in named.split(" or ") if text and not any(splits(one, axis) for axis in text.split(" * "))]


def _advice(evidence: Evidence, first: Divergence, ratio: Fraction, axes: str) -> Advice:
    name = first.module or "the model itself"
    parts = evidence.activations.num_micro_batches
    if parts > 1 and ratio in (Fraction(1, parts), Fraction(parts)):
        return (
            f"What goes through {name} in {first.direction} is {'divided' if ratio < 1 else 'multiplied'} by "
            f"{parts}, the number of micro-batches, once more than the loss is",
            f"divide the loss by {parts} and nothing else: not what is sent between stages",
        )
    if first.direction == "backward":
        return times_in_backward(name, ratio, axes)
    if (first.way, first.before) == ("between", first.module) and first.after:
        return _on_the_way(first.after, name)
    return _in_forward(name, ratio, axes)


def _on_the_way(after: str, name: str) -> Advice:
    return (
        f"The output of {after} is right, and {name} receives it multiplied by a number: it is scaled on the way, as "
        "where one stage of a pipeline sends to the next",
        f"look at the code between {after} and {name} that sends, receives or divides",
    )


def _in_forward(name: str, ratio: Fraction, axes: str) -> Advice:
    over = f" over {axes}" if axes else ""
    if ratio >= 1:
        return (
            f"{name} sums{over} what is the whole sum already, or was never split, or scales by a number that "
            "changes when it is sharded",
            f"sum{over} once, of parts that differ from rank to rank; look at {name} for what else multiplies",
        )
    return (
        f"{name} averages{over} the terms of a sum, or has one of several equal contributions, or divides by a number "
        "that changes when it is sharded",
        f"sum{over} and do not divide; look at {name} for what else divides",
    )


def times_in_backward(name: str, ratio: Fraction, axes: str) -> Advice:
    """Return cause and fix of a gradient that is multiplied by a number in a module's backward."""
    over = f" over {axes}" if axes else ""
    if ratio >= 1:
        return (
            f"In the backward of {name} equal gradients are summed{over} once more: the backward of "
            "torch.distributed.nn.functional.all_reduce is a sum over ranks too, which is one too many where every "
            "rank computes the same loss; or the gradient is scaled there",
            f"in {name}, use RowwiseParallel or a torch.autograd.Function that all_reduces in forward and returns the "
            "gradient as it is in backward",
        )
    return (
        f"In the backward of {name} a gradient is averaged{over} that should be summed, or divided once too often",
        f"look at what {name} does to gradients: hooks, torch.autograd.Functions, the backward of its collectives",
    )
