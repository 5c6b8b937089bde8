"""`misordered` results: an output or a gradient with the right slices along a dim, in another order.

Parts that were gathered in the order in which they came, or tokens put back by a permutation where its inverse belongs:
every slice is the unsharded model's, the loss often is too, and what reads the result by position goes wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.step.words import spans
from shardviz.explain.step.forward import JoinedOutOfOrder, PartOfAnotherRank, RepeatedParts
from shardviz.explain.step.gradients import SlicesWithoutGradient
from shardviz.layout.region import Region, indices
from shardviz.relate.measures import has_wanted_numbers, lost_slices, moved_slices
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardviz.check.step.comparison import Compared
    from shardviz.explain.finding import Finding
    from shardviz.relate.measures import Slices


def check_order(comparison: Compared) -> Finding | None:
    """Return the finding if every wrong rank has right slices of one dim at wrong indices, or another rank's part."""
    if not all(has_wanted_numbers(comparison, rank) for rank in comparison.wrong):
        return None  # to relate values takes longer
    for dim in range(comparison.wanted.ndim):
        moved = {rank: moved_slices(comparison, rank, dim) for rank in comparison.wrong}
        if all(any(at != index for at, index in slices.items()) for slices in moved.values()):
            return (
                _repeated(comparison, dim, moved)
                or _of_another_rank(comparison)
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


def _of_another_rank(comparison: Compared) -> Finding | None:
    """Return the finding if wrong ranks have parts that are due on others along one axis."""
    for axis in comparison.mesh.axes:
        sources = {rank: _holder(comparison, axis, rank) for rank in comparison.wrong}
        others = {rank: other for rank, other in sources.items() if other is not None}
        if others and len(others) == len(sources):
            rank, source = next(iter(others.items()))
            held_text = f"the part that rank {source} along {axis} has in the unsharded model"
            cause = PartOfAnotherRank(axis, is_first=len(set(others.values())) == 1)
            return comparison.finding(cause, f"the {comparison.what} of rank {rank} is {held_text}")
    return None


def _holder(comparison: Compared, axis: str, rank: int) -> int | None:
    """Return the rank along an axis that should hold the part that a rank holds."""
    region, links = comparison.held_by(rank) or (None, ())
    if region is None or links or region == comparison.regions[rank]:
        return None
    return next(
        (other for other in comparison.mesh.group_of(rank, axis) if comparison.regions.get(other) == region), None
    )


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


def _in_another_order(comparison: Compared, dim: int, moved: Slices) -> Finding:
    misplaced = [(at, index) for at, index in moved.items() if at != index]
    first, there = misplaced[0]
    return comparison.finding(
        JoinedOutOfOrder(),
        f"the {comparison.what} is {comparison.whose} with dim {dim} in a different order: on rank "
        f"{comparison.wrong[0]} {len(misplaced)} of {len(moved)} slices are out of place, position {first} holds the "
        f"slice that belongs at {there}",
    )
