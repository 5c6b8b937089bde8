"""What all coordinates of a mesh hold, computed at once, dim by dim."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from shardviz.layout.region import length
from shardviz.layout.splits import bind_chain, follow_chain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.layout.region import Ranges
    from shardviz.layout.splits import Chain

    Indices = NDArray[np.int64]

Sizes = tuple[tuple[str, int], ...]
"""The axes of a mesh, each with its ranks."""


@lru_cache(maxsize=64)
def parts_of(size: int, chain: Chain, sizes: Sizes) -> tuple[Ranges, ...]:
    """Return the indices that every position along a chain's axes holds, row-major on the mesh.

    Example:
        >>> parts_of(5, ("tp",), (("dp", 2), ("tp", 4)))
        (((0, 2),), ((2, 4),), ((4, 5),), ())
    """
    by_name = dict(sizes)
    axes = [axis for axis, _ in sizes if axis in chain]
    if all(isinstance(link, str) and link in by_name for link in chain):
        return _stretches(size, chain, by_name, axes)
    positions = product(*(range(by_name[axis]) for axis in axes))
    return tuple(
        follow_chain(size, bind_chain(chain, dict(zip(axes, place, strict=True)), by_name)) for place in positions
    )


def _stretches(size: int, chain: Chain, sizes: Mapping[str, int], axes: Sequence[str]) -> tuple[Ranges, ...]:
    """Follow a chain of axes at all positions at once: every part is one range."""
    shape = [sizes[axis] for axis in axes]
    start, stop = np.zeros(shape, np.int64), np.full(shape, size, np.int64)
    for link in chain:
        along = axes.index(str(link))
        place = np.arange(shape[along]).reshape([-1 if at == along else 1 for at in range(len(shape))])
        step = -(-(stop - start) // shape[along])
        start, stop = np.minimum(start + place * step, stop), np.minimum(start + (place + 1) * step, stop)
    pairs = zip(start.ravel().tolist(), stop.ravel().tolist(), strict=True)
    return tuple(((first, last),) if first < last else () for first, last in pairs)


@lru_cache(maxsize=1024)
def same_parts(size: int, chain: Chain, other: Chain, sizes: Sizes) -> bool:
    """Whether two chains give every coordinate the same indices of a dim."""
    if chain == other:
        return True
    parts, others = parts_of(size, chain, sizes), parts_of(size, other, sizes)
    numbers = (
        position_numbers(sizes, [axis for axis, _ in sizes if axis in chain]).tolist() for chain in (chain, other)
    )
    return all(parts[first] == others[second] for first, second in zip(*numbers, strict=True))


def lengths(size: int, chain: Chain, sizes: Sizes) -> Indices:
    """Return how many indices every coordinate of the mesh holds, row-major.

    Example:
        >>> lengths(5, ("tp",), (("dp", 2), ("tp", 4))).tolist()
        [2, 2, 1, 0, 2, 2, 1, 0]
    """
    parts = np.array([length(part) for part in parts_of(size, chain, sizes)], np.int64)
    found: Indices = parts[position_numbers(sizes, [axis for axis, _ in sizes if axis in chain])]
    return found


def position_numbers(sizes: Sizes, axes: Sequence[str]) -> Indices:
    """Number the positions along some axes, row-major; return one number a coordinate.

    Example:
        >>> position_numbers((("dp", 2), ("tp", 3)), ["tp"]).tolist()
        [0, 1, 2, 0, 1, 2]
    """
    shape = [size if axis in axes else 1 for axis, size in sizes]
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return np.broadcast_to(numbers, [size for _, size in sizes]).ravel()
