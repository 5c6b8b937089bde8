"""Go through a step: every gradient, output and logged value, each by the first rule that explains it.

A wrong output makes the loss wrong, a wrong loss the gradients. Results that follow from others are counted: in the
finding that they follow from, or as not checked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.report import NotChecked, Place, unhidden
from shardviz.check.step.comparison import compared, kind_of, number
from shardviz.check.step.contradictions import check_held_back, check_no_gradient, check_raised, check_result_shape
from shardviz.check.step.evidence import Evidence, is_right
from shardviz.check.step.forward.explain import laid_out_by_value, why_unplaced, with_parts_joined, with_reason
from shardviz.check.step.forward.stages import of_another_stage
from shardviz.check.step.rules.all_gradients import check_norm, of_all_gradients
from shardviz.check.step.rules.factors import check_scale
from shardviz.check.step.rules.losses import check_function, check_mean_of_means, check_scalar, is_loss
from shardviz.check.step.rules.narrow import check_narrow_sums, check_small_factor, other_scale
from shardviz.check.step.rules.reductions import check_other_layers, check_tied, check_unreduced
from shardviz.check.step.rules.summands import of_loss_terms, of_micro_batches
from shardviz.check.step.rules.terms import check_order, check_related, check_terms, check_zero_slices
from shardviz.check.step.trace.naming import placed, with_cut
from shardviz.check.step.without_reference import check_captured, check_masks, check_training, copies_apart
from shardviz.dump.records.step import WHOLE_LOSS
from shardviz.explain.finding import Finding
from shardviz.relate.measures import ratio_of
from shardviz.relate.tolerance import EPSILON, SINGLE
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from shardviz.check.step.comparison import Compared
    from shardviz.dump.dump import Dump

    Rule = Callable[[Evidence, Compared], Finding | None]

Found = tuple["Compared", Finding]

MAX_LISTED = 4


def check_step(dump: Dump, earlier: Sequence[Finding], told_right: dict[Place, bool]) -> Iterator[Finding | NotChecked]:
    """Yield what a step shows if the weights that it started from are right.

    Args:
        dump: The dump.
        earlier: What was found of the weights: numbers computed from wrong weights show nothing new.
        told_right: Gets each result that was compared, and whether it is right (`Report.compared`).
    """
    yield from check_raised(dump)
    steps = dump.at("step")
    if not steps:
        return
    wrong = [finding for finding in earlier if finding.severity == "error"]
    if wrong:
        yield NotChecked("", f"the step: its numbers come from weights that are wrong ({kind_of(wrong[0])})", "step")
        return
    if not dump.at("reference") and not dump.files.run.probe and 0 in dump.files.ranks:
        yield from check_captured(dump)
        return
    if not dump.at("reference"):
        yield NotChecked("", "the step: rank 0, which has the unsharded model's, is missing", "step")
        return
    if dump.find("reference", "scalar", "loss") is None:  # the step's loss is its own: only copies can be compared
        yield from copies_apart(dump, ("grad", "scalar"))
    else:
        roles = ("grad", "output", "scalar")
        compared_names = [(tensor.role, name) for tensor in steps for name in tensor.names if tensor.role in roles]
        missing = [name for role, name in compared_names if dump.find("reference", role, name) is None]
        why = "the unsharded model's step has no tensor of this name"
        yield from (NotChecked(name, why, "step") for name in missing)
    yield from _not_logged(dump)
    evidence = Evidence(dump, laid_out_by_value(tuple(compared(dump)), dump))
    absent = list(check_no_gradient(evidence))
    yield from check_mean_of_means(evidence)
    yield from check_training(dump)
    yield from check_masks(dump)
    yield from check_small_factor(evidence)
    yield from check_narrow_sums(evidence)
    yield from _lost_in_rounding([result for result in evidence.results if result.role == "grad"])
    yield from _within_eight_bits(evidence)
    results = [
        (result, seen_in(result, finding)) for result in evidence.results for finding in explained(evidence, result)
    ]
    not_compared = {id(result) for result, finding in results if isinstance(finding, NotChecked)}
    for comparison in evidence.results:
        if id(comparison) not in not_compared:
            told_right[Place("step", comparison.role, comparison.name)] = comparison.is_told_right
    yield from (finding for _, finding in results if isinstance(finding, NotChecked))
    pairs = [(result, finding) for result, finding in results if isinstance(finding, Finding)]
    for rule in (of_all_gradients, of_micro_batches, of_loss_terms):
        remaining, of_several = rule(evidence, pairs)
        yield from _with_folded(of_several, pairs, remaining)
        pairs = remaining
    absent, pairs = with_cut(evidence, absent, placed(evidence, pairs))
    yield from absent
    yield from without_consequences(pairs)


def _with_folded(
    of_several: Iterable[Finding | NotChecked], pairs: Sequence[Found], remaining: Sequence[Found]
) -> Iterator[Finding | NotChecked]:
    """Yield findings of several results together; they count those whose own findings do not remain."""
    kept = {id(finding) for _, finding in remaining}
    folded = [finding for _, finding in pairs if id(finding) not in kept]
    for outcome in of_several:
        names = outcome.tensors if isinstance(outcome, Finding) else ()
        others = tuple(finding for finding in folded if finding.tensor not in names)
        yield replace(outcome, others=others) if isinstance(outcome, Finding) else outcome


def seen_in(result: Compared, finding: Finding | NotChecked) -> Finding | NotChecked:
    """Give a finding the result that it is about, unless its rule knows more of it."""
    return finding.seen_in(result) if isinstance(finding, Finding) and not finding.pairs else finding


def _not_logged(dump: Dump) -> Iterator[NotChecked]:
    """Yield the values that the unsharded model's step logs and no rank does."""
    logged = {WHOLE_LOSS, *dump.by_name("step", "scalar")}
    why = "the unsharded model's step logs it, and no rank of the sharded step does"
    yield from (NotChecked(name, why, "step") for name in dump.by_name("reference", "scalar") if name not in logged)


def _lost_in_rounding(gradients: Sequence[Compared]) -> Iterator[NotChecked]:
    """Say how many gradients are so small that a wrong factor can't show: beside others, or beside their own terms."""
    dtypes = {EPSILON[dtype]: dtype for dtype in EPSILON}
    lost = [gradient for gradient in gradients if gradient.is_lost]
    lost = [one for one in lost if one.rounding.epsilon > EPSILON["float32"] or (one.rounding.is_double and one.noise)]
    if lost:
        allowed = f"rounding to {dtypes[lost[0].rounding.epsilon]} allows {number(lost[0].tolerance)}"
        yield NotChecked("", f"{len(lost)} of {len(gradients)} gradients: {allowed}, and they are no larger", "step")


def _within_eight_bits(evidence: Evidence) -> Iterator[Finding | NotChecked]:
    """Say of outputs that differ, and not by more than rounding to eight bits allows, that a scale may be wrong."""
    coarse = {EPSILON[dtype]: dtype for dtype in EPSILON if EPSILON[dtype] > EPSILON["bfloat16"] and "float8" in dtype}
    for output in (result for result in evidence.results if result.role == "output" and is_right(result)):
        dtype, far = coarse.get(output.rounding.epsilon), output.farthest
        if dtype is None or far <= SINGLE * float(np.max(np.abs(output.wanted), initial=0.0)):
            continue
        why = f"differs by up to {number(far)}, and rounding to {dtype} allows {number(output.tolerance)}"
        if seen := other_scale(evidence):
            cause, scaled = seen
            text = f"the {output.role} {why}; before the cast {scaled}"
            yield output.finding(cause, text, tuple(sorted(output.reduced))).seen_in(output)
        else:
            text = f"the {output.role}: it {why}: a wrong scale may be within that"
            yield NotChecked(output.name, text, "step")


def explained(evidence: Evidence, comparison: Compared) -> Iterator[Finding | NotChecked]:
    """Yield the findings of the first rule that explains a result; nothing if it is right."""
    if why := why_unplaced(evidence, comparison):
        yield NotChecked(comparison.name, why, "step")
    elif shape := check_result_shape(comparison):
        yield with_parts_joined(evidence, comparison, shape)
    elif why := of_another_stage(evidence, comparison):
        yield NotChecked(comparison.name, why, "step")
    elif comparison.incomparable:
        yield NotChecked(comparison.name, f"its {comparison.role}: {comparison.incomparable}", "step")
    elif comparison.wrong:
        findings = (rule(evidence, comparison) for rule in RULES[comparison.role])
        finding = next(filter(None, findings), None) or check_terms(evidence, comparison)
        named = with_reason(evidence, comparison, finding)
        is_after_right = evidence.outputs_are_right and (comparison.role != "grad" or _has_right_loss(evidence))
        is_first = comparison.role == "output" or is_after_right
        yield (check_related(comparison) if named.generic and is_first else None) or named


def _has_right_loss(evidence: Evidence) -> bool:
    """Whether the loss is right or not compared: gradients of a wrong loss show nothing new."""
    losses = [result for result in evidence.results if (result.role, result.name) == ("scalar", "loss")]
    return not losses or evidence.loss_is_right


def _check_scale(evidence: Evidence, result: Compared) -> Finding | None:
    part = evidence.parts.part_with(result) if result.role == "grad" else None
    return check_scale(result, evidence.batch, part, is_mean=is_loss(evidence, result))


def _check_unreduced(evidence: Evidence, result: Compared) -> Finding | None:
    return check_unreduced(result, evidence)


def _of_result(rule: Callable[[Compared], Finding | None]) -> Rule:
    """Return the rule for one that looks at nothing but the result."""
    return lambda _evidence, result: rule(result)


RULES: Mapping[str, Sequence[Rule]] = {
    "output": (_check_unreduced, _of_result(check_order), _check_scale),
    "scalar": (_of_result(check_scalar), check_norm, check_function, _check_scale),
    "grad": (
        *(check_held_back, check_tied, check_other_layers, _check_unreduced),
        *(_of_result(check_order), _of_result(check_zero_slices), _check_scale),
    ),
}
"""The rules of each role, those that know most of the place first."""


def without_consequences(pairs: Sequence[Found]) -> Iterator[Finding | NotChecked]:
    """Yield the findings of a step that are not consequences of others among them."""
    outputs = [pair for pair in pairs if pair[0].role == "output"]
    if outputs:
        if len(outputs) < len(pairs):
            yield NotChecked("", "the step's loss and gradients: they are computed from a wrong output", "step")
        findings = [finding for _, finding in outputs]
        explained = [finding for finding in findings if not finding.generic]
        yield from explained
        yield from unhidden([finding for finding in findings if finding.generic], explained, anywhere=True)
        return
    remaining = _not_from_loss(pairs)
    left_out = len(pairs) - len(remaining)
    if left_out:
        why = f"{left_out} of the step's gradients that no rule explains: the loss is wrong, too"
        yield NotChecked("", why, "step")
    loss = next((pair for pair in remaining if pair[0].name == "loss" and pair[1].kind == "wrong-scale"), None)
    ratio = ratio_of(loss[0]) if loss is not None else None
    grads = [(result, finding) for result, finding in remaining if ratio and result.role == "grad"]
    alike = {id(finding): finding for result, finding in grads if ratio_of(result) == ratio}
    for comparison, finding in remaining:
        if alike and comparison.name == "loss":
            gradients = "is one gradient" if len(alike) == 1 else f"are {len(alike):,} gradients"
            yield replace(finding, sentence=f"{finding.sentence}, and so {gradients}", others=tuple(alike.values()))
        elif id(finding) not in alike:
            yield finding


def without_consequences_of_update(results: Iterable[Finding | NotChecked]) -> Iterator[Finding | NotChecked]:
    """Yield what is found after the optimizer's step and follows from nothing else that is found there."""
    results = list(results)
    remaining = unhidden(
        results, [result for result in results if isinstance(result, Finding) and not result.generic], anywhere=True
    )
    yield from remaining
    left_out = [result.tensor for result in results if result not in remaining]
    if left_out:
        why = f"{listed(left_out, MAX_LISTED)} after the optimizer's step"
        yield NotChecked("", f"{why}: differences may follow from the findings about others", "step")


def _not_from_loss(pairs: Sequence[Found]) -> list[Found]:
    """Return the pairs without the unexplained gradients that a wrong loss accounts for."""
    loss = [finding for result, finding in pairs if result.name == "loss"]
    remaining = unhidden([finding for result, finding in pairs if result.role == "grad"], loss, anywhere=True)
    return [pair for pair in pairs if pair[0].role != "grad" or pair[1] in remaining]
