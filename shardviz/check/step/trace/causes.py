"""Causes of the first wrong values of a step: rules for results, applied to an activation.

Which part of the unsharded model's values a rank should have is what it has in another layer, or else any split over
the mesh that gives its shape. They may be the unsharded model's times one number: nothing but the module can have done
that, no optimizer, no wrapper and no loss scale. A sum may have one of its terms too often or not at all. And ranks may
hold the rows or columns of the module's weight in another order: that is a cause if the modules of other layers have
theirs in order, as a job may keep a weight permuted, and use it so.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.comparison import Compared, whole_of
from shardviz.check.step.forward.explain import check_sum_beside_a_vector
from shardviz.check.step.rules.factors import check_unreduced, size_clause, size_in_words
from shardviz.check.step.rules.terms import (
    added_too_often,
    check_order,
    check_own_statistics,
    check_related,
    mixed_shards,
)
from shardviz.check.step.trace.calls import Call, is_within
from shardviz.check.step.trace.divergence import Divergence, start_of_order
from shardviz.dump.records.step import FROM_ONE_RANK
from shardviz.dump.records.trace import PointRecord, of_point
from shardviz.errors import ShardvizError
from shardviz.explain.step.gradients import AveragedBackward, CutResidual, RepeatedBackwardSum, ScaledOnTheWayBack
from shardviz.explain.step.line_reductions import GradientsOfOtherMicroBatches
from shardviz.explain.step.modules import (
    AveragedForward,
    RepeatedForwardSum,
    ScaledBetweenModules,
    ScaledByMicroBatches,
    SkippedModule,
    UnlikeLayers,
)
from shardviz.explain.step.sums import RepeatedTerm, TermLeftOut, TermOfSomeRanks, ZerosOfSomeRanks
from shardviz.explain.step.whole_step import RankDependentCode, RowsOfPeers, RowsSentByOneRank
from shardviz.explain.templates import times_text
from shardviz.groups import in_groups, the_only
from shardviz.layout.layout import Layout, placements_of
from shardviz.layout.notation import parse
from shardviz.layout.region import Region
from shardviz.layout.splits import axes_in
from shardviz.relate.factors import MOST_RATIO, ratio_near
from shardviz.relate.measures import factor_of_all, moved_slices, vector_added
from shardviz.relate.sides import Rounding
from shardviz.relate.tolerance import LEAST_FACTOR_OF_MODULE, NOISE, POINT_EPSILON, SINGLE, near_ratio
from shardviz.relate.values import part_of
from shardviz.text import listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.evidence import Evidence
    from shardviz.dump.dump import Dump, Tensor
    from shardviz.dump.records.base import Role
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding


def cause_of(evidence: Evidence, first: Divergence) -> Finding | None:
    """Return what a rule says of the first wrong values; None if none explains them."""
    if (proven := check_skipped(evidence, first) or check_rows_of_one_rank(evidence, first)) is not None:
        return proven
    for comparison in compared_at(evidence, first):
        if comparison.incomparable or not comparison.wrong:
            continue
        explained = (
            check_unreduced(None, comparison)
            or check_times(evidence, comparison, first)
            or added_too_often(evidence.dump, comparison)
            or _in_other_order(first, comparison)
            or mixed_shards(comparison)
            or _beside_a_vector(evidence, comparison)
            or check_own_statistics(comparison, first.call.type)
            or check_related(comparison)
            or check_some_ranks(evidence, comparison, first)
        )
        if explained is not None:
            return explained
    return (
        check_added(evidence, first) or check_order_of_weights(evidence, first) or check_rows_of_peers(evidence, first)
    )


def _in_other_order(first: Divergence, comparison: Compared) -> Finding | None:
    """Return the finding of slices in another order; of micro-batches, if these get each other's gradients.

    Micro-batches are blocks of rows: what reorders single rows may be anything.
    """
    finding, rank = check_order(comparison), min(comparison.wrong)
    slices = list(moved_slices(comparison, rank, 0).values())
    begins = [at for at, row in enumerate(slices) if not at or row != slices[at - 1] + 1]
    rows = len(slices) // max(len(begins), 1)
    is_of_blocks = len(begins) > 1 < rows and begins == [*range(0, len(slices), rows)]
    if finding is None or not is_of_blocks or (first.direction, first.way) != ("backward", "between"):
        return finding
    order = [slices[at] // rows for at in begins]
    outputs, gradients = (listed(map(str, parts), MAX_LISTED) for parts in (sorted(order), order))
    cause = GradientsOfOtherMicroBatches(rank, outputs, gradients)
    return replace(finding, kind=cause.kinds[0]).because(cause)


def check_skipped(evidence: Evidence, first: Divergence) -> Finding | None:
    """Return the finding if no rank calls a module whose input the first wrong module is given, or lacks it behind it.

    Code may use the weights of a module without a call: their gradients show it.
    """
    skipped = first.point.skipped if first.point is not None else ""
    if first.point is None or not skipped:
        return None
    is_forward = first.point.what == "input"
    if not is_forward and any(is_within(name, skipped) for name in evidence.gradients):
        return None
    reader = (first.before or first.point.module) if is_forward else ""
    sentence = f"{reader} is given the input of {skipped}" if is_forward else f"nothing calls {skipped}"
    return SkippedModule(skipped, reader).finding(first.module, tuple(sorted(first.call.points)), sentence)


def check_rows_of_peers(evidence: Evidence, first: Divergence) -> Finding | None:
    """Return the finding if each rank has a right block of an output: its rows, and its part of a second dim.

    Both are split along one axis, along which the model is given different rows too: the other blocks are on no rank.
    """
    point, mesh = first.point, evidence.dump.files.mesh
    if point is None or (first.direction, first.way, point.what) != ("forward", "within", "output"):
        return None
    expected, values = values_at(evidence.dump, point)
    if expected is None:
        return None
    near = max(point.near, SINGLE * float(np.abs(expected).max(initial=0.0)))
    rows, model = _axes_of_rows(first.call), evidence.calls.by_module.get("", ())
    for axis in (axis for axis in rows if model and axis in _axes_of_rows(model[0])):
        for dim in range(1, expected.ndim):
            chains = [rows, *((axis,) if at == dim else () for at in range(1, expected.ndim))]
            dims = [Layout(mesh, (size,), (chain,)) for size, chain in zip(expected.shape, chains, strict=True)]
            blocks = {rank: Region(tuple(one.region_of_rank(rank).dims[0] for one in dims)) for rank in values}
            if all(_is_near(values[rank], part_of(expected, block), near) for rank, block in blocks.items()):
                return RowsOfPeers(first.module, axis).finding(
                    first.module,
                    tuple(sorted(values)),
                    f"each rank has its own rows and its part of dim {dim} along {axis}; the other parts of these rows "
                    "are on no rank",
                )
    return None


def check_rows_of_one_rank(evidence: Evidence, first: Divergence) -> Finding | None:
    """Return the finding if all ranks along an axis are given one rank's rows, whole or in pieces, by a collective.

    The model around is given right rows on all of them, so the other ranks' rows are dropped. The line is named if the
    step has no other such collective: wrappers send buffers, too.
    """
    point, mesh = first.point, evidence.dump.files.mesh
    records = evidence.dump.files.ranks.values()
    places = in_groups((move.op, move.place) for record in records for move in record.moves if move.op in FROM_ONE_RANK)
    if point is None or (first.direction, point.what) != ("forward", "input") or not places:
        return None
    expected, values = values_at(evidence.dump, point)
    if expected is None or not expected.ndim:
        return None
    near = max(point.near, SINGLE * float(np.abs(expected).max(initial=0.0)))
    for axis, op in product(_axes_of_rows(first.call), sorted(places)):
        parts = Layout(mesh, expected.shape, ((axis,), *((),) * (expected.ndim - 1)))
        senders = {rank: mesh.group_of(rank, axis)[0] for rank in values}
        sent = {rank: part_of(expected, parts.region_of_rank(sender)) for rank, sender in senders.items()}
        if op == "scatter":  # cut once more
            sent = {
                rank: part_of(rows, Layout(mesh, rows.shape, parts.chains).region_of_rank(rank))
                for rank, rows in sent.items()
            }
        if all(_is_near(values[rank], rows, near) for rank, rows in sent.items()):
            pieces = "a piece of the rows" if op == "scatter" else "the rows"
            sender = the_only(set(senders.values()))
            whose = f"the first rank's along {axis}" if sender is None else f"rank {sender}'s"
            sentence = f"each rank along {axis} has {pieces} that were {whose}"
            cause = RowsSentByOneRank(axis, the_only({*places[op]}) or "", is_scattered=op == "scatter")
            return cause.finding(first.module, tuple(sorted(values)), sentence)
    return None


def _axes_of_rows(call: Call) -> tuple[str, ...]:
    """Return the axes that split the rows of a call's first right input, outermost first."""
    point = call.point("input", "right")
    chains = parse(point.layout).chains if point is not None and point.layout else ()
    return tuple(axes_in(chains[0])) if chains else ()


def _is_near(values: NDArray[np.float64], expected: NDArray[np.float64], near: float) -> bool:
    return values.shape == expected.shape and bool(np.all(np.abs(values - expected) <= near))


def with_start_of_order(evidence: Evidence, first: Divergence | None) -> Divergence | None:
    """Return the first divergence, moved back to where the features are reordered that a linear layer is given.

    Tokens in another order come out of a linear layer in that order. Features meet the wrong columns of its weight,
    unless these are in another order, too.
    """
    if first is None or first.call.type != "Linear" or first.call.state("input") != "moved":
        return first
    dump, name = evidence.dump, f"{first.module}.weight"
    weight = dump.by_name("stamped", "param").get(name) or dump.by_name("step", "grad").get(name)
    if weight is None or _out_of_order(weight):
        return first
    begin = start_of_order(evidence.calls, first.call)
    if begin is None:
        return first
    if begin.way == "between":
        sides = [one for one in compared_at(evidence, begin) if not one.incomparable and one.wrong]
        are_features = (all(moved_slices(one, rank, one.wanted.ndim - 1) for rank in one.wrong) for one in sides)
        return begin if any(are_features) else first
    output = evidence.activations.by_name.get(begin.module)
    if output is None or output.slices is None:
        return begin
    num_dims = len(dump.by_name("step", "activation")[output.name].shape)
    return begin if output.slices.dim == num_dims - 1 else first


def _beside_a_vector(evidence: Evidence, result: Compared) -> Finding | None:
    reason = check_sum_beside_a_vector(evidence, result) if result.role == "output" and result.wanted.ndim else None
    if reason is None:
        return None
    return replace(reason.finding(result, ""), sentence=reason.clause, details=())


def values_at(dump: Dump, point: PointRecord) -> tuple[NDArray[np.float64] | None, dict[int, NDArray[np.float64]]]:
    """Return the unsharded values at a point, None if a side was not written, and each rank's."""
    name = of_point(point.module, point.what, point.call, point.index)
    tensor = dump.find("step", "activation", name)
    values = {rank: dump.values(shard, name) for rank, shard in tensor.shards.items()} if tensor is not None else {}
    return whole_of(dump, "activation", name) if values else None, values


def compared_at(evidence: Evidence, first: Divergence) -> Iterator[Compared]:
    """Yield the first wrong values with the unsharded model's, once for each layout that they may have."""
    point = first.point
    if point is None:
        return
    expected, values = values_at(evidence.dump, point)
    if expected is None:
        return
    of_step = evidence.activations.rounding
    role: Role = "grad" if point.what.startswith("gradient") else "output"
    local = {rank: held.shape for rank, held in values.items()}
    for layout in _layouts(evidence, first, local, expected.shape):
        regions = {rank: layout.region_of_rank(rank) for rank in values}
        yield Compared(
            name=point.module,
            role=role,
            mesh=layout.mesh,
            claimed=layout,
            wanted=expected,
            values=values,
            regions=regions,
            rounding=Rounding(min(of_step.epsilon, POINT_EPSILON), of_step.terms, 0.0),
            noise=point.near / NOISE / (abs(point.scale) or 1.0),
            is_given=point.what == "input",
        )


def _layouts(
    evidence: Evidence, first: Divergence, local: Mapping[int, tuple[int, ...]], shape: tuple[int, ...]
) -> Iterator[Layout]:
    """Yield layouts that fit every rank's shape, those of other layers first.

    Axes that split the same dim of the module's input come before axes of the same size that don't.
    """
    mesh = evidence.dump.files.mesh
    layouts: list[Layout] = []
    rank = min(local)
    splits = (
        Layout.from_placements(mesh, shape, placements)
        for placements, _ in placements_of(shape, local[rank], mesh, rank)
    )
    given = _splits_of_input(first.call)
    by_input = sorted(splits, key=lambda layout: -len(given & set(_axes_by_dim(layout.chains))))
    for layout in (*_of_others(evidence, first, shape), *by_input):
        fits = all(rank in mesh and layout.region_of_rank(rank).shape == local[rank] for rank in local)
        if fits and not layout.partial and layout not in layouts:
            layouts.append(layout)
            yield layout


def _splits_of_input(call: Call) -> set[tuple[int, str]]:
    """Return the dims of a call's right inputs that are split, each with an axis."""
    points = [point for own in call.points.values() for point in own if (point.what, point.state) == ("input", "right")]
    layouts = {point.layout for point in points if point.layout}
    return {pair for text in layouts for pair in _axes_by_dim(parse(text).chains)}


def _axes_by_dim(chains: Sequence[Sequence[object]]) -> Iterator[tuple[int, str]]:
    return ((dim, axis) for dim, chain in enumerate(chains) for axis in axes_in(chain))


def _of_others(evidence: Evidence, first: Divergence, shape: tuple[int, ...]) -> Iterator[Layout]:
    point = first.point
    if point is None:
        return
    for neighbor in evidence.calls.alike(evidence.calls.call_of(point)):
        right = neighbor.point(point.what, "right")
        if right is not None and right.layout:
            try:
                yield parse(right.layout).layout(evidence.dump.files.mesh, shape)
            except ShardvizError:
                continue


INPUT = "input"
"""What a module was given goes by this name."""


def check_added(evidence: Evidence, first: Divergence) -> Finding | None:
    """Return the finding if the sum has the same term too often, or lacks it, on every wrong rank."""
    point = first.point
    if point is None or point.what not in ("output", "gradient of input"):
        return None
    wrong_points = {
        rank: record
        for rank, records in evidence.calls.call_of(point).points.items()
        for record in records
        if (record.what, record.index) == (point.what, point.index) and record.state not in ("right", "pending")
    }
    terms = {(record.added, record.times) for record in wrong_points.values()}
    if len(terms) != 1 or not point.added:
        return None
    name, ranks = first.module or "the model itself", tuple(sorted(wrong_points))
    if point.what == "output":
        term = f"the input of {name}" if point.added == INPUT else f"the output of {point.added}"
        if point.times < 0:
            lacks = f"the output lacks {term}"
            sentence = lacks if point.times == -1 else f"{term} is subtracted from the output {-point.times} times"
            return TermLeftOut(term, name).finding(name, ranks, sentence, kind="wrong-value")
        splitting = {axis for axis, is_batch in (evidence.batch or {}).items() if is_batch}
        axes = size_in_words(evidence.dump.files.mesh, Fraction(point.times + 1), splitting)
        sentence = f"{term} is in the output {point.times + 1} times"
        return RepeatedTerm(term, axes, name, _whole_matrix(evidence.dump, point.added)).finding(name, ranks, sentence)
    if point.times != -1:
        return None
    lacking = f"the gradient of the input of {name} lacks that of the output of {point.added}"
    return CutResidual(name).finding(name, ranks, f"{lacking}, which should flow back to it")


def _whole_matrix(dump: Dump, module: str) -> str:
    """Return the name of a layer's matrix if every rank has all of it; empty if not, or without one."""
    name = f"{module}.weight"
    weight = dump.stamped.get(name)
    is_whole = weight is not None and all(shard.body.local_shape == weight.shape for shard in weight.shards.values())
    return name if weight is not None and is_whole and len(weight.shape) == 2 else ""


def check_some_ranks(evidence: Evidence, comparison: Compared, first: Divergence) -> Finding | None:
    """Return the finding if some ranks are right, and all others lack a term or have it too often, or have zeros."""
    wrong, name = comparison.wrong, first.module or "the model itself"
    if first.direction != "forward" or comparison.role != "output" or len(wrong) in (0, len(comparison.reduced)):
        return None
    if not any(np.any(comparison.reduced[rank]) for rank in wrong):
        sentence = f"{name} returns the whole on some ranks and zeros on {named_ranks(wrong)}"
        return comparison.finding(ZerosOfSomeRanks(name, wrong), sentence, kind="wrong-value")
    terms = {_term_of(evidence, comparison, first, rank) for rank in wrong}
    term, times = terms.pop() if len(terms) == 1 else ("", 0)
    if not term or times not in (-1, 1):
        return None
    sentence = f"the output of {name} on {named_ranks(wrong)} {'lacks' if times < 0 else 'adds'} {term}"
    return comparison.finding(TermOfSomeRanks(term, wrong, name, times > 0), sentence, kind="wrong-value")


def _term_of(evidence: Evidence, comparison: Compared, first: Divergence, rank: int) -> tuple[str, int]:
    """Return the term that a rank's output has too often, and how often: -1 if it lacks it; empty if there is none."""
    names, vectors = evidence.dump.vectors(comparison.reduced[rank].shape[-1:])
    alone = replace(comparison, values={rank: comparison.values[rank]}, regions={rank: comparison.regions[rank]})
    if names and (added := vector_added(alone, vectors)) is not None:
        return names[added[0]], added[1]
    for record in first.call.points.get(rank, ()) if first.point is not None else ():
        if first.point is not None and (record.what, record.index) == (first.point.what, first.point.index):
            module = first.module or "the model itself"
            term = f"the input of {module}" if record.added == INPUT else f"the output of {record.added}"
            return (term, record.times) if record.added else ("", 0)
    return "", 0


def with_term_of_some_ranks(evidence: Evidence, finding: Finding) -> Finding:
    """Return a finding of an output that some ranks have right, with what the others lack in the first wrong module."""
    first = evidence.divergence if isinstance(finding.explanation, RankDependentCode) else None
    if first is None or first.way != "within":
        return finding
    for comparison in compared_at(evidence, first):
        at_place = None if comparison.incomparable else check_some_ranks(evidence, comparison, first)
        if at_place is not None:
            details = (*finding.details, at_place.sentence)
            return replace(finding, details=details).because(at_place.explanation)
    return finding


MAX_LISTED = 4


def check_order_of_weights(evidence: Evidence, first: Divergence) -> Finding | None:
    """Return the finding if only in the first wrong module a weight is out of order."""
    if (first.direction, first.way) != ("forward", "within") or not first.module:
        return None
    weights = evidence.dump.by_name("stamped", "param")
    others = [call.module for call in evidence.calls.alike(first.call)]
    for name, tensor in weights.items():
        module, _, parameter = name.rpartition(".")
        first_dims = _out_of_order(tensor) if module == first.module else {}
        names = [f"{other}.{parameter}" for other in others] if first_dims else []
        alike = [weights[of_layer] for of_layer in names if of_layer in weights]
        if alike and not any(map(_out_of_order, alike)):
            ranks = tuple(sorted(first_dims))
            dim = first_dims[ranks[0]]
            return UnlikeLayers(name, dim).finding(
                name,
                ranks,
                f"dim {dim} of {name} is in a different order on {named_ranks(ranks, MAX_LISTED)} than in the "
                "unsharded model; the weights of other layers are in order",
            )
    return None


def _out_of_order(tensor: Tensor) -> Mapping[int, int]:
    """Return the first dim along which each rank's slices are out of order, for ranks that are."""
    first_dims = {}
    for rank, shard in tensor.shards.items():
        dims = [
            dim
            for dim, spans in enumerate(shard.body.held or ())
            if not all(stop <= start for (_, stop), (start, _) in pairwise(spans))
        ]
        if dims:
            first_dims[rank] = dims[0]
    return first_dims


def check_times(evidence: Evidence, comparison: Compared, first: Divergence) -> Finding | None:
    """Return the finding if every rank has the unsharded model's values times one number."""
    factor = factor_of_all([comparison])
    if factor is None or abs(factor - 1) < LEAST_FACTOR_OF_MODULE:
        return None
    ratio = ratio_near(factor, MOST_RATIO, near_ratio(comparison.rounding.epsilon)) or Fraction(0)
    size = " or ".join(_axes(comparison, ratio))
    cause = _cause_of_factor(evidence, first, ratio, factor, size)
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


def _cause_of_factor(evidence: Evidence, first: Divergence, ratio: Fraction, factor: float, axes: str) -> Cause:
    name = first.module or "the model itself"
    parts = evidence.activations.num_micro_batches
    if parts > 1 and ratio in (Fraction(1, parts), Fraction(parts)):
        return ScaledByMicroBatches(name, first.direction, parts, is_divided=ratio < 1)
    if first.direction == "backward":
        readers = first.after or listed(first.readers)
        if first.way == "between" and readers:
            over = size_in_words(evidence.dump.files.mesh, ratio) if ratio else ""
            return ScaledOnTheWayBack(name, readers, over, factor > 1)
        return times_in_backward(name, ratio, axes)
    if (first.way, first.before) == ("between", first.module) and first.after:
        return ScaledBetweenModules(first.after, name)
    return (RepeatedForwardSum if ratio >= 1 else AveragedForward)(name, axes)


def times_in_backward(name: str, ratio: Fraction, axes: str) -> Cause:
    """Return the cause of a gradient that is multiplied by a number in a module's backward."""
    return (RepeatedBackwardSum if ratio >= 1 else AveragedBackward)(name, axes)
