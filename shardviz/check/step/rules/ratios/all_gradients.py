"""`wrong-scale` of all gradients at once: one factor for every gradient, beside a loss that is right.

No reduction of a single tensor does that unless all are reduced alike; what does is a backward of another loss than the
one that is returned: a loss scale, micro-batches whose losses are not divided. Clipping within the step multiplies all
gradients by one number, too (`clipping`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from shardviz.check.report import NotChecked
from shardviz.check.step.rules.ratios.clipping import multiplied, nearness, round_norm
from shardviz.check.step.rules.ratios.factors import batch_axes, cause_of_axes
from shardviz.check.step.rules.ratios.norms import norms_of_parts, total
from shardviz.check.step.rules.ratios.scale import overs
from shardviz.check.step.words import size_clause
from shardviz.explain.factors import ClippedByParts, ScaledBackward, ScaledForward
from shardviz.explain.templates import number, times_text
from shardviz.relate.factors import ratio_near
from shardviz.relate.tolerance import EXPLAINED, near_ratio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.check.step.compared import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.check.step.rules.ratios.clipping import Multiplied
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding

    Found = tuple[Compared, Finding]


def of_all_gradients(evidence: Evidence, pairs: Sequence[Found]) -> tuple[list[Found], list[Finding | NotChecked]]:
    """Return the findings left of a step, and one for all gradients together in place of the others."""
    all_alike = multiplied(evidence)
    if all_alike is None:
        return list(pairs), []
    rest = [(result, finding) for result, finding in pairs if result.role != "grad"]
    if not all_alike.clipped_to:
        return rest, [_finding(evidence, all_alike.gradients, all_alike.factor)]
    return [pair for pair in rest if not _is_clipped(pair[0], all_alike.factor)], [
        NotChecked("", _why(all_alike), "step")
    ]


def _why(clipped: Multiplied) -> str:
    return (
        f"the size of the gradients: the step clips them to a norm of {number(clipped.clipped_to)}, and the unsharded "
        f"step does not; they are right but for the factor {number(clipped.factor)}; clip by "
        "torch.nn.utils.clip_grad_norm_, after the last backward, or in optimizer(model, mesh) to have it compared"
    )


def _is_clipped(result: Compared, factor: float) -> bool:
    """Whether a logged value is the norm of clipped gradients, or another number that is off by their factor."""
    return result.role == "scalar" and all(
        result.near(values, factor * result.wanted) for values in result.reduced.values()
    )


def _finding(evidence: Evidence, gradients: Sequence[Compared], factor: float) -> Finding:
    ratio = ratio_near(factor, gradients[0].mesh.size, near_ratio(gradients[0].rounding.epsilon))
    axes = overs(gradients, ratio, batch_axes(evidence.dump)) if ratio else []
    size = " or ".join(over.text for over in axes)
    exact, is_in_loss = ratio or factor, _is_in_loss(evidence, factor)
    cause = _cause(gradients, factor, exact)
    if ratio and axes:
        cause = cause_of_axes(ratio, axes, of_all=True, or_else=cause)
    elif is_in_loss:
        cause = ScaledForward()
    first = gradients[0]
    finding = cause.finding(
        first.name,
        first.wrong,
        f"the gradient is {times_text(exact)} the unsharded model's{size_clause(ratio or Fraction(0), size)}",
        details=("the loss has this factor, too" if is_in_loss else "the loss is right",),
    ).seen_in(first)
    return finding if len(gradients) == 1 else _of_all(finding, gradients)


def _is_in_loss(evidence: Evidence, factor: float) -> bool:
    """Whether the loss is off by this factor, too, by no more than rounding allows: it was not called wrong."""
    losses = [one for one in evidence.results if (one.role, one.name) == ("scalar", "loss") and not one.incomparable]
    factors = [float(held) / float(one.wanted) for one in losses if one.wanted for held in one.reduced.values()]
    return bool(factors) and all(abs(own - factor) <= EXPLAINED * abs(factor - 1) for own in factors)


def _of_all(finding: Finding, gradients: Sequence[Compared]) -> Finding:
    """Return the finding of one gradient as that of the whole run, with each gradient's own in it."""
    every = "both" if len(gradients) == 2 else f"all {len(gradients):,}"
    return replace(
        finding,
        tensor="",
        ranks=tuple(sorted({rank for one in gradients for rank in one.wrong})),
        sentence=finding.sentence.replace("the gradient is", f"{every} gradients are", 1),
        pairs=tuple(gradients),
        members=tuple(replace(finding, tensor=one.name, ranks=one.wrong, pairs=(one,)) for one in gradients),
    )


def _cause(gradients: Sequence[Compared], factor: float, exact: Fraction | float) -> Cause:
    """Return the cause if no axis tells what the factor comes of."""
    norm, left = _norm_of_parts(gradients) if 0 < factor < 1 else ("", 0.0)
    return ClippedByParts(norm, left) if left else ScaledBackward(exact)


def _norm_of_parts(gradients: Sequence[Compared]) -> tuple[str, float]:
    """Return a norm of parts that is a round number once gradients are clipped; empty if there is none."""
    for what, norm in norms_of_parts(list(gradients)):
        left = round_norm(1.0, norm, nearness(gradients))
        if left and not math.isclose(norm, total(one.wanted for one in gradients)):
            return what, left
    return "", 0.0
