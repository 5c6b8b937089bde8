"""The findings of a step, with the first wrong module named in them, and what follows from it folded under it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.step.contradictions import is_due
from shardviz.check.step.forward.parts import exchange_in
from shardviz.check.step.trace.arguments import arguments_of
from shardviz.check.step.trace.calls import Call, Calls, is_within
from shardviz.check.step.trace.causes import cause_of, compared_at
from shardviz.check.step.trace.classes import cause_in_classes
from shardviz.check.step.trace.divergence import INPUT, OUTPUT, Divergence, pending_axis, unsummed_behind
from shardviz.check.step.trace.joins import check_joined, is_own_part_possible, nearest_comparison
from shardviz.check.step.trace.sent_back import scaled_by_last, times_by_weights
from shardviz.dump.records.trace import Place
from shardviz.explain.finding import Finding, Kind
from shardviz.explain.step.gradients import CutInModule, GraphCutBehind, UnsummedInputGradient, WrongOutside
from shardviz.explain.step.graphs import RanWithoutGraph, RecomputedOtherwise
from shardviz.explain.step.losses import PartialVocabularyLoss
from shardviz.explain.step.modules import (
    OverwrittenInput,
    UnexplainedBetweenModules,
    UnexplainedInput,
    UnexplainedModule,
    UnexplainedModuleBackward,
    UngatheredInput,
    UnsummedModule,
    UnusedWeight,
)
from shardviz.explain.step.scales import ClippedByParts
from shardviz.explain.step.sums import GradientNotReduced, UnreducedBesideVector
from shardviz.explain.step.whole_step import UnexplainedBackward, UnexplainedCopies
from shardviz.groups import the_only
from shardviz.text import counted, listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.check.report import NotChecked
    from shardviz.check.step.comparison import Found
    from shardviz.check.step.evidence import Evidence
    from shardviz.dump.dump import Dump
    from shardviz.dump.records.trace import ArgumentRecord
    from shardviz.explain.cause import Cause


MAX_ARGUMENTS = 3
"""So many arguments of a module that differ are listed."""


def placed(evidence: Evidence, pairs: Sequence[Found]) -> list[Found]:
    """Return a step's findings with the first wrong module named in them."""
    first = (evidence.divergence or _pending_behind(evidence, pairs)) if pairs else None
    if first is None:
        return _from_loss(evidence, scaled_by_last(evidence, pairs))
    outputs = [pair for pair in pairs if pair[0].role == "output"] or [pair for pair in pairs if _is_loss(pair)]
    if first.direction == "forward" and outputs:
        named = {id(finding): of_output(evidence, first, finding) for _, finding in outputs}
        return [(result, named.get(id(finding), finding)) for result, finding in pairs]
    # Layers ran in a different order: all gradients follow from that.
    if first.direction == "forward" and any(pair[0].name == "loss" and pair[1].kind == "misordered" for pair in pairs):
        return list(pairs)
    return _of_gradients(evidence, _behind_terms(evidence, first, pairs) or first, pairs)


def _behind_terms(evidence: Evidence, first: Divergence, pairs: Sequence[Found]) -> Divergence | None:
    """Return what sends back terms that nothing sums, inside a call that gives back a wrong gradient.

    A branch of the call, as an adapter, is given the terms, and its own weights lack the same sum. All layers may.
    """
    if first.way != "within":
        return None
    terms = {result.name for result, finding in pairs if _is_term_of(evidence, first, finding)}
    modules = {name.rpartition(".")[0] for name in terms}
    before = evidence.calls.by_module.get(first.before, ()) if first.before else ()
    start = max((call.order for call in before), default=0)
    inside = [one for one in evidence.calls.within(first.call) if one.module in modules and one.order > start]
    if not inside:
        return None
    return unsummed_behind(evidence.calls, inside[-1], pending_axis(inside[-1].point(OUTPUT, "pending")))


def _from_loss(evidence: Evidence, pairs: Sequence[Found]) -> list[Found]:
    """Return a step's findings; those of a loss, or of a gradient that it sends back, say what is wrong about it."""
    of_loss = [pair for pair in pairs if isinstance(pair[1].explanation, UnexplainedBackward | PartialVocabularyLoss)]
    cause = cause_in_classes(evidence) if of_loss else None
    if cause is None:
        return list(pairs)
    named = {id(finding): finding.because(cause) for _, finding in of_loss}
    return [(result, named.get(id(finding), finding)) for result, finding in pairs]


def _pending_behind(evidence: Evidence, pairs: Sequence[Found]) -> Divergence | None:
    """Return where a module's unreduced gradients come from: unsummed terms sent back to it.

    Weights whose gradients are summed after backward are right, so that these are not all the weights of their modules.
    """
    unreduced = {
        result.name: finding for result, finding in pairs if isinstance(finding.explanation, GradientNotReduced)
    }
    cause = the_only({finding.explanation for finding in unreduced.values()}) if evidence.loss_is_right else None
    if not isinstance(cause, GradientNotReduced) or cause.op != "SUM" or len(cause.axes) != 1 or cause.rest:
        return None
    modules = {name.rpartition(".")[0] for name in unreduced}
    calls = [call for call in evidence.calls.in_order if call.module in modules]
    names = {name for name in evidence.gradients if name.rpartition(".")[0] in modules}
    if names != set(unreduced) or {call.module for call in calls} != modules:
        return None
    places = [unsummed_behind(evidence.calls, call, cause.axes[0]) for call in calls]
    return places[-1] if all(places) else None


def with_cut(
    evidence: Evidence, absent: Sequence[Finding | NotChecked], pairs: Sequence[Found]
) -> tuple[list[Finding | NotChecked], list[Found]]:
    """Name in findings of absent gradients where the graph is cut; return the other pairs too."""
    first = evidence.divergence
    cut = next((one for one in absent if isinstance(one, Finding) and one.kind == "wrong-value"), None)
    if first is None or cut is None or first.way not in ("cut", "lost"):
        return list(absent), list(pairs)
    of_module = [pair for pair in pairs if pair[1].module == first.module and pair[0].role == "grad"]
    remaining = [pair for pair in pairs if pair not in of_module]
    details = (
        *cut.details,
        where(first, evidence.dump),
        *(detail for _, finding in of_module for detail in finding.details),
    )
    named = replace(cut, details=details, module=first.module).because(cause_at(evidence, first))
    names = {cut.tensor, *(other.tensor for other in cut.others)}
    wrong = (one for _, finding in of_module for one in (finding, *finding.others))
    others = (one for one in wrong if one.tensor not in names)
    named = replace(named, others=(*cut.others, *others))
    return [named if one is cut else one for one in absent], remaining


def _is_loss(pair: Found) -> bool:
    return pair[0].role == "scalar" and pair[0].name == "loss" and pair[1].generic


def of_output(evidence: Evidence, first: Divergence, finding: Finding) -> Finding:
    """Add to a wrong output's finding where it begins, and a cause if it has none."""
    if not finding.generic:
        read = _terms_read(evidence, first, finding)
        named = finding if read is None else finding.because(read)
        return named if named.module else replace(named, module=first.module)
    cause = _explained(evidence, first)
    if cause is None:
        kind = "unreduced-output" if first.way == "unsummed" else finding.kind
        placed = replace(
            finding, kind=kind, details=(*finding.details, where(first, evidence.dump)), module=first.module
        )
        return placed.because(cause_at(evidence, first))
    return replace(
        finding,
        kind=cause.kind,
        details=(*finding.details, where(first, evidence.dump), f"there {cause.summary}"),
        claimed=cause.claimed,
        held=cause.held,
        explanation=_terms_read(evidence, first, cause) or cause.explanation,
        refs=cause.refs,
        module=first.module,
        generic=False,
    )


def _terms_read(evidence: Evidence, first: Divergence, finding: Finding) -> UnsummedModule | None:
    """Return that a layer with a bias lacks no sum of its own, but reads terms: the sum is missing before it."""
    pending = first.call.point("input", "pending")
    if pending is None or not isinstance(finding.explanation, UnreducedBesideVector):
        return None
    before = (call for call in evidence.calls.in_order if call.order < first.call.order)
    terms = [call for call in before if call.state("output") == "pending"]
    axis, module = pending_axis(pending), terms[-1].module if terms else ""
    return UnsummedModule(module, first.module, axis) if axis == finding.explanation.axis else None


def _explained(evidence: Evidence, first: Divergence, pairs: Sequence[Found] = ()) -> Finding | None:
    """Return what a rule says of the first wrong values, unless they are a sum that is pending, or no module's."""
    if first.way in ("unsummed", "cut", "lost", "outside", "again"):
        return None
    return cause_of(evidence, first) or times_by_weights(first, pairs)


def where(first: Divergence, dump: Dump) -> str:
    """Say where a step first goes wrong.

    Args:
        first: Where.
        dump: The step's, which says what else a module was given than tensors of floating point.
    """
    name = first.called
    arguments = arguments_of(dump, first.module)
    of_ranks = (min(by_rank.items()) for by_rank in arguments.values())
    differ = listed((_differing(rank, one) for rank, one in of_ranks), MAX_ARGUMENTS)
    if first.direction == "forward":
        if first.way == "unsummed":
            inner, reader = is_within(first.module, first.before), first.before or "the model itself"
            reading = f"nothing in {reader} sums them" if inner else f"{reader} reads them as they are"
            return f"{name} returns the terms of a sum over {first.axis}, and {reading}"
        if first.way == "between" and first.before == first.module:
            return f"{name} is the first module whose input is not the unsharded model's"
        if first.way == "between":
            after = f" after {first.after}" if first.after else ""
            gets = f"gets the right tensors of floating point, but {differ}," if differ else "gets the right inputs"
            return f"{name} {gets} and calls {first.before}{after} with a wrong one, so it is the first wrong module"
        if first.call.state("input") == "moved":
            return f"{name} is the first module whose output is not the unsharded model's"
        match = "inputs" if not differ else "tensors of floating point"
        return f"{name} is the first wrong module: its {match} match the unsharded model's, " + (
            f"{differ}, and its output is wrong" if differ else "its output doesn't"
        )
    if first.way == "unsummed":
        inner = is_within(first.before, first.module)
        which = f"comes back to the output of {first.before}" if inner else f"{name} sends back"
        return f"in {name}, nothing sums the gradient that {which}: each rank has one term of a sum over {first.axis}"
    if first.way == "again":
        differ = "returns something else than" if first.module == first.before else "is given other tensors than"
        return f"backward runs {first.before or 'the model'} again, as checkpointing does: it {differ} in forward"
    if first.way == "cut":
        through = f" through {first.before}" if first.before else ""
        return f"in backward {name} is the first wrong module: nothing flows back{through}"
    if first.way == "lost":
        lost = f"no gradient comes back to {_lost_output(first)}"
        return f"in backward {name} is the first wrong module: {lost}"
    if first.way == "outside":
        if first.module == first.after:
            return f"in backward the gradient of {first.output} is the first that is wrong; no module reads that output"
        begin = f"in backward the gradient of {name}'s output is the first that is wrong"
        return f"{begin}; that output is also {first.output}, which no module reads"
    if first.way == "between":
        right = f", and right if {first.after} is" if first.after else ""
        read = f"; {listed(first.readers)} read it" if first.readers else right
        return f"in backward the gradient of {name}'s output is the first that is wrong, as it arrives there{read}"
    begin = f"in backward {name} is the first wrong module: the gradient of its output"
    pending = first.call.point("gradient of output", "pending")
    if pending is not None:
        axis = pending_axis(pending)
        return f"{begin} is one term of a sum over {axis}, the gradient of its input is neither a term nor the sum"
    return f"{begin} matches the unsharded model's, the gradient of its input doesn't"


def _differing(rank: int, argument: ArgumentRecord) -> str:
    """Say how an argument differs on a rank: a number may do so by intention, as a part's first position."""
    by_intention = "" if argument.at else ", as a number of a rank's own may"
    return f"{argument.name} differs on rank {rank} ({argument.differs}{by_intention})"


def _of_gradients(evidence: Evidence, first: Divergence, pairs: Sequence[Found]) -> list[Found]:
    """Return one finding of the first wrong module in backward, and those gradients that do not follow from it."""
    cause = _explained(evidence, first, pairs)
    is_proven = first.way in ("unsummed", "cut", "lost", "again") or cause is not None
    run_again = [call.order for call in evidence.calls.in_order if call.again and first.way == "again"]
    follow = [
        (comparison, finding)
        for comparison, finding in pairs
        if comparison.role == "grad"
        and (finding.generic or is_proven or _is_term_of(evidence, first, finding))
        and (
            _order_of(evidence, comparison.name) <= first.call.order
            or (_is_unexplained(finding) and _is_used_around(evidence, comparison.name, first))
            or (_is_unexplained(finding) and _order_of(evidence, comparison.name) <= max(run_again, default=-1))
        )
    ]
    if not follow:
        return list(pairs)
    orders = [(_order_of(evidence, pair[0].name), pair) for pair in follow]
    before = [(order, pair) for order, pair in orders if order <= first.call.order]
    _, (comparison, nearest) = max(before or orders, key=lambda ordered: ordered[0])
    ids = {id(finding) for _, finding in follow}
    is_beside = first.way == "within"  # a term of the loss that leaves the module by another way than its output
    follow += [
        pair for pair in pairs if id(pair[1]) not in ids and (_is_clipped(pair[1]) or (is_beside and _is_loss(pair)))
    ]
    ids |= {id(finding) for _, finding in follow}
    unrelated = [(result, finding) for result, finding in pairs if id(finding) not in ids]
    folded = _folded(evidence, first, nearest, cause, len(follow) - 1)
    others = tuple(finding for result, finding in follow if result is not comparison)
    return [*unrelated, (comparison, replace(folded, others=others))]


def _is_clipped(finding: Finding) -> bool:
    """Whether a rank's gradient is scaled by a number of its own, as clipping by the norm of wrong gradients does."""
    return isinstance(finding.explanation, ClippedByParts) and not finding.explanation.norm


def _is_term_of(evidence: Evidence, first: Divergence, finding: Finding) -> bool:
    """Whether a weight in the first wrong module lacks the sum that the gradient of its own module's output lacks."""
    cause, owner = finding.explanation, finding.tensor.rpartition(".")[0]
    if not isinstance(cause, GradientNotReduced) or not (owner == first.module or is_within(owner, first.module)):
        return False
    pending = (call.point(OUTPUT, "pending") for call in evidence.calls.by_module.get(owner, ()))
    return cause.op == "SUM" and cause.axes in {(pending_axis(point),) for point in pending if point is not None}


def _is_unexplained(finding: Finding) -> bool:
    return finding.generic or isinstance(finding.explanation, UnexplainedCopies)


def _is_used_around(evidence: Evidence, weight: str, first: Divergence) -> bool:
    """Whether a module around the first wrong one uses a weight by itself: it has it, or a module never called has."""
    name = weight.rpartition(".")[0]
    user = name if name in evidence.calls.by_module else name.rpartition(".")[0]
    return user in evidence.calls.by_module and is_within(first.module, user)


def _order_of(evidence: Evidence, weight: str) -> int:
    """Return when the module that has a weight ended in forward; the nearest around it that was called."""
    name = weight
    while name:
        name = name.rpartition(".")[0]
        calls = evidence.calls.by_module.get(name)
        if calls:
            return calls[-1].order
    return 0


def _folded(evidence: Evidence, first: Divergence, nearest: Finding, cause: Finding | None, others: int) -> Finding:
    sentence = where(first, evidence.dump)
    also = f"so the gradient of {nearest.tensor} is wrong" + (f", and {counted(others, 'other')}" if others else "")
    if cause is None:
        kind: Kind = "unreduced-gradient" if first.way == "unsummed" else "wrong-value"
        bare = replace(nearest, held="", claimed="", generic=False)
        placed = replace(bare, kind=kind, sentence=sentence, details=(also,), module=first.module)
        return placed.because(cause_at(evidence, first))
    return replace(
        cause,
        tensor=nearest.tensor,
        sentence=sentence,
        details=(f"there {cause.summary}", also),
        module=first.module,
        generic=False,
        pairs=nearest.pairs,
    )


def cause_at(evidence: Evidence, first: Divergence) -> Cause:
    """Return the cause that the place of a first wrong module suggests."""
    name = first.module or "the model itself"
    if first.direction == "forward":
        if first.way == "unsummed":
            is_inner = is_within(first.module, first.before)
            return UnsummedModule(first.module, first.before or "the model itself", first.axis, is_inner)
        if unused := _unused_weight(evidence, first):
            return UnusedWeight(name, unused)
        split = _split_inputs(evidence, first)
        if split and not _is_gathered(evidence, first, split[1]):
            axis, dim = split
            exchange = exchange_in(evidence, first.module, axis)
            nearest = nearest_comparison(compared_at(evidence, first))
            joined = check_joined(nearest, name, axis) if nearest is not None else None
            if joined is not None or nearest is None or exchange or is_own_part_possible(nearest, axis):
                is_unseen = not any(record.collectives for record in evidence.dump.files.ranks.values())
                return joined or UngatheredInput(name, axis, dim, exchange, may_exchange=is_unseen)
        inner = [one for one in evidence.calls.within(first.call) if one.module == first.after]
        pending = inner[-1].point("output", "pending") if inner and first.way == "between" else None
        is_given_wrong = first.way == "between" and first.before == first.module
        if pending is None and (is_given_wrong or _is_given_out_of_order(first)):
            return UnexplainedInput(name)
        return (
            UnexplainedModule(name) if pending is None else UnexplainedModule(name, first.after, pending_axis(pending))
        )
    if first.way == "unsummed" and is_within(first.before, first.module):
        return UnsummedInputGradient(name, first.axis, first.before)
    if first.way == "unsummed":
        return UnsummedInputGradient(name, first.axis, "", *_readings(evidence.calls, first))
    if first.way == "lost":
        if first.before == first.module:
            return GraphCutBehind(_lost_output(first), _is_last_of_stage(evidence, first.call))
        return CutInModule(name, f"the output of {first.before}")
    if first.way == "again":
        return RecomputedOtherwise(name, first.before or "the model", of_inputs=first.module != first.before)
    if first.way == "cut" and (without_graph := _without_graph(evidence, first)):
        return RanWithoutGraph(without_graph, is_recomputed=False)
    if first.way == "cut":
        return CutInModule(name, f"the input of {first.before}" if first.before else f"the output of {name}")
    if first.way == "outside":
        last = evidence.calls.by_module[first.after][-1]
        return WrongOutside(first.output, _module_around(evidence, first), _is_last_of_stage(evidence, last))
    if first.way == "between":
        return UnexplainedBetweenModules(name, first.after or "what reads its output", first.readers)
    if first.call.has_overwritten_input:
        return OverwrittenInput(name)
    if not _has_no_collective(evidence, first.module):
        return UnexplainedModuleBackward(name)
    without_graph = _without_graph(evidence, first)
    return RanWithoutGraph(without_graph, True) if without_graph else UnexplainedModuleBackward(name, "none")


def _without_graph(evidence: Evidence, first: Divergence) -> str:
    """Return the outermost module around the cut that ran with gradients switched off; empty if none did."""
    cut = evidence.calls.by_module.get(first.before or first.module, (first.call,))[0]
    outermost = [call for call in (cut, *evidence.calls.around(cut)) if call.is_without_graph]
    return outermost[-1].module if outermost else ""


def _has_no_collective(evidence: Evidence, module: str) -> bool:
    """Whether collectives of the step were recorded, and none of them ran in a module or, in backward, around it.

    One in backward that no module is known of may have run in it.
    """
    calls = [call for record in evidence.dump.files.ranks.values() for call in record.collectives]
    inside = (call for call in calls if call.module == module or is_within(call.module, module))
    around = (call for call in calls if call.when == "backward" and is_within(module, call.module))
    return bool(calls and module) and not any(inside) and not any(around)


def _is_given_out_of_order(first: Divergence) -> bool:
    """Whether a linear layer is given slices in a different order: its features, or tokens, whose order it keeps."""
    return first.way == "within" and first.call.type == "Linear" and first.call.state("input") == "moved"


def _readings(calls: Calls, first: Divergence) -> tuple[str, tuple[str, ...], str]:
    """Return which input of a first wrong module sends back terms, what else reads the tensor so, and what makes it.

    Returns:
        The input, as `input 1`, if others of the module's send back the whole; the other modules; and the module that
        makes the tensor, if all that read it send back terms.
    """
    makers = [call for call in calls.in_order if call.point(OUTPUT, "pending") == first.point]
    tensors = makers[0].tensors(OUTPUT) if makers else set()
    points = [point for own in first.call.points.values() for point in own if point.what == INPUT]
    indices = {point.index for point in points if point.state == "pending"}
    argument = f"input {min(indices)}" if len(indices) == 1 and {point.index for point in points} > indices else ""
    readers = [call for call in calls.in_order if call.tensors(INPUT) & tensors and call.is_good(OUTPUT)]
    outer = [
        call
        for call in readers
        if not any(is_within(call.module, other.module) and call is not other for other in readers)
    ]
    pending = tuple(
        call.module for call in outer if call is not first.call and call.tensors(INPUT, "pending") & tensors
    )
    is_of_all = bool(pending) and len(pending) == len(outer) - 1
    return argument, pending, makers[0].module if is_of_all else ""


def _unused_weight(evidence: Evidence, first: Divergence) -> str:
    """Return a weight of the first wrong module to which no gradient comes, though some weights get theirs."""
    names = evidence.without_gradient if first.way == "within" and evidence.gradients else ()
    of_module = (name for name in names if name.rpartition(".")[0] == first.module and name not in evidence.held_back)
    return next((name for name in of_module if is_due(evidence.dump, name)), "")


def _lost_output(first: Divergence) -> str:
    """Name the output that gets no gradient back; of several, by its index."""
    outputs = {(point.what, point.index) for points in first.call.points.values() for point in points}
    is_one_of_several = first.point is not None and len({index for what, index in outputs if what == "output"}) > 1
    if first.point is None or not is_one_of_several:
        return f"the output of {first.before}"
    return f"output[{first.point.index}] of {first.before}"


def _module_around(evidence: Evidence, first: Divergence) -> str:
    """Return the module whose code has the output that a call makes: its own, if it makes it of what others return."""
    return first.module if evidence.calls.within(first.call) else first.module.rpartition(".")[0]


def _is_last_of_stage(evidence: Evidence, call: Call) -> bool:
    """Whether the next module in the model's order runs on other ranks, which get the output by a send."""
    later = (other for other in evidence.calls.in_order if other.order > call.order and other.module)
    following = next((other for other in later if not is_within(call.module, other.module)), None)
    return following is not None and not following.points.keys() & call.points.keys()


def _is_gathered(evidence: Evidence, first: Divergence, dim: int) -> bool:
    """Whether all ranks give the first wrong input the whole's size along a dim of which they had parts."""
    point = first.point
    if point is None or first.way != "between" or point.what != "input":
        return False
    name = Place(point.module, point.call, point.what, point.index).values_name
    whole, held = (evidence.dump.find(moment, "activation", name) for moment in ("reference", "step"))
    if whole is None or held is None or len(held.shards) < evidence.dump.files.mesh.size:
        return False
    return all(shard.body.local_shape == whole.first.body.local_shape for shard in held.shards.values()) and (
        dim < len(whole.first.body.local_shape) - 1
    )


def _split_inputs(evidence: Evidence, first: Divergence) -> tuple[str, int] | None:
    """Return an axis that splits an input's dim other than rows (first) and features (last).

    Rows do not need each other but for statistics over them, which have a rule of their own.
    """
    mesh = evidence.dump.files.mesh
    inputs = [first.call, *evidence.calls.within(first.call)]
    for call in inputs:
        point = call.point("input", "right")
        dims = point.layout.partition("]")[0].strip("[").split(", ") if point is not None else []
        for dim in range(len(dims) - 2, 0, -1):
            for axis in mesh.axes:
                if axis in dims[dim].split("/")[1:]:
                    return axis, dim
    return None
