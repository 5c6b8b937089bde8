"""`misordered` results: an output or a gradient with the right slices along a dim, in another order.

Parts that were gathered in the order in which they came, or tokens put back by a permutation where its inverse belongs:
every slice is the unsharded model's, the loss often is too, and what reads the result by position goes wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.step.words import spans
from shardviz.explain.forward import JoinedOutOfOrder, PartOfAnotherRank, RepeatedParts
from shardviz.explain.gradients import SlicesWithoutGradient
from shardviz.layout.region import Region, indices
from shardviz.relate.measures import lost_slices, moved_slices
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardviz.check.step.compared import Compared
    from shardviz.explain.finding import Finding
    from shardviz.relate.measures import Slices


def check_order(result: Compared) -> Finding | None:
    """Return the finding if every wrong rank has right slices of one dim at wrong indices, or another rank's part."""
    for dim in range(result.wanted.ndim):
        moved = {rank: moved_slices(result, rank, dim) for rank in result.wrong}
        if all(any(at != index for at, index in slices.items()) for slices in moved.values()):
            return (
                _repeated(result, dim, moved)
                or _of_another_rank(result)
                or _in_another_order(result, dim, moved[result.wrong[0]])
            )
    return _of_another_rank(result)


def check_zero_slices(result: Compared) -> Finding | None:
    """Return the finding if a gradient is right but for slices of a dim that nothing came back to."""
    lost = lost_slices(result)
    if lost is None:
        return None
    dim, slices = lost
    where = f"{'slice' if len(slices) == 1 else 'slices'} {spans(slices)} of dim {dim}"
    sentence = f"the gradient of {where} is zero on {named_ranks(result.wrong)}, and right elsewhere"
    cause = SlicesWithoutGradient(result.name, spans(slices), dim, result.wrong)
    return result.finding(cause, sentence, module=result.name.rpartition(".")[0])


def _of_another_rank(result: Compared) -> Finding | None:
    """Return the finding if wrong ranks have parts that are due on others along one axis."""
    for axis in result.mesh.axes:
        sources = {rank: _holder(result, axis, rank) for rank in result.wrong}
        others = {rank: other for rank, other in sources.items() if other is not None}
        if others and len(others) == len(sources):
            rank, other = next(iter(others.items()))
            part = f"the part that rank {other} along {axis} has in the unsharded model"
            cause = PartOfAnotherRank(axis, is_first=len(set(others.values())) == 1)
            return result.finding(cause, f"the {result.what} of rank {rank} is {part}")
    return None


def _holder(result: Compared, axis: str, rank: int) -> int | None:
    """Return the rank along an axis that should hold the part that a rank holds."""
    region, links = result.held_by(rank) or (None, ())
    if region is None or links or region == result.regions[rank]:
        return None
    return next((other for other in result.mesh.group_of(rank, axis) if result.regions.get(other) == region), None)


def _repeated(result: Compared, dim: int, moved: Mapping[int, Slices]) -> Finding | None:
    """Return the finding if slices of the whole are on no rank, and others on two that have different parts."""
    regions = {rank: region for rank, region in result.regions.items() if isinstance(region, Region)}
    due = {rank: {at: at for at in indices(region.dims[dim]).tolist()} for rank, region in regions.items()}
    places: dict[int, Slices] = {**due, **moved}
    lost = {at for slices in due.values() for at in slices} - {at for held in places.values() for at in held.values()}
    wrong = result.wrong[0]
    own = set(places[wrong].values())
    others = (rank for rank in places if result.regions[rank] != result.regions[wrong])
    other = next((rank for rank in others if own & set(places[rank].values())), None)
    if not lost or other is None:
        return None
    axes = " and ".join(result.mesh.axes_within((other, wrong)))
    cause = RepeatedParts(axes, is_batch=(result.role, dim) == ("output", 0))
    return result.finding(
        cause,
        f"rank {wrong} has slices {spans(sorted(places[wrong].values()))} of dim {dim} of {result.whose} "
        f"{result.what} as rank {other} has, and no rank has {spans(sorted(lost))}",
    )


def _in_another_order(result: Compared, dim: int, moved: Slices) -> Finding:
    first, there = next((at, index) for at, index in moved.items() if at != index)
    return result.finding(
        JoinedOutOfOrder(),
        f"the {result.what} is {result.whose} with dim {dim} in a different order: on rank {result.wrong[0]} "
        f"{sum(at != index for at, index in moved.items())} of {len(moved)} slices are out of place, position {first} "
        f"holds the slice that belongs at {there}",
    )
