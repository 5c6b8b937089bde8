"""A region: the part of a tensor that something covers, as ranges of indices in each dim.

The currency between the parts: what a layout claims, what a dump holds and what a picture draws are all regions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

Range = tuple[int, int]
Ranges = tuple[Range, ...]

MAX_LAID_OUT = 1 << 27
"""A region of more elements than this is not laid out as an array."""

MAX_DIMS = 32
"""The dims that an array of numpy 1 can have."""


def merge_ranges(ranges: Iterable[Range]) -> Ranges:
    """Join adjacent ranges and drop empty ones; the order, which is that in memory, stays.

    Example:
        >>> merge_ranges([(4, 6), (6, 8), (3, 3), (0, 2)])
        ((4, 8), (0, 2))
    """
    joined: list[Range] = []
    for start, stop in ranges:
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def gaps_in(ranges: Iterable[Range], size: int) -> Ranges:
    """Return the ranges of a dim of some size that none of the given ones covers, rising.

    Example:
        >>> gaps_in([(6, 8), (1, 4), (2, 5)], 10)
        ((0, 1), (5, 6), (8, 10))
    """
    at, gaps = 0, []
    for start, stop in [*sorted(ranges), (size, size)]:
        gaps += [(at, start)] if start > at else []
        at = max(at, stop)
    return tuple(gaps)


def length(ranges: Ranges) -> int:
    """Return how many indices the ranges hold."""
    return sum(stop - start for start, stop in ranges)


def indices(ranges: Ranges) -> NDArray[np.int64]:
    """Return the ranges' indices, in order."""
    parts = [np.arange(start, stop, dtype=np.int64) for start, stop in ranges]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def index_of(element: int, shape: Sequence[int]) -> list[int]:
    """Return the index in `shape` of an element that is counted row-major from 0."""
    return [int(at) for at in np.unravel_index(element, shape)] if shape else []


def box_of(marked: NDArray[np.bool_]) -> Region | None:
    """Return the marked part of an array if it is a box of several elements, not all; else None.

    Example:
        >>> print(box_of(np.array([[False, True, True], [False, False, False]])))
        [0:1, 1:3]
    """
    count = int(marked.sum())
    if not 1 < count < marked.size:
        return None
    dims = range(marked.ndim)
    lines = [np.flatnonzero(marked.any(axis=tuple(other for other in dims if other != dim))) for dim in dims]
    box = Region(tuple(((int(line[0]), int(line[-1]) + 1),) for line in lines))
    return box if box.size == count else None


@dataclass(frozen=True, slots=True)
class Region:
    """The product of one list of index ranges per dim.

    Attributes:
        dims: For every dim the half-open ranges `(start, stop)` it covers, in the order in which they lie in memory.

    Example:
        >>> region = Region((((0, 2), (4, 6)), ((0, 3),)))
        >>> print(region, region.shape, region.size)
        [0:2+4:6, 0:3] (4, 3) 12
        >>> region.flat_ids((8, 3)).tolist()
        [[0, 1, 2], [3, 4, 5], [12, 13, 14], [15, 16, 17]]
    """

    dims: tuple[Ranges, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """Return the region that covers all of `shape`."""
        return cls(tuple(((0, size),) if size else () for size in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of indices covered in each dim: the shape of a shard that holds this region."""
        return tuple(map(length, self.dims))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def is_within(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor of `shape` has all of these elements."""
        ends = [max((stop for _, stop in ranges), default=0) for ranges in self.dims]
        return len(ends) == len(shape) and all(end <= size for end, size in zip(ends, shape, strict=True))

    def clipped(self, shape: Sequence[int]) -> Region:
        """Return what of the region a tensor of `shape` has.

        Example:
            >>> print(Region((((4, 8),), ((0, 2),))).clipped((7, 2)))
            [4:7, 0:2]
        """
        dims = (
            tuple((start, min(stop, size)) for start, stop in ranges if start < size)
            for ranges, size in zip(self.dims, shape, strict=True)
        )
        return Region(tuple(dims))

    def flat_ids(self, shape: Sequence[int]) -> NDArray[np.int64]:
        """Return every element's row-major index in `shape`, as an array of the region's shape.

        Raises:
            LayoutError: The region has more than `MAX_LAID_OUT` elements.
        """
        if self.size > MAX_LAID_OUT:
            raise LayoutError(f"shape {list(self.shape)} has {self.size:,} elements, more than {MAX_LAID_OUT:,}")
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        parts = [indices(ranges) * stride for ranges, stride in zip(self.dims, strides, strict=True)]
        return reduce(np.add.outer, parts, np.zeros((), np.int64))

    def __str__(self) -> str:
        if not self.size:
            return "[empty]"
        return "[" + ", ".join("+".join(f"{start}:{stop}" for start, stop in ranges) for ranges in self.dims) + "]"


BLOCK = 1 << 15
"""Elements compared at a time: they stay in the cache."""

MAX_RANGES = 1 << 16
"""A dim cut into more ranges than this is kept as an array."""


def region_of(ids: NDArray[Any], shape: Sequence[int], first: int = 1) -> Region | None:
    """Read the region off an array of ids.

    Args:
        ids: Ids, counted row-major from `first`, of any number type that holds them exactly.
        shape: The shape in which they count.
        first: The id of the first element.

    Returns:
        The region whose elements, in order, are the array's; None if it is not a product of index ranges.

    Example:
        >>> str(region_of(np.array([[9, 10], [13, 14]]), shape=(4, 4)))
        '[2:4, 0:2]'
    """
    if ids.ndim != len(shape):
        return None
    if not ids.size:
        return Region(tuple(((0, size),) if size else () for size in ids.shape))
    start = float(ids.flat[0]) - first
    if not 0 <= start < math.prod(shape) or start != int(start):
        return None
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    dims: list[Ranges] = []
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        line = ids[tuple(slice(None) if other == dim else 0 for other in range(len(shape)))]
        ranges = _ranges(line, int(start) // stride % size, stride)
        if ranges is None or min(begin for begin, _ in ranges) < 0 or max(end for _, end in ranges) > size:
            return None
        dims.append(ranges)
    region = Region(tuple(dims))
    is_line = max(ids.shape, default=1) == ids.size
    return region if is_line or _has_ids_of(ids, region, strides, first) else None


def _ranges(line: NDArray[Any], start: int, stride: int) -> Ranges | None:
    """Return the indices along a line as ranges, from steps of `stride` between neighbors."""
    ranges: list[Range] = []
    begin, at = start, 0
    for low in range(0, len(line) - 1, BLOCK):
        with np.errstate(invalid="ignore", over="ignore"):  # foreign values may be NaN or infinite
            steps = np.diff(line[low : low + BLOCK + 1])
        for position in np.flatnonzero(steps != stride).tolist():
            step = float(steps[position])
            if step % stride or step != step or abs(step) == math.inf or len(ranges) == MAX_RANGES:
                return None
            end = begin + low + position + 1 - at
            ranges.append((begin, end))
            begin, at = end - 1 + int(step) // stride, low + position + 1
    return (*ranges, (begin, begin + len(line) - at))


def _has_ids_of(ids: NDArray[Any], region: Region, strides: Sequence[int], first: int) -> bool:
    """Whether an array holds exactly a region's ids, compared block by block."""
    lines = [indices(ranges) * stride for ranges, stride in zip(region.dims, strides, strict=True)]
    columns = lines[-1].astype(ids.dtype)
    rows = np.full((), first, np.int64)
    for line in lines[:-1]:
        rows = np.add.outer(rows, line)
    rows = rows.reshape(-1).astype(ids.dtype)
    table = ids.reshape(len(rows), len(columns))
    width = min(len(columns), BLOCK)
    height = max(1, BLOCK // width)
    wanted = np.empty((height, width), ids.dtype)
    for top in range(0, len(rows), height):
        for left in range(0, len(columns), width):
            block = table[top : top + height, left : left + width]
            into = wanted[: block.shape[0], : block.shape[1]]
            np.add.outer(rows[top : top + height], columns[left : left + width], out=into)
            if not np.array_equal(into, block):
                return False
    return True
