"""Whole tensors of a job, put together from ranks' parts along the axes of its mesh.

Plain activations do not say how they are split. So every way is tried that the parts themselves allow: equal parts
are copies, others stand behind each other along a dim, or are terms of a sum. The other job says which way is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.trace.traces import Kept, float_of, joined_along, places_in_whole
from shardviz.layout.placements import Partial, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardviz.layout.candidates import Placements
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Coord, Mesh
    from shardviz.layout.placements import Placement
    from shardviz.layout.region import Region

    Parts = Mapping[Coord, Kept]
    Placing = Callable[[int, Sequence[Sequence[Kept]]], Sequence[Placement]]


@dataclass(frozen=True, slots=True)
class Together:
    """One way to put a tensor together.

    Attributes:
        way: How ranks share it along each axis.
        values: The whole.
    """

    way: Placements
    values: Kept


def together(parts: Mapping[int, Kept], mesh: Mesh, *, is_exact: bool = False) -> Iterator[Together]:
    """Yield the ways to put a tensor together, those without sums first.

    Args:
        parts: What each rank has; ranks that have none of it, as those of other stages, are left out.
        mesh: The job's mesh.
        is_exact: Whether copies are equal bit by bit and nothing is a sum, as with weights.
    """

    def placements(axis: int, groups: Sequence[Sequence[Kept]]) -> Sequence[Placement]:
        if all(_are_copies(group, is_exact=is_exact) for group in groups):
            return [Replicate()]
        return [*(Shard(dim) for dim in range(len(groups[0][0].shape))), *([] if is_exact else [Partial("sum")])]

    ways = _merged(_by_coord(parts, mesh), mesh.ndim - 1, (), placements)
    yield from sorted(ways, key=lambda one: sum(isinstance(placement, Partial) for placement in one.way))


def put_as(parts: Mapping[int, Kept], mesh: Mesh, way: Placements) -> Kept | None:
    """Return a tensor put together in one way; None if parts do not fit, or copies are not equal."""

    def placements(axis: int, groups: Sequence[Sequence[Kept]]) -> Sequence[Placement]:
        is_copied = isinstance(way[axis], Replicate)
        return [] if is_copied and not all(_are_copies(group, is_exact=False) for group in groups) else [way[axis]]

    return next((one.values for one in _merged(_by_coord(parts, mesh), mesh.ndim - 1, (), placements)), None)


def _by_coord(parts: Mapping[int, Kept], mesh: Mesh) -> Parts:
    return {mesh.coord_of(rank): part for rank, part in parts.items() if rank in mesh}


def _merged(parts: Parts, axis: int, way: Placements, placements: Placing) -> Iterator[Together]:
    """Put parts together along an axis and all before it."""
    if axis < 0:
        yield from (Together(way, whole) for whole in parts.values())
        return
    groups: dict[Coord, list[Kept]] = {}
    for coord in sorted(parts):
        groups.setdefault(coord[:axis], []).append(parts[coord])
    for placement in placements(axis, list(groups.values())) if groups else ():
        joined = {coord: _joined(group, placement) for coord, group in groups.items()}
        whole = {coord: one for coord, one in joined.items() if one is not None}
        if len(whole) == len(groups):
            yield from _merged(whole, axis - 1, (placement, *way), placements)


def _are_copies(group: Sequence[Kept], *, is_exact: bool) -> bool:
    first = group[0]
    near = 0.0 if is_exact else first.tolerance * float_of(first)
    return all(
        copy.shape == first.shape
        and copy.values.shape == first.values.shape
        and bool(np.all((np.abs(copy.values - first.values) <= near) | (copy.values == first.values)))
        for copy in group[1:]
    )


def _joined(group: Sequence[Kept], placement: Placement) -> Kept | None:
    if isinstance(placement, Shard):
        return joined_along(placement.dim, group)
    if isinstance(placement, Replicate):
        return group[0]
    if len({(part.shape, part.values.shape) for part in group}) > 1:
        return None
    return group[0].with_values(np.sum([part.values for part in group], axis=0))


def put_together(parts: Mapping[int, Kept], layouts: Mapping[int, Layout]) -> Kept | None:
    """Return the whole of a tensor whose placements claim what each rank has.

    Returns:
        The elements that were kept; None if parts are not as claimed, leave gaps, or copies are not equal.
    """
    layout = next(iter(layouts.values()))
    regions = {rank: layouts[rank].region(layouts[rank].mesh.coord_of(rank)) for rank in parts}
    if any(regions[rank].shape != part.shape for rank, part in parts.items()):
        return None
    whole = _overlaid(layout.index_shape, [(part, regions[rank]) for rank, part in parts.items()])
    if whole is None or layout.flat is None:
        return whole
    shape = layout.tensor_shape
    return Kept.of(shape, whole.values.reshape(shape), whole.dtype) if whole.is_whole else None


def _overlaid(shape: tuple[int, ...], parts: Sequence[tuple[Kept, Region]]) -> Kept | None:
    places = [places_in_whole(part, region) for part, region in parts]
    at = tuple(np.unique(np.concatenate(of_dim)) for of_dim in zip(*places, strict=True))
    values = np.full(tuple(map(len, at)), np.nan)
    for (shard, _), indices in zip(parts, places, strict=True):
        where = np.ix_(*(np.searchsorted(every, some) for every, some in zip(at, indices, strict=True)))
        before, near = values[where], shard.tolerance * float_of(shard)
        if np.any(np.abs(before - shard.values) > near):
            return None
        values[where] = shard.values
    first = parts[0][0]
    return None if np.any(np.isnan(values)) else Kept(shape, at, values, first.dtype, first.device)
