"""Where blocks went: the paths of a permutation from where each block should be to where it is."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import islice, product
from typing import TYPE_CHECKING

import numpy as np

from shardviz.layout.region import merged
from shardviz.picture.model.holders import ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from shardviz.dump.dump import Tensor
    from shardviz.layout.region import Ranges
    from shardviz.picture.model.holders import Mask, Plane
    from shardviz.picture.model.sides import Sides

Path = tuple["Mask", ...]
"""Sets of ranks: the block that the first should hold is on the second, and so on; a cycle ends where it began."""

MOST_BLOCKS = 1024
MOST_SLICES = 64
"""How many blocks per dim, and slices of the other dims, are searched for a difference."""


@lru_cache(maxsize=64)
def paths(sides: Sides) -> tuple[Path, ...]:
    """Return the paths of all whole blocks that are misplaced; blocks that were split differently have none."""
    if not (sides.has_claimed and sides.has_held):
        return ()
    low = (1 << sides.shift) - 1
    blocks = [*_by_elements(sides).values(), *sides.holders.runs.values()]
    moved = {mask & low: mask >> sides.shift for mask in blocks if mask & low and mask >> sides.shift}
    moved = {claimed: held for claimed, held in moved.items() if claimed != held}
    begins = [mask for mask in moved if mask not in moved.values()]
    found = []
    for begin in [*begins, *moved]:
        if begin in moved:
            path = [begin]
            while path[-1] in moved:
                path.append(moved.pop(path[-1]))
            found.append(tuple(path))
    return tuple(found)


def _by_elements(sides: Sides) -> dict[tuple[Ranges, ...], Mask]:
    """Return the ranks of each part, whatever order they hold it in."""
    found: dict[tuple[Ranges, ...], Mask] = {}
    for region, mask in sides.holders.regions.items():
        elements = tuple(merged(sorted(ranges)) for ranges in region.dims)
        found[elements] = found.get(elements, 0) | mask
    return found


def path_text(path: Path) -> str:
    """Write a path: `1→4→2→1`."""
    return "→".join(map(ranks_text, path))


def first_difference(sides: Sides, plane: Plane) -> tuple[int, ...] | None:
    """Return the first element that is not where it should be; the slices of a plane are searched in turn."""
    others = [dim for dim in range(len(plane.at)) if dim not in (plane.rows, plane.cols)]
    rows, cols = (_starts(sides, dim) for dim in (plane.rows, plane.cols))
    for at in islice(product(*(_starts(sides, dim).tolist() for dim in others)), MOST_SLICES):
        place = list(plane.at)
        for dim, index in zip(others, at, strict=True):
            place[dim] = index
        spans = [np.stack([starts, starts + 1], axis=-1) for starts in (rows, cols)]
        window = sides.holders.window(replace(plane, at=tuple(place)), *spans)
        different = np.array([sides.cell(masks).different for masks in window.masks])[window.codes]
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
        The index of the element that is there; None where the rank's shard is not a product of ranges, or is shorter.
    """
    shard = tensor.shards.get(rank)
    if shard is None or shard.held is None or shard.layout is None or shard.layout.flat is not None:
        return None
    claimed = shard.layout.region(shard.layout.mesh.coord_of(rank))
    found = []
    for at, says, has in zip(index, claimed.dims, shard.held.dims, strict=True):
        local = next((before + at - start for before, start, stop in _counted(says) if start <= at < stop), -1)
        there = next((start + local - n for n, start, stop in _counted(has) if n <= local < n + stop - start), None)
        if local < 0 or there is None:
            return None
        found.append(there)
    return tuple(found)


def _counted(ranges: Ranges) -> Iterator[tuple[int, int, int]]:
    """Yield each range with the number of indices before it."""
    before = 0
    for start, stop in ranges:
        yield before, start, stop
        before += stop - start


def _starts(sides: Sides, dim: int) -> NDArray[np.int64]:
    return sides.holders.edges(dim)[:-1][:MOST_BLOCKS]
