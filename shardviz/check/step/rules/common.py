"""`wrong-scale` of all gradients at once: one factor for every gradient, beside a loss that is right.

No reduction of a single tensor does that unless all are reduced alike; what does is a backward of another loss than the
one that is returned: a loss scale, micro-batches whose losses are not divided. Clipping within the step multiplies all
gradients by one number, too. It is no error where the norm that is left is the round number that was asked for.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.finding import Finding, NotChecked
from shardviz.check.step.rules.factors import advice, batch_axes
from shardviz.check.step.rules.norms import norms_of_parts, total
from shardviz.check.step.rules.scale import LEAST_SCALE, RATIO_PRECISION, overs, times_text
from shardviz.check.step.words import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.check.step.compared import Compared
    from shardviz.check.step.evidence import Evidence

    Found = tuple[Compared, Finding]

ROUND = 1e-9
"""How near a norm must be to a number of two digits to be one that was asked for, relative to it."""

CLIPPED = "the size of the gradients: the step clips them to a norm of"
CLIP_EPSILON = 1e-6
"""What torch.nn.utils.clip_grad_norm_ adds to the norm that it divides by."""


def told_together(evidence: Evidence, found: Sequence[Found]) -> tuple[list[Found], list[Finding | NotChecked]]:
    """Return what is left of a step's findings, and what is said of all gradients together in place of the others."""
    gradients = [one for one in evidence.gradients.values() if np.any(one.wanted) or one.wrong]
    factor = _factor(gradients) if evidence.loss_is_right else None
    if factor is None:
        return list(found), []
    rest = [(one, finding) for one, finding in found if one.role != "grad"]
    clipped = _clipped_to(evidence, gradients, factor)
    if not clipped:
        return rest, [_finding(evidence, gradients, factor)]
    why = f"{CLIPPED} {number(clipped)}, and the unsharded step does not; they are right but for the factor "
    why += f"{number(factor)}; clip in optimizer(model, mesh) to have it compared"
    return [pair for pair in rest if not _is_clipped(pair[0], factor)], [NotChecked("", why, "step")]


def is_clipping(result: Finding | NotChecked) -> bool:
    """Whether a result says that the step clips, so that what an optimizer makes of its gradients is another thing."""
    return isinstance(result, NotChecked) and result.why.startswith(CLIPPED)


def _factor(gradients: Sequence[Compared]) -> float | None:
    """Return the number that every rank's part of every gradient is multiplied by; None where there is none."""
    pairs = [(values, one.wanted_of(rank)) for one in gradients for rank, values in one.reduced.items()]
    square = sum(float(np.sum(wanted**2)) for _, wanted in pairs)
    if not square or not all(np.all(np.isfinite(values)) for values, _ in pairs):
        return None
    factor = sum(float(np.sum(values * wanted)) for values, wanted in pairs) / square
    if not factor or abs(factor - 1) < LEAST_SCALE or sum(np.count_nonzero(wanted) for _, wanted in pairs) < 2:
        return None
    alike = (
        one.near(values, factor * one.wanted_of(rank), scale=abs(factor))
        for one in gradients
        for rank, values in one.reduced.items()
    )
    return factor if all(alike) else None


def _clipped_to(evidence: Evidence, gradients: Sequence[Compared], factor: float) -> float:
    """Return the round norm that gradients were clipped to; 0 where they were not."""
    if not 0 < factor < 1:
        return 0.0
    distinct = [one for one in gradients if not any(name < one.name for name in evidence.tied_to(one.name))]
    norms = [total(one.wanted for one in some) for some in (gradients, distinct)]
    return next((found for norm in norms if (found := _round(factor, norm, _near(gradients)))), 0.0)


def _near(gradients: Sequence[Compared]) -> float:
    return max(ROUND, 16 * max(one.rounding.epsilon for one in gradients))


def _round(factor: float, norm: float, near: float) -> float:
    """Return the number of two digits that a norm is after it was multiplied; 0 where it is none."""
    for left in (factor * norm, factor * (norm + CLIP_EPSILON)):
        asked = float(f"{left:.1e}")
        if near < RATIO_PRECISION * 10 and left and abs(left - asked) <= near * asked:
            return asked
    return 0.0


def _is_clipped(one: Compared, factor: float) -> bool:
    """Whether a logged value is the norm of clipped gradients, or another number that is off by their factor."""
    return one.role == "scalar" and all(one.near(values, factor * one.wanted) for values in one.reduced.values())


def _finding(evidence: Evidence, gradients: Sequence[Compared], factor: float) -> Finding:
    ratio = Fraction(factor).limit_denominator(max(gradients[0].mesh.size, 1))
    near = max(RATIO_PRECISION, gradients[0].rounding.epsilon)
    is_ratio = bool(ratio) and abs(factor - ratio) <= near * max(1.0, abs(factor))
    found = overs(gradients, ratio, batch_axes(evidence.dump)) if is_ratio else []
    size = " or ".join(over.text for over in found)
    which = f", the size of {size}" if size and ratio > 1 else f", 1 over {size}" if size else ""
    times = times_text(ratio) if is_ratio else f"{number(factor)} times"
    alone = len(gradients) == 1
    cause, fix = _advice(gradients, factor, times)
    if found:
        of_axes = advice(ratio, found)
        cause, fix = f"{of_axes[0]}; or: {cause[0].lower()}{cause[1:]}", f"{of_axes[1]}; or {fix}"
    return Finding(
        "wrong-scale",
        "error",
        gradients[0].name if alone else "",
        tuple(sorted({rank for one in gradients for rank in one.wrong})),
        f"{'the gradient is' if alone else f'all {len(gradients)} gradients are'} {times} the unsharded model's{which}",
        details=("the loss is right",),
        cause=cause,
        fix=fix,
        refs=("gpt-neox#1259",),
    )


def _advice(gradients: Sequence[Compared], factor: float, times: str) -> tuple[str, str]:
    """Return the advice where no axis tells what the factor comes of."""
    norm, left = _norm_of_parts(gradients) if 0 < factor < 1 else ("", 0.0)
    if left:
        return (
            f"The gradients were clipped to {number(left)} by {norm}, which is not the norm of all gradients",
            "clip by torch.nn.utils.clip_grad_norm_ on the DTensors, or all_reduce the sum of squares, each part once, "
            "before the root",
        )
    factors = "a loss scale that was never taken out of the gradients, a weight of the loss"
    if factor > 1:
        factors += ", or micro-batches whose losses were not divided by their number"
    else:
        factors += ", or a division by the number of micro-batches that was made twice"
    return (
        f"Backward ran on another loss than the one that is returned, {times} it: {factors}",
        "call backward() on the loss that is returned, divided by the number of micro-batches; where a loss scale is "
        "meant, divide every gradient by it before the optimizer's step",
    )


def _norm_of_parts(gradients: Sequence[Compared]) -> tuple[str, float]:
    """Return a norm of parts that is a round number once gradients are clipped; empty where there is none."""
    for what, norm in norms_of_parts(list(gradients)):
        left = _round(1.0, norm, _near(gradients))
        if left and not math.isclose(norm, total(one.wanted for one in gradients)):
            return what, left
    return "", 0.0
