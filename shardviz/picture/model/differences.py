"""Where something is wrong: the first element that a map marks, and what ranks hold in the place of another."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, product
from typing import TYPE_CHECKING

import numpy as np

from shardviz.layout.region import Region, indices

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from shardviz.dump.dump import Tensor
    from shardviz.layout.region import Ranges
    from shardviz.picture.model.holders import Plane
    from shardviz.picture.model.sides import Sides

MOST_BLOCKS = 1024
MOST_SLICES = 64
"""How many blocks per dim, and slices of the other dims, are searched for a difference."""


def first_difference(sides: Sides, plane: Plane) -> tuple[int, ...] | None:
    """Return the first element that a map marks; the slices of a plane are searched in turn."""
    others = [dim for dim in range(len(plane.at)) if dim not in (plane.rows, plane.cols)]
    rows, cols = (_starts(sides, dim) for dim in (plane.rows, plane.cols))
    for at in islice(product(*(_starts(sides, dim).tolist() for dim in others)), MOST_SLICES):
        place = list(plane.at)
        for dim, index in zip(others, at, strict=True):
            place[dim] = index
        spans = [np.stack([starts, starts + 1], axis=-1) for starts in (rows, cols)]
        window = sides.holders.window(replace(plane, at=tuple(place)), *spans)
        different = np.array([sides.cell(masks).is_wrong for masks in window.masks])[window.codes]
        if different.any():
            row, col = divmod(int(different.argmax()), len(cols))
            place[plane.rows], place[plane.cols] = int(rows[row]), int(cols[col])
            return tuple(place)
    return None


def found_in_place_of(tensor: Tensor, index: Sequence[int], rank: int) -> tuple[int, ...] | None:
    """Return the element that a rank holds in the place of another.

    Args:
        tensor: The tensor.
        index: The element that should be there.
        rank: A rank that holds it by the placements.

    Returns:
        The index of the element that is there; None if the rank's shard is not a product of ranges, or is shorter.
    """
    shard = tensor.shards.get(rank)
    if shard is None or shard.held is None or shard.layout is None or shard.layout.flat is not None:
        return None
    claimed = shard.layout.region(shard.layout.mesh.coord_of(rank))
    element = []
    for at, says, has in zip(index, claimed.dims, shard.held.dims, strict=True):
        local = next((before + at - start for before, start, stop in _counted(says) if start <= at < stop), -1)
        there = next((start + local - n for n, start, stop in _counted(has) if n <= local < n + stop - start), None)
        if local < 0 or there is None:
            return None
        element.append(there)
    return tuple(element)


def out_of_place(claimed: Region, held: Region) -> Region | None:
    """Return what two regions have in common at different places; where several dims are permuted, all in common.

    Where one dim is, that is exact: the other dims are the same on both.
    """
    moved, common = [], []
    for says, has in zip(claimed.dims, held.dims, strict=True):
        due, got = indices(says), indices(has)
        both, at, there = np.intersect1d(due, got, return_indices=True)
        moved.append(both[at != there])
        common.append(both)
    permuted = [dim for dim, found in enumerate(moved) if len(found)]
    if not permuted or not all(map(len, common)):
        return None
    chosen = [moved[dim] if permuted == [dim] else both for dim, both in enumerate(common)]
    return Region(tuple(stretches_of(found + 1) for found in chosen))


def stretches_of(ids: NDArray[np.int64]) -> Ranges:
    """Return ids, counted from 1, as rising ranges of row-major indices, leaving out values that are not ids."""
    indices = np.unique(ids[ids > 0]) - 1
    if not indices.size:
        return ()
    breaks = np.flatnonzero(np.diff(indices) > 1)
    starts, stops = np.append(indices[0], indices[breaks + 1]), np.append(indices[breaks] + 1, indices[-1] + 1)
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


def _counted(ranges: Ranges) -> Iterator[tuple[int, int, int]]:
    """Yield each range with the number of indices before it."""
    before = 0
    for start, stop in ranges:
        yield before, start, stop
        before += stop - start


def _starts(sides: Sides, dim: int) -> NDArray[np.int64]:
    return sides.holders.edges(dim)[:-1][:MOST_BLOCKS]
