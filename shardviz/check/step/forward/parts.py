"""Parts of plain weights, and slices, that are not those which modules around them read.

Nothing is claimed of a plain tensor, and any order is right if the model sends features or tokens the same way. Where
the output is wrong, a weight that stands in another order than those before and after it is what to look at.

Gate and up, or q, k and v, are one weight whose output the model splits into segments. Cut in one stretch, a rank has
all of one segment and none of another (`wrong-segment`). The module is right, of the part that it has; the next one,
which takes a whole fraction of its features, is not.

Slices may stand twice, or be computed from a rank's own part of the sequence alone.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.comparison import Compared, Reason, spans
from shardviz.check.step.trace.calls import NUMBER, is_within
from shardviz.explain.step.forward import (
    ExpertsSentElsewhere,
    PartsDealtOtherwise,
    PositionsStartAgain,
    SegmentsInOneStretch,
    UngatheredKeys,
)
from shardviz.explain.step.gradients import RepeatedMicroBatch
from shardviz.layout.notation import order_between
from shardviz.layout.region import Region, indices
from shardviz.layout.splits import JOIN, Chain
from shardviz.relate.orders import places_of
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.evidence import Activation, Evidence
    from shardviz.dump.dump import Tensor
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Mesh


MAX_LISTED = 4
Rows = tuple[set[int], set[int]]
"""The experts whose rows are all right, and those that have rows at all."""

STACK = 3
"""A weight of so many dims is a stack along its first: experts, whose tokens are sent to the rank that has theirs."""


def check_parts(evidence: Evidence, comparison: Compared) -> Reason | None:
    """Return the reason if a plain weight's parts don't rise along an axis as others' do.

    Experts may be dealt in any order, but all of one module's weights alike; key heads are shared by ranks.
    """
    cut = list(_cut(evidence, comparison.mesh))
    for name, tensor, axis, dim in cut:
        is_stack, module = len(tensor.shape) >= STACK, name.rpartition(".")[0]
        parts = _along(tensor, comparison.mesh, axis, dim)
        starts = [int(part[0]) for part in parts]
        is_shared_stack = is_stack and len({*starts}) < len(starts)
        if _rise(parts) or is_shared_stack:
            continue
        beside = (
            _along(other, comparison.mesh, along, at)
            for other_name, other, along, at in cut
            if along == axis and (not is_stack or (at == dim and other_name.rpartition(".")[0] == module))
        )
        if any(map(_rise, beside)) and _is_read(evidence, name, axis):
            distinct = sorted(set(starts))
            copies = len(parts) // len(distinct)
            numbers = [distinct.index(start) for start in starts]
            alike = [
                other_name
                for other_name, other, along, at in cut
                if (other_name, along) != (name, axis)
                and [int(part[0]) for part in _along(other, comparison.mesh, along, at)] == starts
            ]
            also = f"; {listed(alike, MAX_LISTED)} {'is' if len(alike) == 1 else 'are'} dealt alike" if alike else ""
            return Reason(
                PartsDealtOtherwise(name, axis, len(parts), copies),
                f"{name}'s parts of dim {dim} are {listed(numbers, 2 * MAX_LISTED)} along {axis}, and those of other "
                f"weights rise: {_shown(parts)}{also}",
                tensor=name,
                held=_shown(parts),
            )
    return None


def _is_read(evidence: Evidence, name: str, axis: str) -> bool:
    """Whether the first odd module may be what reads a weight's output: nothing whole stands between them."""
    before, odd = evidence.activations.first_odd
    module = name.rpartition(".")[0]
    if odd is None or odd.name == module:
        return True
    names = [one.name for one in before]
    if module not in evidence.activations.by_name:
        return is_within(module, odd.name)  # code around it reads the weight itself
    return module in names and all(
        evidence.activations.is_split(one.name, axis) for one in before[names.index(module) + 1 :]
    )


def check_experts(evidence: Evidence, comparison: Compared) -> Reason | None:
    """Return the reason if the rows of some experts are right and those of the others wrong."""
    for name, tensor, axis, dim in _cut(evidence, comparison.mesh):
        if len(tensor.shape) >= STACK and dim == 0:
            chosen = _chosen(evidence, comparison, tensor.shape[0])
            rows = _right_experts(comparison, chosen, tensor.shape[0]) if chosen else None
            if rows is not None:
                return _of_experts(name, tensor, comparison.mesh, axis, rows)
    return None


def _cut(evidence: Evidence, mesh: Mesh) -> Iterator[tuple[str, Tensor, str, int]]:
    """Yield the weights that code cuts along one dim alone over an axis that no placements claim, with axis and dim."""
    for name, tensor in evidence.dump.stamped.items():
        if any(shard.held is None for shard in tensor.shards.values()):
            continue
        for axis in mesh.axes if tensor.claimed is None else _outside(tensor.claimed):
            group = _group(tensor, mesh, axis)
            dims = {dim for part in group for dim in range(len(part.dims)) if part.dims[dim] != group[0].dims[dim]}
            if len(dims) == 1 and len({part.shape for part in group}) == 1:
                yield name, tensor, axis, dims.pop()


def _outside(layout: Layout) -> list[str]:
    """Return the axes that the mesh of a DTensor does not have."""
    return [axis for axis in layout.mesh.axes if layout.own_axes and axis not in layout.own_axes]


def _group(tensor: Tensor, mesh: Mesh, axis: str) -> list[Region]:
    """Return what the first group of ranks along an axis holds, by coordinate."""
    group = next((group for group in mesh.groups(axis) if all(rank in tensor.shards for rank in group)), ())
    return [held for rank in group if (held := tensor.shards[rank].held) is not None and held.size]


def _along(tensor: Tensor, mesh: Mesh, axis: str, dim: int) -> list[NDArray[np.int64]]:
    return [indices(part.dims[dim]) for part in _group(tensor, mesh, axis)]


def _rise(parts: Sequence[NDArray[np.int64]]) -> bool:
    """Whether the first index of each coordinate's part is at or after that of the one before."""
    return all(int(before[0]) <= int(after[0]) for before, after in pairwise(parts))


def _shown(parts: Sequence[NDArray[np.int64]]) -> str:
    return listed((f"coordinate {at} has {spans(part)}" for at, part in enumerate(parts)), MAX_LISTED)


def _chosen(evidence: Evidence, comparison: Compared, count: int) -> dict[int, NDArray[np.int64]]:
    """Return each rank's choice of an expert for its rows: the largest score of a right output of as many features."""
    for name, activation in evidence.activations.by_name.items():
        tensor = evidence.dump.by_name("step", "activation")[name]
        is_score = activation.state == "right" and tensor.shape[-1:] == (count,)
        if is_score and comparison.reduced.keys() <= tensor.shards.keys():
            scores = {rank: evidence.dump.values(tensor.shards[rank], name) for rank in comparison.reduced}
            if all(scores[rank].shape[:-1] == comparison.reduced[rank].shape[:-1] for rank in scores):
                return {rank: score.argmax(-1).ravel() for rank, score in scores.items()}
    return {}


def _right_experts(comparison: Compared, chosen: dict[int, NDArray[np.int64]], count: int) -> Rows | None:
    """Return the experts whose rows are all right, and all with rows; None if some of an expert's are wrong."""
    states_by_expert: dict[int, set[bool]] = {expert: set() for expert in range(count)}
    for rank, experts in chosen.items():
        near = np.asarray(np.abs(comparison.reduced[rank] - comparison.wanted_of(rank)) <= comparison.tolerance)
        for expert, row in zip(experts.tolist(), near.reshape(len(experts), -1), strict=True):
            states_by_expert[expert].add(bool(row.all()))
    states = list(states_by_expert.values())
    if {True, False} in states or {False} not in states:
        return None
    right = {expert for expert, own in states_by_expert.items() if own == {True}}
    return right, {expert for expert, own in states_by_expert.items() if own}


def _of_experts(name: str, tensor: Tensor, mesh: Mesh, axis: str, rows: Rows) -> Reason | None:
    right, with_rows = rows
    parts = _along(tensor, mesh, axis, 0)
    size, count = len(parts), tensor.shape[0]
    in_turn = all(len(part) > 1 and set(np.diff(part).tolist()) == {size} for part in parts)
    in_chunks = np.array_equal(np.concatenate(parts), np.arange(count))
    if count % size or not (in_turn or in_chunks):
        return None
    per_rank = count // size
    alike = {expert for expert in range(count) if expert % size * per_rank + expert // size == expert}
    if not right or right != alike & with_rows:
        return None
    return Reason(
        ExpertsSentElsewhere(name, axis, size, per_rank, in_turn),
        f"only the rows of experts {listed(sorted(right), MAX_LISTED)} are right, which have the same place in both "
        f"orders; {_shown(parts)} of {name} along {axis}",
        tensor=name,
        held=_shown(parts),
    )


def check_fused(evidence: Evidence, comparison: Compared) -> Reason | None:
    """Return the reason if the last right module is cut in one stretch, and the next takes one segment of it."""
    before, odd = evidence.activations.first_odd
    if not before or odd is None or before[-1].state not in ("right", "moved"):
        return None
    name, reader = f"{before[-1].name}.weight", f"{odd.name}.weight"
    weight, next_weight = evidence.dump.stamped.get(name), evidence.dump.stamped.get(reader)
    stamp, next_stamp = evidence.dump.stamps.get(name), evidence.dump.stamps.get(reader)
    if weight is None or next_weight is None or stamp is None or next_stamp is None:
        return None
    if {len(side.shape) for side in (weight, next_weight, stamp, next_stamp)} != {2}:
        return None
    sizes = _segments(stamp.shape[0], next_stamp.shape[1])
    axes = [
        axis
        for axis in comparison.mesh.axes
        if _is_in_one_stretch(weight, comparison.mesh, axis, sizes)
        and len(set(_ranges(next_weight, comparison.mesh, axis, 1))) > 1
    ]
    if not axes:
        return None
    reason = _of_segments(weight, name, odd.name, axes[0], sizes)
    pattern = NUMBER.sub("*", name)
    alike = [
        other
        for other, tensor in evidence.dump.stamped.items()
        if other != name
        and NUMBER.sub("*", other) == pattern
        and tensor.shape == weight.shape
        and _is_in_one_stretch(tensor, comparison.mesh, axes[0], sizes)
    ]
    return replace(reason, alike=tuple(alike))


def _segments(features: int, taken: int) -> list[int]:
    """Return the sizes of 2 or 3 segments: equal ones, or one as large as what is taken and two smaller ones."""
    if taken and features in (2 * taken, 3 * taken):
        return [taken] * (features // taken)
    third, odd = divmod(features - taken, 2)
    return [taken, third, third] if third > 0 and not odd and taken % third == 0 else []


def _is_in_one_stretch(weight: Tensor, mesh: Mesh, axis: str, sizes: list[int]) -> bool:
    """Whether an axis splits dim 0 into stretches, and some rank lacks a segment or its even share of it."""
    parts = list(_ranges(weight, mesh, axis, 0))
    if not sizes or len(set(parts)) < 2 or any(stop - start == 0 for start, stop in parts):
        return False
    ends = np.cumsum([0, *sizes])
    return any(
        (min(stop, high) - max(start, low)) * len(parts) != high - low
        for start, stop in parts
        for low, high in pairwise(ends)
    )


def _ranges(tensor: Tensor, mesh: Mesh, axis: str, dim: int) -> Iterator[tuple[int, int]]:
    """Yield the range of a dim that each rank of the first whole group along an axis holds, if it is one."""
    for group in mesh.groups(axis):
        regions = [tensor.shards[rank].held for rank in group if rank in tensor.shards]
        if len(regions) == len(group) and all(region is not None and len(region.dims[dim]) == 1 for region in regions):
            yield from (region.dims[dim][0] for region in regions if region is not None)
            return


def _of_segments(weight: Tensor, name: str, odd: str, axis: str, sizes: list[int]) -> Reason:
    shape, claimed = weight.shape, weight.claimed
    cause = SegmentsInOneStretch(name, shape, tuple(sizes), axis, odd)
    if claimed is not None and not claimed.flat and cause.has_equal_segments:
        links = [str(link) for link in claimed.chains[0] if link in claimed.mesh.axes]
        under_fsdp = (JOIN, links.pop()) if len(links) > 1 else ()
        chain: Chain = (len(sizes), *links, *under_fsdp)
        segments = replace(claimed, chains=(chain, *claimed.chains[1:]))
        expect = order_between(claimed, segments)
        cause = replace(cause, num_ranks=claimed.mesh.axis_size(axis), expect=expect)
    return Reason(
        cause,
        f"{name} makes {shape[0]} features, and {odd}, the first wrong module, reads only {sizes[0]} of them",
        tensor=name,
        claimed=cause.due if cause.has_equal_segments else "",
        held=f"[{shape[0]}/{axis}, {', '.join(map(str, shape[1:]))}]",
    )


EXCHANGES = ("all_gather", "all_to_all", "gather", "send", "recv", "broadcast")
"""Collectives by which a rank gets keys and values of others."""


def check_repeated(evidence: Evidence, comparison: Compared) -> Reason | None:
    """Return the reason if all slices of the output are the unsharded model's, and some stand there several times."""
    rank = comparison.wrong[0]
    location = places_of(comparison.reduced[rank], comparison.wanted, comparison.tolerance)
    if location is None or np.any(location[1] < 0):
        return None
    dim, places = location
    distinct = len(set(places.tolist()))
    times, remainder = divmod(len(places), distinct)
    if times < 2 or remainder or not np.array_equal(places, np.tile(places[:distinct], times)):
        return None
    parts = evidence.activations.num_micro_batches
    return Reason(
        RepeatedMicroBatch(times=times if parts == times else 0),
        f"on rank {rank} slices {spans(places[:distinct])} of dim {dim} appear {times} times, and others never",
    )


def check_started_again(evidence: Evidence, comparison: Compared) -> Reason | None:
    """Return the reason if the first odd module returns the same slices on ranks that should have different ones."""
    _, odd = evidence.activations.first_odd
    if odd is None or odd.state != "repeated" or odd.slices is None:
        return None
    places = odd.slices.places
    first = next(iter(places.values()))
    parts = odd.slices.size / len(first) if len(first) else 0
    axes = [axis for axis in comparison.mesh.axes if comparison.mesh.axis_size(axis) == parts > 1]
    fitting = [axis for axis in axes if all(_are_alike(places, group) for group in comparison.mesh.groups(axis))]
    if not fitting:
        return None
    axis = " or ".join(fitting)
    return Reason(
        PositionsStartAgain(odd.name, axis),
        f"every rank along {axis} has slices {spans(first)} of dim {odd.slices.dim} of the output of {odd.name} in the "
        "unsharded model, and no rank has the others",
    )


def _are_alike(places: Mapping[int, NDArray[np.int64]], group: tuple[int, ...]) -> bool:
    return all(rank in places and np.array_equal(places[group[0]], places[rank]) for rank in group)


def check_ungathered(evidence: Evidence, comparison: Compared) -> Reason | None:
    """Return the reason if ranks have right slices of a dim of their own up to a module whose output is not."""
    before, odd = evidence.activations.first_odd
    axis, dim = _split_before(evidence, comparison, before)
    first = evidence.divergence
    if odd is None or not axis or (first is not None and odd.name not in (first.module, first.before)):
        return None
    if not _is_split_alike(evidence, before[-1], odd, dim):
        return None
    return Reason(
        UngatheredKeys(
            before[-1].name, odd.name, axis, exchange_in(evidence, odd.name.rpartition(".")[0], axis, besides=odd.name)
        ),
        f"up to {before[-1].name} each rank along {axis} has the right slices of dim {dim}; {odd.name} "
        f"is the first wrong module{_right_slices(odd)}",
    )


def exchange_in(evidence: Evidence, module: str, axis: str, besides: str | None = None) -> str:
    """Return the first collective by which ranks along an axis exchange numbers in a module; empty if none does.

    Args:
        besides: A module in it whose calls do not count.
    """
    calls = (call for record in evidence.dump.files.ranks.values() for call in record.collectives)
    along = (call for call in calls if axis in call.axes and call.when == "forward" and call.module != besides)
    inside = (call for call in along if call.module == module or is_within(call.module, module))
    return next((call.op for call in inside if call.op in EXCHANGES), "")


def _is_split_alike(evidence: Evidence, last: Activation, odd: Activation, dim: int) -> bool:
    """Whether every rank has as many slices of a dim after the odd module as after the last right one."""
    of = evidence.dump.by_name("step", "activation")
    before, after = of[last.name].shards, of[odd.name].shards
    shapes = [(before[rank].body.local_shape, after[rank].body.local_shape) for rank in before.keys() & after.keys()]
    return all(len(one) == len(other) and one[dim] == other[dim] for one, other in shapes)


def _split_before(evidence: Evidence, comparison: Compared, before: list[Activation]) -> tuple[str, int]:
    """Return an axis that does not split the output, and the dim of the last right activation that it splits."""
    if not before or before[-1].state not in ("right", "moved"):
        return "", 0
    last = before[-1]
    shape = evidence.dump.by_name("step", "activation")[last.name].shape
    of_batch = comparison.claimed.split_axes if comparison.claimed is not None else ()
    for axis in (axis for axis in comparison.mesh.axes if axis not in of_batch):
        if (
            last.slices is not None
            and last.slices.dim < len(shape) - 1
            and _have_other_slices(last.slices.places, comparison.mesh, axis)
        ):
            return axis, last.slices.dim
        if last.layout is not None:
            for dim, chain in enumerate(last.layout.chains[:-1]):
                if axis in chain:
                    return axis, dim
    return "", 0


def _have_other_slices(places: Mapping[int, NDArray[np.int64]], mesh: Mesh, axis: str) -> bool:
    return any(
        not set(places[group[0]].tolist()) & set(places[rank].tolist())
        for group in mesh.groups(axis)
        if all(rank in places for rank in group)
        for rank in group[1:]
    )


def _right_slices(odd: Activation) -> str:
    places = odd.slices.places if odd.slices is not None else {}
    counts = {rank: int(np.count_nonzero(own >= 0)) for rank, own in places.items()}
    if not any(counts.values()):
        return ""
    shown = listed((f"{count} of {len(places[rank])} on rank {rank}" for rank, count in counts.items()), MAX_LISTED)
    return f" ({shown} are right)"
