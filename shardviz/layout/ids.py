"""Index ranges from an array of ids, in one pass over its bytes.

Everything after this works on ranges.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.layout.region import Range, Ranges, Region, indices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

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
