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
from shardviz.check.step.rules.ratios.factors import advice, batch_axes
from shardviz.check.step.rules.ratios.norms import norms_of_parts, total
from shardviz.check.step.rules.ratios.scale import RATIO_PRECISION, overs, times_text
from shardviz.check.step.words import number, size_clause
from shardviz.explain.finding import Finding
from shardviz.text import continued

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.check.step.compared import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.check.step.rules.ratios.clipping import Multiplied

    Found = tuple[Compared, Finding]


def of_all_gradients(evidence: Evidence, found: Sequence[Found]) -> tuple[list[Found], list[Finding | NotChecked]]:
    """Return the findings left of a step, and one for all gradients together in place of the others."""
    all_alike = multiplied(evidence)
    if all_alike is None:
        return list(found), []
    rest = [(one, finding) for one, finding in found if one.role != "grad"]
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


def _is_clipped(one: Compared, factor: float) -> bool:
    """Whether a logged value is the norm of clipped gradients, or another number that is off by their factor."""
    return one.role == "scalar" and all(one.near(values, factor * one.wanted) for values in one.reduced.values())


def _finding(evidence: Evidence, gradients: Sequence[Compared], factor: float) -> Finding:
    ratio = Fraction(factor).limit_denominator(max(gradients[0].mesh.size, 1))
    near = max(RATIO_PRECISION, gradients[0].rounding.epsilon)
    is_ratio = bool(ratio) and abs(factor - ratio) <= near * max(1.0, abs(factor))
    found = overs(gradients, ratio, batch_axes(evidence.dump)) if is_ratio else []
    size = " or ".join(over.text for over in found)
    times = times_text(ratio) if is_ratio else f"{number(factor)} times"
    cause, fix = _advice(gradients, factor, times)
    if found:
        of_axes = advice(ratio, found, of_all=True)
        cause, fix = f"{of_axes[0]}; or: {continued(cause)}", f"{of_axes[1]}; or {fix}"
    sentence = f"the gradient is {times} the unsharded model's{size_clause(ratio, size)}"
    first = gradients[0]
    finding = Finding(
        "wrong-scale",
        "error",
        first.name,
        first.wrong,
        sentence,
        details=("the loss is right",),
        cause=cause,
        fix=fix,
        refs=("gpt-neox#1259",),
    )
    return finding if len(gradients) == 1 else _of_all(finding, gradients)


def _of_all(finding: Finding, gradients: Sequence[Compared]) -> Finding:
    """Return the finding of one gradient as that of the whole run, with each gradient's own in it."""
    return replace(
        finding,
        tensor="",
        ranks=tuple(sorted({rank for one in gradients for rank in one.wrong})),
        sentence=finding.sentence.replace("the gradient is", f"{_all(len(gradients))} gradients are", 1),
        members=tuple(replace(finding, tensor=one.name, ranks=one.wrong) for one in gradients),
    )


def _all(number: int) -> str:
    return "both" if number == 2 else f"all {number:,}"


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
        factors += ", or the number of micro-batches was divided by twice"
    return (
        f"Backward ran on another loss than the one that is returned, {times} it: {factors}",
        "call backward() on the loss that is returned, divided by the number of micro-batches; where a loss scale is "
        "meant, divide every gradient by it before the optimizer's step",
    )


def _norm_of_parts(gradients: Sequence[Compared]) -> tuple[str, float]:
    """Return a norm of parts that is a round number once gradients are clipped; empty where there is none."""
    for what, norm in norms_of_parts(list(gradients)):
        left = round_norm(1.0, norm, nearness(gradients))
        if left and not math.isclose(norm, total(one.wanted for one in gradients)):
            return what, left
    return "", 0.0
