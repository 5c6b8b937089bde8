"""Go through a step: every gradient, output and logged value, each by the first rule that explains it.

A wrong output makes the loss wrong, a wrong loss the gradients. Results that follow from others are counted: in the
finding that they follow from, or as not checked.

Of a captured job's step, and one that draws random numbers, only copies can be compared: they have no reference. Copies
are what placements claim alike, or what the ids of the weight show. Plain tensors are copies where their weights are:
bit by bit the same on these ranks, and not all one number, which shards can be too.

All ranks are seeded alike before a step in training mode. Ranks along an axis that does not split the batch and that
hold copies of an output or a gradient must have drawn the same numbers for it. Those that hold different parts of an
activation must drop different elements (`identical-shards`): an axis splits it if every rank along it has other
values, and the whole is as many times as large. Masks that are equal in a second step, too, in which all ranks are
seeded differently, were seeded by the model.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.infer.layout import axes_of_change
from shardviz.check.report import NotChecked, Place, unhidden
from shardviz.check.step.comparison import Compared, apart_text, compared, kind_of, wrapped_over, wrappers_of
from shardviz.check.step.contradictions import (
    check_absent_gradients,
    check_held_back,
    check_no_gradient,
    check_raised,
    check_result_shape,
)
from shardviz.check.step.evidence import Evidence, is_right
from shardviz.check.step.forward.explain import laid_out_by_value, why_unplaced, with_parts_joined, with_reason
from shardviz.check.step.forward.stages import of_another_stage
from shardviz.check.step.rules.all_gradients import check_norm, of_all_gradients
from shardviz.check.step.rules.factors import check_scale, check_unreduced, check_whole_sequence
from shardviz.check.step.rules.losses import check_function, check_mean_of_means, check_scalar, check_statistic, is_loss
from shardviz.check.step.rules.narrow import check_narrow_sums, check_small_factor, other_scale
from shardviz.check.step.rules.own_scales import check_local_row
from shardviz.check.step.rules.summands import of_loss_terms, of_micro_batches, reduced_as_others
from shardviz.check.step.rules.terms import (
    check_order,
    check_other_layers,
    check_related,
    check_segments,
    check_terms,
    check_tied,
    check_zero_slices,
)
from shardviz.check.step.trace.causes import with_term_of_some_ranks
from shardviz.check.step.trace.naming import placed, with_cut
from shardviz.check.values.copies import Groups, copies_of, with_copies
from shardviz.dump.records.step import WHOLE_LOSS, MaskRecord
from shardviz.explain.finding import Finding
from shardviz.explain.step.losses import ScalarNotReduced
from shardviz.explain.step.sums import GradientNotReduced, OutputCopiesDiffer
from shardviz.explain.step.whole_step import DifferentMasks, IdenticalMasks
from shardviz.explain.templates import number
from shardviz.layout.notation import write
from shardviz.relate.measures import ratio_of
from shardviz.relate.tolerance import EPSILON, ROUNDINGS_OF_ONE, ROUNDINGS_OF_SUM, SINGLE
from shardviz.relate.values import farthest, finite_magnitude, magnitude
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.comparison import Found
    from shardviz.dump.dump import Dump, Shard, Tensor
    from shardviz.explain.cause import Cause
    from shardviz.layout.mesh import Mesh

    Rule = Callable[[Evidence, Compared], Finding | None]
    Values = dict[int, NDArray[np.float64]]
    Row = dict[int, MaskRecord]

NO_REFERENCE = "the step against an unsharded model's: a captured job has none; copies on its ranks were compared"
CAUSES: Mapping[str, Callable[[tuple[str, ...]], Cause]] = {
    "grad": lambda axes: GradientNotReduced(axes, is_captured=True),
    "output": lambda axes: OutputCopiesDiffer(_joined(axes)),
    "scalar": lambda axes: ScalarNotReduced(_joined(axes)),
}
"""What is wrong if copies differ along some axes, by role."""


def check_captured(dump: Dump) -> Iterator[Finding | NotChecked]:
    """Yield what differs between the ranks of a captured step."""
    yield NotChecked("", NO_REFERENCE, "step")
    yield from check_absent_gradients(dump)
    yield from copies_apart(dump, CAUSES)


def copies_apart(dump: Dump, roles: Collection[str]) -> Iterator[Finding]:
    """Yield the results of some roles whose copies differ between ranks."""
    for tensor in dump.at("step"):
        for name in tensor.names if tensor.role in roles else ():
            for group in _copies_in(dump, tensor, name):
                if (finding := _copies_compared(dump, tensor, name, group)) is not None:
                    yield finding
                    break


def _copies_in(dump: Dump, tensor: Tensor, name: str) -> Groups:
    """Return the groups of shards that must be equal; none if nothing says so."""
    groups = copies_of(tensor, dump.stamped.get(name))
    if tensor.role != "grad" or tensor.claimed is not None or name in dump.stamped:
        return [group for group in groups if len(group) > 1 and (tensor.claimed is not None or tensor.role == "grad")]
    weight = dump.find("initial", "param", name)
    if weight is None:
        return []
    index = weight.index(name)
    return [group for group in groups if len(group) > 1 and _are_copies(weight, index, group)]


def _are_copies(weight: Tensor, index: int, group: list[Shard]) -> bool:
    shards = [weight.shards[shard.rank] for shard in group if shard.rank in weight.shards]
    constant = any(shard.body.constant for shard in shards)
    return len(shards) == len(group) and not constant and len({shard.digest(index) for shard in shards}) == 1


def _copies_compared(dump: Dump, tensor: Tensor, name: str, group: list[Shard]) -> Finding | None:
    """Return the finding if copies are farther apart than rounding explains."""
    index = tensor.index(name)
    if len({shard.digest(index) for shard in group}) == 1:
        return None
    values = {shard.rank: np.asarray(dump.values(shard, name), np.float64) for shard in group}
    first = group[0].rank
    apart = {rank: farthest(held, values[first]) for rank, held in values.items()}
    largest = max(map(finite_magnitude, values.values()))
    dtype = "float32" if tensor.role == "scalar" else group[0].body.dtype
    epsilon = EPSILON.get(dtype, EPSILON["float32"])
    allowed = (ROUNDINGS_OF_ONE * epsilon + ROUNDINGS_OF_SUM * min(epsilon, EPSILON["float32"])) * largest
    wrong = [rank for rank, by in apart.items() if not by <= allowed]
    if not wrong or all(np.array_equal(held, values[first], equal_nan=True) for held in values.values()):
        return None
    return _differing(dump, tensor, name, values, (first, max(wrong, key=lambda rank: apart[rank])))


def _differing(dump: Dump, tensor: Tensor, name: str, values: Values, pair: tuple[int, int]) -> Finding:
    low, high = pair
    apart = apart_text(low, high, farthest(values[low], values[high]))
    mesh = dump.files.mesh
    contents = {mesh.coord_of(at): own.tobytes() for at, own in values.items() if at in mesh}
    differing = tuple(axes_of_change(mesh, contents))
    axes = _joined(differing)
    summary = f"copies of its {tensor.role} differ along {axes}: {apart}"
    if tensor.role == "scalar":
        logged = dict.fromkeys(number(float(own.sum())) for own in values.values())
        summary = f"ranks log {listed(logged, MAX_LISTED)}"
    elif tensor.role == "grad":
        summary = f"the gradient differs along {axes}: {apart}"
    cause = CAUSES[tensor.role](differing)
    if tensor.role == "grad" and dump.files.run.probe:  # kept when the step had ended
        cause = GradientNotReduced(differing, wrapper=wrapped_over(wrappers_of(dump, low, name), mesh, low, differing))
    finding = cause.finding(
        name,
        tuple(sorted(values)),
        summary,
        claimed=write(tensor.claimed, equal=True) if tensor.claimed and tensor.role != "scalar" else "",
        held=f"different values along {axes}",
    )
    return with_copies(finding, dump, tensor)


def _joined(axes: tuple[str, ...]) -> str:
    return " and ".join(axes) or "the ranks"


def check_training(dump: Dump) -> Iterator[Finding]:
    """Yield the first of output, loss and gradients whose copies differ after a step in training mode."""
    for role in ("output", "scalar", "grad"):  # causes before what is computed from them
        in_eval = {result.name: result for result in compared(dump, (role,))}
        training = (result for result in compared(dump, (role,), at="training") if not result.incomparable)
        differing = (result for result in training if result.copies_differ_along)
        apart = [result for result in differing if _has_equal_copies(in_eval.get(result.name))]
        if apart:
            finding, tensor = _in_training(apart[0], len(apart) - 1), dump.find("training", role, apart[0].name)
            yield with_copies(finding, dump, tensor) if tensor is not None else finding
            return


def _has_equal_copies(result: Compared | None) -> bool:
    """Whether copies agreed in `eval()`: else another finding names the cause."""
    return result is not None and not result.incomparable and not result.copies_differ_along


def _in_training(comparison: Compared, others: int) -> Finding:
    along = " and ".join(comparison.copies_differ_along)
    low, high, worst = max(comparison.pairs_of_copies, key=lambda pair: pair[2])
    more = f"; so do those of {others} other{'s' * (others > 1)}" if others else ""
    return comparison.finding(
        DifferentMasks(along),
        f"copies of the {comparison.what} differ along {along} in training mode, which draws random numbers: "
        f"{apart_text(low, high, worst)}; in eval() they are equal{more}",
        tuple(sorted(comparison.values)),
        held=f"different values along {along}",
    )


LEAST_BITS = 64
"""Masks of fewer random bits than this may be equal by chance."""

OF_THE_JOB = (
    "whether ranks draw different dropout masks for different parts of an activation: the model leaves that to the "
    "seeds of the job, and a probe seeds all ranks itself"
)


def check_masks(dump: Dump) -> Iterator[Finding | NotChecked]:
    """Yield masks that are equal along axes that split their tensor, and notes if seeds decide."""
    of_ranks = {rank: record.masks for rank, record in dump.files.ranks.items()}
    count = min(map(len, of_ranks.values()), default=0)
    if not count or len(set(map(len, of_ranks.values()))) != 1 or dump.files.missing_ranks:
        return
    rows = [{rank: masks[index] for rank, masks in of_ranks.items()} for index in range(count)]
    splitting = [_splitting(dump.files.mesh, row) for row in rows]
    pairs = [(row, axis) for row, axes in zip(rows, splitting, strict=True) for axis in axes]
    equal = [(row, axis) for row, axis in pairs if _are_equal(dump.files.mesh, row, axis)]
    seeded = [(row, axis) for row, axis in equal if _are_equal(dump.files.mesh, row, axis, again=True)]
    if seeded:
        num_seeded = len({id(row) for row, _ in seeded})
        yield _of_masks(dump, num_seeded, count, seeded)
    elif equal:
        yield NotChecked("", OF_THE_JOB, "step")


def _splitting(mesh: Mesh, row: Row) -> tuple[str, ...]:
    """Return the axes that split what a mask is laid on; none if that is not known."""
    first = next(iter(row.values()))
    if any((mask.size, mask.num_kept == mask.size) != (first.size, False) for mask in row.values()):
        return ()
    axes = tuple(
        axis
        for axis in mesh.long_axes
        if all(len({row[rank].given for rank in group}) == len(group) for group in mesh.groups(axis))
    )
    return axes if first.whole == first.size * mesh.size_over(axes) else ()


def _are_equal(mesh: Mesh, row: Row, axis: str, *, again: bool = False) -> bool:
    groups = [[row[rank] for rank in group] for group in mesh.groups(axis)]
    alike = all(len({mask.again if again else mask.mask for mask in group}) == 1 for group in groups)
    return alike and all(_bits(group[0]) >= LEAST_BITS for group in groups)


def _bits(mask: MaskRecord) -> float:
    """Return how unlikely it is that another mask drawn like this one is equal, as a power of 2."""
    fraction = mask.num_kept / mask.size
    return -mask.size * math.log2(fraction**2 + (1 - fraction) ** 2)


def _of_masks(dump: Dump, num_equal: int, count: int, seeded: list[tuple[Row, str]]) -> Finding:
    along = " and ".join(dict.fromkeys(axis for _, axis in seeded))
    mask = next(iter(seeded[0][0].values()))
    return IdenticalMasks(along).finding(
        "",
        tuple(dump.files.ranks),
        f"ranks along {along} drop the same elements of different parts of an activation, in {num_equal} of {count} "
        f"dropout masks: {mask.size - mask.num_kept:,} of {mask.size:,} elements on every rank",
        held=f"equal masks along {along}",
    )


MAX_LISTED = 4


def check_step(dump: Dump, earlier: Sequence[Finding], told_right: dict[Place, bool]) -> Iterator[Finding | NotChecked]:
    """Yield what a step shows if the weights that it started from are right.

    Args:
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
    pairs = reduced_as_others([(result, finding) for result, finding in results if isinstance(finding, Finding)])
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
    for output in filter(is_right, evidence.outputs):
        dtype, far = coarse.get(output.rounding.epsilon), output.farthest
        if dtype is None or far <= SINGLE * magnitude(output.wanted):
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
        named = with_term_of_some_ranks(evidence, with_reason(evidence, comparison, finding))
        is_after_right = evidence.outputs_are_right and (comparison.role != "grad" or _has_right_loss(evidence))
        is_first = comparison.role == "output" or is_after_right
        yield (check_related(comparison) if named.generic and is_first else None) or named


def _has_right_loss(evidence: Evidence) -> bool:
    """Whether the loss is right or not compared: gradients of a wrong loss show nothing new."""
    losses = [result for result in evidence.results if (result.role, result.name) == ("scalar", "loss")]
    return not losses or evidence.loss_is_right


def _check_scale(evidence: Evidence, result: Compared) -> Finding | None:
    part = evidence.parts.part_with(result) if result.role == "grad" else None
    parted = evidence.parted_along(result.name) if result.role == "grad" else ()
    return check_scale(result, evidence.batch, part, is_mean=is_loss(evidence, result), parted=parted)


def _of_result(rule: Callable[[Compared], Finding | None]) -> Rule:
    """Return the rule for one that looks at nothing but the result."""
    return lambda _evidence, result: rule(result)


RULES: Mapping[str, Sequence[Rule]] = {
    "output": (check_unreduced, _of_result(check_order), _check_scale),
    "scalar": (check_statistic, _of_result(check_scalar), check_norm, check_function, _check_scale),
    "grad": (
        *(check_held_back, check_tied, check_other_layers, check_unreduced),
        *(check_segments, _of_result(check_order), _of_result(check_zero_slices), _of_result(check_local_row)),
        *(check_whole_sequence, _check_scale),
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
