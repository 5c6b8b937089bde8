"""`misordered` results: an output or a gradient with the right slices along a dim, in another order.

Parts that were gathered in the order in which they came, or tokens put back by a permutation where its inverse belongs:
every slice is the unsharded model's, the loss often is too, and what reads the result by position goes wrong.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.words import WHAT, claimed_text, spans
from shardviz.explain.forward import JoinedOutOfOrder, PartOfAnotherRank, RepeatedParts
from shardviz.explain.gradients import SlicesWithoutGradient
from shardviz.layout.region import Region, indices
from shardviz.relate.relations import Permuted
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardviz.check.step.compared import Compared
    from shardviz.explain.finding import Finding
    from shardviz.layout.mesh import Mesh
    from shardviz.layout.region import Ranges

    Slices = Mapping[int, int]
    """The index of the slice that stands at each index along a dim."""


def check_order(result: Compared) -> Finding | None:
    """Return the finding if every wrong rank has right slices of one dim at wrong indices, or another rank's part."""
    for dim in range(result.wanted.ndim):
        moved = {rank: _moved(result, rank, dim) for rank in result.wrong}
        if all(any(at != index for at, index in slices.items()) for slices in moved.values()):
            return (
                _repeated(result, dim, moved)
                or _of_another_rank(result)
                or _finding(result, dim, moved[result.wrong[0]])
            )
    return _of_another_rank(result)


def check_zero_slices(result: Compared) -> Finding | None:
    """Return the finding if a gradient is right but for slices of a dim that nothing came back to."""
    regions = _regions(result)
    for dim in range(result.wanted.ndim if regions.keys() == result.regions.keys() and result.wanted.ndim > 1 else 0):
        lost = {rank: _lost(result, rank, dim) for rank in result.wrong}
        if not all(lost.values()) or not _are_lost_everywhere(
            lost, {rank: regions[rank].dims[dim] for rank in regions}
        ):
            continue
        slices = sorted({at for places in lost.values() for at in places})
        word = "slice" if len(slices) == 1 else "slices"
        where = f"{word} {spans(slices)} of dim {dim}"
        sentence = f"the gradient of {where} is zero on {named_ranks(result.wrong)}, and right elsewhere"
        finding = SlicesWithoutGradient(result.name, spans(slices), dim, result.wrong).finding(
            result.name, result.wrong, sentence, claimed=claimed_text(result)
        )
        return replace(finding, module=result.name.rpartition(".")[0])
    return None


def _are_lost_everywhere(lost: Mapping[int, Sequence[int]], held: Mapping[int, Ranges]) -> bool:
    """Whether every rank that has one of the lost slices has lost it."""
    slices = {at for places in lost.values() for at in places}
    return all(slices & {*indices(ranges).tolist()} == {*lost.get(rank, ())} for rank, ranges in held.items())


def _lost(result: Compared, rank: int, dim: int) -> list[int]:
    """Return the slices of a rank's part that are zero and should not be, if all others are right; else none."""
    region, held, wanted = _regions(result)[rank], result.reduced[rank], result.wanted_of(rank)
    others = tuple(axis for axis in range(held.ndim) if axis != dim)
    off = np.any(np.abs(held - wanted) > result.tolerance, axis=others)
    is_zero = not np.any(held.take(np.flatnonzero(off), dim))
    return np.array(indices(region.dims[dim]))[off].tolist() if is_zero and not np.all(off) else []


def _of_another_rank(result: Compared) -> Finding | None:
    """Return the finding if wrong ranks have parts that are due on others along one axis."""
    for axis in result.mesh.axes:
        sources = {rank: _holder(result, axis, rank) for rank in result.wrong}
        others = {rank: other for rank, other in sources.items() if other is not None}
        if others and len(others) == len(sources):
            rank, other = next(iter(others.items()))
            return PartOfAnotherRank(axis, is_first=len(set(others.values())) == 1).finding(
                result.name,
                result.wrong,
                f"the {WHAT[result.role]} of rank {rank} is the part that rank {other} along {axis} has in the "
                "unsharded model",
                claimed=claimed_text(result),
            )
    return None


def _holder(result: Compared, axis: str, rank: int) -> int | None:
    """Return the rank along an axis that should hold the part that a rank holds."""
    region, links = result.held_by(rank) or (None, ())
    if region is None or links or region == result.regions[rank]:
        return None
    return next((other for other in result.mesh.group_of(rank, axis) if result.regions.get(other) == region), None)


def _moved(result: Compared, rank: int, dim: int) -> Slices:
    """Return which slice stands at each index of a rank's part; empty if they are not just in another order."""
    region, held = result.regions[rank], result.held_by(rank)
    if held is None or not isinstance(region, Region) or _differ_elsewhere(region, held[0], dim):
        return {}
    order = [link.order for link in held[1] if isinstance(link, Permuted) and link.dim == dim]
    if len(order) < len(held[1]) or len(order) > 1:
        return {}
    places, source = indices(region.dims[dim]).tolist(), indices(held[0].dims[dim]).tolist()
    slices = [order[0][at] for at in source] if order else source
    is_once = len(set(slices)) == len(slices)
    moved = [at for at, (place, origin) in enumerate(zip(places, slices, strict=True)) if place != origin]
    is_seen = all(result.reduced[rank].take(at, dim).any() for at in moved)  # zeros are no slice's own
    fits = is_once and is_seen and len(slices) > 1 < region.size // len(slices)
    return dict(zip(places, slices, strict=True)) if fits else {}


def _differ_elsewhere(region: Region, other: Region, dim: int) -> bool:
    sides = zip(region.dims, other.dims, strict=True)
    return region.shape != other.shape or any(own != its for at, (own, its) in enumerate(sides) if at != dim)


def _repeated(result: Compared, dim: int, moved: Mapping[int, Slices]) -> Finding | None:
    """Return the finding if slices of the whole are on no rank, and others on two that have different parts."""
    due = {rank: {at: at for at in indices(region.dims[dim]).tolist()} for rank, region in _regions(result).items()}
    places: dict[int, Slices] = {**due, **moved}
    lost = {at for slices in due.values() for at in slices} - {at for own in places.values() for at in own.values()}
    wrong = result.wrong[0]
    other = next((rank for rank in places if rank != wrong and _share_slices(result, places, rank, wrong)), None)
    if not lost or other is None:
        return None
    axes = " and ".join(axis for axis in result.mesh.axes if _apart_on(result.mesh, axis, other, wrong))
    cause = RepeatedParts(axes, is_batch=(result.role, dim) == ("output", 0))
    return cause.finding(
        result.name,
        result.wrong,
        f"rank {wrong} has slices {spans(sorted(places[wrong].values()))} of dim {dim} of {result.whose} "
        f"{WHAT[result.role]} as rank {other} has, and no rank has {spans(sorted(lost))}",
        claimed=claimed_text(result),
    )


def _regions(result: Compared) -> Mapping[int, Region]:
    return {rank: region for rank, region in result.regions.items() if isinstance(region, Region)}


def _apart_on(mesh: Mesh, axis: str, rank: int, other: int) -> bool:
    index = mesh.axis_index(axis)
    return mesh.coord_of(rank)[index] != mesh.coord_of(other)[index]


def _share_slices(result: Compared, places: Mapping[int, Slices], rank: int, other: int) -> bool:
    apart = result.regions[rank] != result.regions[other]
    return apart and bool(set(places[rank].values()) & set(places[other].values()))


def _finding(result: Compared, dim: int, moved: Slices) -> Finding:
    first, there = next((at, index) for at, index in moved.items() if at != index)
    return JoinedOutOfOrder().finding(
        result.name,
        result.wrong,
        f"the {WHAT[result.role]} is {result.whose} with dim {dim} in another order: on rank {result.wrong[0]} "
        f"{sum(at != index for at, index in moved.items())} of {len(moved)} slices are out of place, position {first} "
        f"holds the slice that belongs at {there}",
        claimed=claimed_text(result),
    )
