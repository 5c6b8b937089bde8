"""`misordered` results: an output or a gradient with the right slices along a dim, in another order.

Parts that were gathered in the order in which they came, or tokens put back by a permutation where its inverse belongs:
every slice is the unsharded model's, the loss often is too, and what reads the result by position goes wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.forward.slices import spans
from shardviz.check.step.words import WHAT, claimed_text
from shardviz.explain.forward import JoinedOutOfOrder, RepeatedParts
from shardviz.relate.orders import MAX_NUMBERS, matches
from shardviz.relate.values import slices_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from shardviz.check.step.compared import Compared, Elements
    from shardviz.explain.finding import Finding
    from shardviz.layout.mesh import Mesh
    from shardviz.layout.region import Region

Slices = dict[int, "NDArray[np.float64]"]
"""What belongs at indices along a dim of the whole, flattened."""


def check_order(one: Compared) -> Finding | None:
    """Return the finding if every wrong rank has right slices of one dim, each once, at wrong indices."""
    for dim in range(one.wanted.ndim):
        if one.wanted.size * one.wanted.shape[dim] > MAX_NUMBERS:
            continue
        parts = {one.regions[rank]: _slices_of(one, rank, dim) for rank in one.reduced}
        moved = {rank: _moved(one, rank, dim, parts) for rank in one.wrong}
        if all(any(at != index for at, index in own.items()) for own in moved.values()):
            return _repeated(one, dim, parts, moved) or _finding(one, dim, moved[one.wrong[0]])
    return None


def _repeated(
    one: Compared, dim: int, parts: Mapping[Region | Elements, Slices], moved: Mapping[int, dict[int, int]]
) -> Finding | None:
    """Return the finding if slices of the whole are on no rank, and others on two that have different parts."""
    places = {rank: moved.get(rank) or {at: at for at in parts[region]} for rank, region in one.regions.items()}
    lost = {at for slices in parts.values() for at in slices} - {at for own in places.values() for at in own.values()}
    wrong = one.wrong[0]
    other = next((rank for rank in places if rank != wrong and _share_slices(one, places, rank, wrong)), None)
    if not lost or other is None:
        return None
    axes = " and ".join(axis for axis in one.mesh.axes if _apart_on(one.mesh, axis, other, wrong))
    cause = RepeatedParts(axes, is_batch=(one.role, dim) == ("output", 0))
    return cause.finding(
        one.name,
        one.wrong,
        f"rank {wrong} has slices {spans(sorted(places[wrong].values()))} of dim {dim} of {one.whose} {WHAT[one.role]} "
        f"as rank {other} has, and no rank has {spans(sorted(lost))}",
        claimed=claimed_text(one),
    )


def _apart_on(mesh: Mesh, axis: str, rank: int, other: int) -> bool:
    index = mesh.axis_index(axis)
    return mesh.coord_of(rank)[index] != mesh.coord_of(other)[index]


def _share_slices(one: Compared, places: Mapping[int, dict[int, int]], rank: int, other: int) -> bool:
    apart = one.regions[rank] != one.regions[other]
    return apart and bool(set(places[rank].values()) & set(places[other].values()))


def _slices_of(one: Compared, rank: int, dim: int) -> Slices:
    """Return the slices that belong on a rank; none of a part that is not a product of ranges."""
    shape = one.wanted.shape
    ids = one.regions[rank].flat_ids(shape)
    if ids.ndim != len(shape) or not ids.size:
        return {}
    indices = np.unravel_index(slices_of(ids, dim)[:, 0], shape)[dim]
    return dict(zip(map(int, indices), slices_of(one.wanted_of(rank), dim), strict=True))


def _moved(one: Compared, rank: int, dim: int, parts: Mapping[Region | Elements, Slices]) -> dict[int, int]:
    """Return, by index along a dim, the index of the slice that stands there; empty where they are not such slices."""
    own = parts[one.regions[rank]]
    got = slices_of(one.reduced[rank], dim) if own else np.empty((0, 0))
    if len(got) < 2 or got.shape[1] < 2:  # any number may stand somewhere else by chance
        return {}
    belong = {at: part for slices in parts.values() for at, part in slices.items() if part.size == got.shape[1]} | own
    near = matches(got, np.stack(list(belong.values())), one.tolerance)
    if near is None or np.any(near.sum(axis=1) != 1) or np.any(near.sum(axis=0) > 1):
        return {}
    indices = list(belong)
    return {at: indices[int(column)] for at, column in zip(own, near.argmax(axis=1), strict=True)}


def _finding(one: Compared, dim: int, moved: dict[int, int]) -> Finding:
    first, there = next((at, index) for at, index in moved.items() if at != index)
    return JoinedOutOfOrder().finding(
        one.name,
        one.wrong,
        f"the {WHAT[one.role]} is {one.whose} with dim {dim} in another order: on rank {one.wrong[0]} "
        f"{sum(at != index for at, index in moved.items())} of {len(moved)} slices are out of place, position {first} "
        f"holds the slice that belongs at {there}",
        claimed=claimed_text(one),
    )
