"""Factors of what a module sends back in backward, which the gradients of its own weights tell.

Gradients of activations are compared relative to one scale, as a loss scale gives them one. It is the backward of the
module that returns the loss that multiplies them, and not the loss, if the gradients of its own weights are right.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.step.rules.factors import size_clause, size_in_words
from shardviz.check.step.trace.causes import times_in_backward
from shardviz.explain.templates import module_name, times_text
from shardviz.groups import the_only
from shardviz.relate.factors import MOST_RATIO, ratio_near
from shardviz.relate.measures import ratio_of
from shardviz.relate.tolerance import SINGLE
from shardviz.text import counted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from fractions import Fraction

    from shardviz.check.step.comparison import Compared, Found
    from shardviz.check.step.evidence import Evidence
    from shardviz.check.step.trace.calls import Call
    from shardviz.check.step.trace.divergence import Divergence
    from shardviz.explain.finding import Finding


def times_by_weights(first: Divergence, pairs: Sequence[Found]) -> Finding | None:
    """Return that a module multiplies a gradient in backward, if its own weights' gradients say by what."""
    factors = [(result, ratio_of(result)) for result, _ in pairs if _is_weight_of(first, result)]
    ratio = the_only({ratio for _, ratio in factors})
    if first.direction != "backward" or ratio is None or ratio == 1:
        return None
    comparison = factors[0][0]
    summary = f"the gradient of {comparison.name} is {times_text(ratio)} {comparison.whose}"
    return times_in_backward(first.module, ratio, "").finding(comparison.name, comparison.wrong, summary)


def _is_weight_of(first: Divergence, result: Compared) -> bool:
    return result.role == "grad" and result.name.rpartition(".")[0] == first.module


def scaled_by_last(evidence: Evidence, pairs: Sequence[Found]) -> list[Found]:
    """Return findings, those of gradients that the last module multiplies in one."""
    last = _last(evidence)
    ratio = _sent_back(evidence, last) if last is not None else None
    if last is None or ratio is None or not _has_right_weights(evidence, last):
        return list(pairs)
    multiplied = [pair for pair in pairs if pair[0].role == "grad" and ratio_of(pair[0]) == ratio]
    others = [pair for pair in pairs if not any(pair is one for one in multiplied)]
    if not multiplied or any(pair[0].name.rpartition(".")[0] == last.module for pair in multiplied):
        return list(pairs)
    comparison, nearest = multiplied[-1]
    name, size = module_name(last.module), size_in_words(evidence.dump.files.mesh, ratio)
    rest = f", and {counted(len(multiplied) - 1, 'other')}" if len(multiplied) > 1 else ""
    sentence = (
        f"in backward {name} is the first wrong module: what it sends back is {times_text(ratio)} the unsharded "
        f"model's{size_clause(ratio, size)}, and the gradients of its own weights are right; so the gradient of "
        f"{comparison.name} is wrong{rest}"
    )
    placed = replace(nearest, sentence=sentence, details=(), module=last.module, generic=False)
    finding = replace(placed, others=tuple(finding for _, finding in multiplied[:-1]))
    return [*others, (comparison, finding.because(times_in_backward(last.module, ratio, size)))]


def _last(evidence: Evidence) -> Call | None:
    """Return the step's last call if it sends a gradient back, and gets none that could be compared."""
    inside = [call for call in evidence.calls.in_order if call.module]
    last = inside[-1] if inside else None
    is_due = last is not None and last.is_good("gradient of input") and last.state("gradient of output") is None
    return last if is_due else None


def _sent_back(evidence: Evidence, last: Call) -> Fraction | None:
    """Return what ranks' gradients of activations are the unsharded model's times; None if they see other rows."""
    batch = evidence.batch
    if batch is None or any(batch.values()) or not evidence.loss_is_right:
        return None
    scales = {point.scale for own in last.points.values() for point in own if point.what == "gradient of input"}
    scale = the_only(scales)
    ratio = ratio_near(scale, MOST_RATIO, SINGLE) if scale is not None else None
    return None if ratio == 1 else ratio


def _has_right_weights(evidence: Evidence, last: Call) -> bool:
    own = [one for name, one in evidence.gradients.items() if name.rpartition(".")[0] == last.module]
    return any(one.wanted.any() and not one.wrong and not one.incomparable for one in own)
