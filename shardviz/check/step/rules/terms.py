"""Wrong results without a ratio: added vectors, mixed shards, relations, other orders.

A parameter may be added too often, shards summed as if they were copies, or one relation makes all wrong ranks' values
of those wanted; or only some ranks are right. If none of these fits, it is a `wrong-value`, with the place at which it
is off.

A `misordered` result has the right slices along a dim, in another order: parts that were gathered in the order in which
they came, or tokens put back by a permutation where its inverse belongs. The loss often is right, too, and what reads
the result by position goes wrong.

`wrong-value` of gradients that were reduced over an axis whose ranks have other weights, as stages of a pipeline. Ranks
along such an axis have tensors of the same shapes under other names. A reduction over it runs without a word and leaves
one gradient for different weights: equal numbers under different names tell it.

The names of a tied weight may go to different ranks: each has the gradient of its own use. On stages of a pipeline an
embedding and a head cannot share storage. They are copies, which stay equal only if the sum of both gradients is taken
on both (Megatron-LM's embedding group).
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.comparison import Compared, spans
from shardviz.check.step.rules.factors import size_in_words
from shardviz.check.step.rules.losses import cause_of_value, exponentials_of, unexplained_loss, unexplained_value
from shardviz.check.step.rules.own_scales import scaled_before_reduction, scaled_text
from shardviz.check.step.trace.divergence import is_wrong_from_loss
from shardviz.dump.records.base import WEIGHTS
from shardviz.dump.records.step import FROM_ONE_RANK
from shardviz.explain.step.forward import JoinedOutOfOrder, PartOfAnotherRank, RepeatedParts
from shardviz.explain.step.gradients import (
    CutGraph,
    ReadBySegments,
    ReducedAtEachUse,
    SlicesWithoutGradient,
    TiedShardsMisaligned,
    UnsummedTiedGradients,
)
from shardviz.explain.step.modules import OverwrittenInput, StatisticsOfPart
from shardviz.explain.step.scales import AddedNumber, OnlyZerosThere, RoundedResult, TransposedResult
from shardviz.explain.step.sums import (
    MixedLayers,
    MixedShards,
    RepeatedTerm,
    SkippedInReduction,
    TermLeftOut,
    TermOfSomeRanks,
)
from shardviz.explain.step.whole_step import (
    MemoryNeverWritten,
    RankDependentCode,
    UnexplainedBackward,
    UnexplainedCopies,
    UnexplainedForward,
    UnexplainedWeightGradients,
    WeightOnSomeRanks,
)
from shardviz.explain.templates import number
from shardviz.groups import in_groups, the_only
from shardviz.layout.dtypes import itemsize
from shardviz.layout.region import Region, index_of, indices
from shardviz.relate.measures import (
    factor_of_all,
    factors_of_slices,
    has_wanted_numbers,
    is_nearer,
    is_normalized,
    is_of_other_parts,
    is_right_with,
    is_shared_with,
    lost_slices,
    mixed_over,
    moved_slices,
    ratio_of,
    vector_added,
)
from shardviz.relate.relations import Filled, Offset, Relation, Rounded, Transposed
from shardviz.relate.tolerance import FEW, HUGE, LEAST_STATISTIC
from shardviz.relate.values import finite_magnitude, magnitude
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.evidence import Evidence
    from shardviz.dump.dump import Dump
    from shardviz.dump.records.trace import What
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding
    from shardviz.relate.measures import Slices

SEGMENTS = range(2, 9)
"""So many segments a fused weight may have: gate and up, q, k and v."""


def check_terms(evidence: Evidence, comparison: Compared) -> Finding:
    """Return the finding of a tensor that is off by no ratio."""
    dump = evidence.dump
    rank = comparison.wrong[0]
    excess = comparison.reduced[rank] - comparison.wanted_of(rank)
    explained = added_too_often(dump, comparison) or mixed_shards(comparison)
    if explained is not None:
        return explained
    is_too_large = max(map(finite_magnitude, comparison.reduced.values())) > HUGE > finite_magnitude(comparison.wanted)
    never_written = MemoryNeverWritten() if is_too_large else None
    cause = never_written or cause_of_value(evidence, comparison) or _where_to_look(evidence, comparison)
    right = [rank for rank in comparison.reduced if rank not in comparison.wrong]
    is_on_some_ranks = bool(comparison.copies_differ_along and right)
    if is_on_some_ranks:
        lacking = [
            name
            for tensor in dump.at("initial")
            if tensor.role in WEIGHTS
            and set(right) <= set(tensor.shards)
            and not set(comparison.wrong) & set(tensor.shards)
            for name in tensor.names
        ]
        cause = WeightOnSomeRanks(comparison.wrong, lacking[0]) if lacking else RankDependentCode(comparison.wrong)
    elif comparison.copies_differ_along:
        if (scaled := scaled_before_reduction(evidence, comparison)) is not None:
            return comparison.finding(scaled, scaled_text(comparison, scaled), held="each rank's own part")
        cause = UnexplainedCopies(" and ".join(comparison.copies_differ_along), cause)
    return comparison.finding(cause, _where(comparison, rank, excess), kind="wrong-value", generic=not is_on_some_ranks)


def _where_to_look(evidence: Evidence, comparison: Compared) -> Cause:
    """Return the place of a wrong result that no rule explains, as its cause."""
    if comparison.role == "output" or not evidence.outputs_are_right:
        return UnexplainedForward()
    if comparison.role == "scalar":
        return unexplained_value(evidence, comparison)
    return _in_backward(evidence, comparison) if evidence.loss_is_right else unexplained_loss(evidence)


def _in_backward(evidence: Evidence, comparison: Compared) -> Cause:
    module, cut = comparison.name.rpartition(".")[0], evidence.without_gradient
    if not cut and _has_right_sides(evidence, module):
        if any(call.has_overwritten_input for call in evidence.calls.by_module[module]):
            return OverwrittenInput(module)
        wrong = {name.rpartition(".")[0] for name, gradient in evidence.gradients.items() if gradient.wrong}
        if all(_has_right_sides(evidence, name) for name in wrong):
            return _reduced_at_each_use(evidence, wrong) or UnexplainedWeightGradients()
    of_model = evidence.calls.by_module.get("", ())
    is_of_loss = any(is_wrong_from_loss(evidence.calls, call) for call in of_model)
    all_moves = {move for record in evidence.dump.files.ranks.values() for move in record.moves}
    moves = {move for move in all_moves if move.op not in FROM_ONE_RANK}
    if cut or len(moves) != 1:
        return CutGraph(cut) if cut else UnexplainedBackward(is_of_loss, is_unseen=evidence.loss is None)
    (move,) = moves
    return UnexplainedBackward(is_of_loss, move.op, move.place, evidence.loss is None)


def _reduced_at_each_use(evidence: Evidence, modules: Iterable[str]) -> Cause | None:
    """Return that hooks reduce a shared module's gradients after each of its uses; None if they don't."""
    gradients = evidence.dump.by_name("step", "grad")
    record = next(iter(evidence.dump.files.ranks.values()))
    for module in sorted(modules):
        times = len(evidence.calls.by_module[module])
        bodies = [tensor.first.body for name, tensor in gradients.items() if name.rpartition(".")[0] == module]
        size = sum(math.prod(body.local_shape) * itemsize(body.dtype) for body in bodies)
        calls = [call for call in record.collectives if (call.module, call.backward) == (module, True)]
        if times > 1 and [(call.count, call.bytes) for call in calls] == [(times * len(bodies), times * size)]:
            return ReducedAtEachUse(module, calls[0].op, times)
    return None


def _has_right_sides(evidence: Evidence, module: str) -> bool:
    """Whether all that a module is given and returns in forward, and is given in backward, is right on every rank."""
    calls = evidence.calls.by_module.get(module, ())
    sides: tuple[What, ...] = ("input", "output", "gradient of output")
    return bool(calls) and all(call.state(side) == "right" for call in calls for side in sides)


def added_too_often(dump: Dump, comparison: Compared) -> Finding | None:
    """Return the finding if a vector of the model was added to every row too often, or not at all."""
    names, vectors = dump.vectors(comparison.reduced[comparison.wrong[0]].shape[-1:])
    added = vector_added(comparison, vectors) if names else None
    if added is None:
        return None
    name, times = names[added[0]], added[1]
    axes = size_in_words(comparison.mesh, Fraction(times + 1)) if times > 0 else ""
    over = f", once on every rank of {axes}" if axes else ""
    cause: Cause = RepeatedTerm(name, axes) if times > 0 else TermLeftOut(name)
    sentence = f"the {comparison.what} has {name} added {times + 1} times{over}"
    if comparison.role == "output" and len(comparison.wrong) < len(comparison.reduced) and times in (-1, 1):
        cause = TermOfSomeRanks(name, comparison.wrong, is_extra=times > 0)
        sentence += f" on {named_ranks(comparison.wrong)}, and once on the others"
    return replace(comparison.finding(cause, sentence), tensor=name)


def _where(comparison: Compared, rank: int, excess: NDArray[np.float64]) -> str:
    """Say how far values are off, how many are, and which comes first."""
    if not np.all(np.isfinite(excess)):
        values, what = comparison.reduced[rank], comparison.what
        odd = np.flatnonzero(~np.isfinite(values.ravel()))
        if not values.ndim:
            expected = number(float(comparison.wanted))
            return f"the {what} is {number(float(values))} on rank {rank}; {comparison.whose} is {expected}"
        first = int(comparison.regions[rank].flat_ids(comparison.wanted.shape).ravel()[odd[0]])
        place = f"{len(odd):,} of {values.size:,} elements on rank {rank}, the first at"
        where = f"{place} {index_of(first, comparison.wanted.shape)}"
        return f"the {what} is NaN or infinite in {where}; {comparison.whose} are finite"
    worst = magnitude(excess)
    size = magnitude(comparison.wanted)
    off = np.flatnonzero(~(np.abs(excess.ravel()) <= comparison.tolerance))
    text = f"the {comparison.what} is off by up to {number(worst)} on rank {rank} (largest value {number(size)}, "
    text += f"rounding allows {number(comparison.tolerance)})"
    if excess.ndim and len(off):
        at = int(comparison.regions[rank].flat_ids(comparison.wanted.shape).ravel()[off[0]])
        text += f": {len(off):,} of {excess.size:,} elements, the first at {index_of(at, comparison.wanted.shape)}"
    return text


def mixed_shards(comparison: Compared) -> Finding | None:
    """Return the finding if each rank has the sum or mean of parts that are different parts of the tensor."""
    mixed = mixed_over(comparison)
    if mixed is None:
        return _mixed_in_place_of(comparison)
    axis, kind = mixed
    parts = f"different parts of the {comparison.what}"
    return comparison.finding(MixedShards(axis), f"every rank has the {kind} over {axis} of {parts}")


def _mixed_in_place_of(comparison: Compared) -> Finding | None:
    """Return the finding if parts were mixed along one axis, and copies that differ along others were left alone."""
    lacking = comparison.copies_differ_along
    is_pending = comparison.claimed is not None and bool(comparison.claimed.partial)
    for op, kind in (("avg", "mean"), ("sum", "sum")) if lacking and not is_pending else ():
        reduced = comparison.over(lacking, op, comparison.reduced)
        mixed = mixed_over(replace(comparison, values=reduced)) if reduced.keys() == comparison.values.keys() else None
        if mixed is not None:
            axis, of_parts = mixed
            copies = f"copies of the {comparison.what} differ along {' and '.join(lacking)}"
            sentence = f"{copies}, and their {kind} is the {of_parts} over {axis} of different parts"
            cause = (
                MixedShards(axis, " and ".join(lacking)) if axis not in lacking else _mixed_in_groups(comparison, axis)
            )
            return comparison.finding(cause, sentence) if cause is not None else None
    return None


def _mixed_in_groups(comparison: Compared, axis: str) -> MixedShards | None:
    """Return the cause if ranks that have one gradient hold different parts, and those with one part differ."""
    holders = in_groups((comparison.regions[rank], rank) for rank in comparison.reduced)
    alike = in_groups((values.tobytes(), rank) for rank, values in comparison.reduced.items())
    groups = [tuple(ranks) for ranks in alike.values()]
    are_mixed = all(len({comparison.regions[rank] for rank in ranks}) == len(ranks) > 1 for ranks in groups)
    return MixedShards(axis, "", tuple(groups), tuple(map(tuple, holders.values()))) if are_mixed else None


def check_related(comparison: Compared) -> Finding | None:
    """Return the finding if all wrong ranks have what is wanted but for the same one relation."""
    if comparison.role == "scalar" or any(comparison.values[rank].size <= FEW for rank in comparison.wrong):
        return None  # fewer numbers are some other relation by chance
    links = the_only({comparison.changes_of(rank) for rank in comparison.wrong})
    link = the_only(links or ())
    explained = _explained(comparison, link) if link is not None else None
    return comparison.finding(explained[0], f"the {comparison.what} is {explained[1]}") if explained else None


def _explained(comparison: Compared, link: Relation) -> tuple[Cause, str] | None:
    """Return the cause that a relation of all wrong ranks shows, and what they have; None if it shows none."""
    of_all, whose = set(comparison.wrong) == set(comparison.reduced), comparison.whose
    if isinstance(link, Offset):
        due = {rank: comparison.wanted_of(rank) + link.number for rank in comparison.wrong}
        added = exponentials_of(comparison, link.number) or AddedNumber(link.number, comparison.wrong, of_all)
        text = f"{whose} {'plus' if link.number > 0 else 'minus'} {number(abs(link.number))}"
        return (added, text) if all(is_nearer(comparison, rank, due[rank]) for rank in due) else None
    if isinstance(link, Filled) and not link.value and comparison.role == "output":
        largest = max(abs(float(comparison.wanted.max())), abs(float(comparison.wanted.min())), math.ulp(0.0))
        text = f"0 in every element, and the largest of {whose} is {number(largest)}"
        return OnlyZerosThere(comparison.wrong, of_all), text
    if isinstance(link, Rounded) and factor_of_all([comparison], comparison.wrong) is None:
        return RoundedResult(link.dtype), f"{whose} rounded to {link.dtype}"
    if isinstance(link, Transposed):
        return TransposedResult(link.dims), f"{whose} with its dims in a different order"
    return None


def check_own_statistics(comparison: Compared, module_type: str = "") -> Finding | None:
    """Return the finding if each rank normalizes its own part, as the factors of slices or their means tell.

    Args:
        comparison: An output.
        module_type: The class of the module that returns it.
    """
    if comparison.role != "output":
        return None
    ndim, chains = comparison.wanted.ndim, comparison.claimed.chains if comparison.claimed is not None else ()
    # A norm keeps all dims but the features, or channels alone: an axis must split one that it takes numbers over.
    for dims in ((*range(ndim - 1),), (1,), (ndim - 1,)) if ndim > 1 else ():
        taken = {axis for dim, chain in enumerate(chains) if dim not in dims for axis in chain}
        axes = [axis for axis in comparison.mesh.axes if axis in taken]
        per = "row" if len(dims) > 1 else f"index of dim {dims[0]}"
        is_batch_norm = bool(axes) and module_type.startswith("BatchNorm")
        is_batch_norm &= all(is_normalized(comparison, rank, dims) for rank in comparison.wrong)
        batch_norm = module_type if is_batch_norm else ""
        cause = StatisticsOfPart(" and ".join(axes), batch_norm)
        factors = [factors_of_slices(comparison, rank, dims) for rank in comparison.wrong] if axes else []
        if factors and all(own is not None for own in factors):
            joined = np.concatenate([own for own in factors if own is not None])
            if float(joined.max() - joined.min()) > LEAST_STATISTIC:
                which = f"on each rank every {per} of the {comparison.what}"
                return comparison.finding(cause, f"{which} is the unsharded model's with a different factor and offset")
        if batch_norm:
            means = f"on each rank mean and spread of every {per} of the {comparison.what} over the rank's own part"
            return comparison.finding(cause, f"{means} are the unsharded model's over all parts")
    return None


def check_order(comparison: Compared) -> Finding | None:
    """Return the finding if every wrong rank has right slices of one dim at wrong indices, or another rank's part."""
    if not all(has_wanted_numbers(comparison, rank) for rank in comparison.wrong):
        return None  # to relate values takes longer
    for dim in range(comparison.wanted.ndim):
        moved = {rank: moved_slices(comparison, rank, dim) for rank in comparison.wrong}
        if all(any(at != index for at, index in slices.items()) for slices in moved.values()):
            return (
                _repeated(comparison, dim, moved)
                or _of_another_rank(comparison, dim, moved)
                or _in_another_order(comparison, dim, moved[comparison.wrong[0]])
            )
    return _of_another_rank(comparison)


def check_zero_slices(comparison: Compared) -> Finding | None:
    """Return the finding if a gradient is right but for slices of a dim that nothing came back to."""
    lost = lost_slices(comparison)
    if lost is None:
        return None
    dim, slices = lost
    where = f"{'slice' if len(slices) == 1 else 'slices'} {spans(slices)} of dim {dim}"
    sentence = f"the gradient of {where} is zero on {named_ranks(comparison.wrong)}, and right elsewhere"
    cause = SlicesWithoutGradient(comparison.name, spans(slices), dim, comparison.wrong)
    return comparison.finding(cause, sentence, module=comparison.name.rpartition(".")[0])


def _of_another_rank(comparison: Compared, dim: int = 0, moved: Mapping[int, Slices] | None = None) -> Finding | None:
    """Return the finding if wrong ranks, with moved slices of a dim, have parts that are due on others of an axis."""
    for axis in comparison.mesh.axes:
        sources = [_holder(comparison, axis, rank, dim, (moved or {}).get(rank, {})) for rank in comparison.wrong]
        if sources and None not in sources:
            held_text = f"the part that rank {sources[0]} along {axis} has in the unsharded model"
            cause = PartOfAnotherRank(axis, is_first=len(set(sources)) == 1)
            return comparison.finding(cause, f"the {comparison.what} of rank {comparison.wrong[0]} is {held_text}")
    return None


def _holder(comparison: Compared, axis: str, rank: int, dim: int, moved: Slices) -> int | None:
    """Return the rank along an axis that should hold the part that a rank holds."""
    region, links = comparison.held_by(rank) or (None, ())
    for other in comparison.mesh.group_of(rank, axis):
        due = comparison.regions.get(other)
        if isinstance(due, Region) and due != comparison.regions[rank] and (moved or not links):
            is_held = indices(due.dims[dim]).tolist() == [*moved.values()] if links else due == region
            if is_held and is_nearer(comparison, rank, comparison.wanted_of(other)):
                return other
    return None


def _repeated(comparison: Compared, dim: int, moved: Mapping[int, Slices]) -> Finding | None:
    """Return the finding if slices of the whole are on no rank, and others on two that have different parts."""
    regions = {rank: region for rank, region in comparison.regions.items() if isinstance(region, Region)}
    expected = {rank: {at: at for at in indices(region.dims[dim]).tolist()} for rank, region in regions.items()}
    places: dict[int, Slices] = {**expected, **moved}
    lost = {at for slices in expected.values() for at in slices} - {
        at for held in places.values() for at in held.values()
    }
    wrong = comparison.wrong[0]
    held_slices = set(places[wrong].values())
    others = (rank for rank in places if comparison.regions[rank] != comparison.regions[wrong])
    same_rank = next((rank for rank in others if held_slices & set(places[rank].values())), None)
    if not lost or same_rank is None:
        return None
    axes = " and ".join(comparison.mesh.axes_within((same_rank, wrong)))
    cause = RepeatedParts(axes, is_batch=(comparison.role, dim) == ("output", 0))
    return comparison.finding(
        cause,
        f"rank {wrong} has slices {spans(sorted(places[wrong].values()))} of dim {dim} of {comparison.whose} "
        f"{comparison.what} as rank {same_rank} has, and no rank has {spans(sorted(lost))}",
    )


def check_segments(evidence: Evidence, comparison: Compared) -> Finding | None:
    """Return the finding if each rank has the gradient of its part of every segment of a dim that is split as one.

    An activation whose gradient comes back in such an order would have made it.
    """
    chains = comparison.claimed.chains if comparison.claimed is not None and evidence.divergence is None else ()
    split = [dim for dim, chain in enumerate(chains) if chain]
    if len(split) != 1 or not all(has_wanted_numbers(comparison, rank) for rank in comparison.wrong):
        return None
    moved = {rank: moved_slices(comparison, rank, split[0]) for rank in comparison.wrong}
    return _by_segments(comparison, split[0], chains[split[0]], moved)


def _by_segments(
    comparison: Compared, dim: int, chain: Sequence[str | int], moved: Mapping[int, Slices]
) -> Finding | None:
    if len(chain) != 1 or not isinstance(chain[0], str):
        return None
    size, count = comparison.wanted.shape[dim], comparison.mesh.axis_size(chain[0])
    for segments in (one for one in SEGMENTS if not size % (one * count)):
        each, part = size // segments, size // (segments * count)
        starts = {rank: comparison.mesh.coord_of(rank)[comparison.mesh.axis_index(chain[0])] * part for rank in moved}
        due = {
            rank: [at for first in range(start, size, each) for at in range(first, first + part)]
            for rank, start in starts.items()
        }
        if all([slices[at] for at in sorted(slices)] == due[rank] for rank, slices in moved.items()):
            rank = comparison.wrong[0]
            text = (
                f"the gradient is that of {spans(due[rank])} along dim {dim} on rank {rank}: its parts of {segments} "
                "segments"
            )
            return comparison.finding(ReadBySegments(segments, chain[0], dim), text)
    return None


def _in_another_order(comparison: Compared, dim: int, moved: Slices) -> Finding:
    misplaced = [(at, index) for at, index in moved.items() if at != index]
    first, there = misplaced[0]
    return comparison.finding(
        JoinedOutOfOrder(),
        f"the {comparison.what} is {comparison.whose} with dim {dim} in a different order: on rank "
        f"{comparison.wrong[0]} {len(misplaced)} of {len(moved)} slices are out of place, position {first} holds the "
        f"slice that belongs at {there}",
    )


def check_other_layers(evidence: Evidence, comparison: Compared) -> Finding | None:
    """Return the finding if every wrong rank's gradient is that of another weight, which another rank has."""
    tied = (comparison.name, *evidence.tied_to(comparison.name))
    for axis in comparison.mesh.axes:
        for neighbor in evidence.wrong_gradients.near(comparison, axis):
            is_other = neighbor.name not in tied and neighbor.mesh == comparison.mesh
            if is_other and is_shared_with(comparison, neighbor, axis):
                names = (name for name in comparison.mesh.axes if name != axis)
                others = tuple(name for name in names if comparison.mesh.axis_size(name) > 1)
                which = f"that of {neighbor.name}, a different weight, on other ranks along {axis}"
                ranks = {*comparison.reduced, *neighbor.reduced}
                are_on_all = ranks <= evidence.weight_ranks(comparison.name) & evidence.weight_ranks(neighbor.name)
                cause = SkippedInReduction(axis) if are_on_all else MixedLayers(axis, others)
                return comparison.finding(cause, f"the gradient is equal to {which}")
    return None


def check_tied(evidence: Evidence, comparison: Compared) -> Finding | None:
    """Return the finding if the gradients of names that were one tensor were not summed, or not rightly."""
    names = evidence.tied_to(comparison.name)
    others = [evidence.gradients[name] for name in names if name in evidence.gradients]
    if not others:
        return None
    if not is_right_with(comparison, others):
        tied = next((other for other in others if is_of_other_parts(comparison, other)), None)
        if tied is None:
            return None
        return comparison.finding(
            TiedShardsMisaligned(),
            f"the gradient is equal to that of {tied.name} on other ranks, with which it was one tensor: but the local "
            "shards are different parts of it",
        )
    tied_names = " and ".join(other.name for other in others)
    if ratio_of(comparison) == Fraction(1, 1 + len(others)):
        uses = 1 + len(others)
        return comparison.finding(
            UnsummedTiedGradients(uses),
            f"the gradient is 1/{uses} of the unsharded model's: the gradients of its {uses} uses were averaged",
            kind="wrong-scale",
            details=(f"it is tied to {tied_names} on other ranks",),
        )
    return comparison.finding(
        UnsummedTiedGradients(),
        f"the gradient counts this name's use only: it is tied to {tied_names} on other ranks, and the sum of their "
        "gradients is the unsharded model's",
    )
