"""Stretches of a flattened tensor as boxes of the tensor itself: a stretch of rows, with the ends of rows beside it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

Box = tuple[tuple[int, ...], tuple[int, ...], int]
"""The offsets and sizes of a box, and the number of elements of the stretch before it."""


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that a stretch of a flattened tensor consists of, in order.

    Args:
        shape: The tensor's shape.
        start: The first element of the stretch.
        stop: The element behind it.

    Example:
        >>> list(boxes((3, 4), 2, 9))
        [((0, 2), (1, 2), 0), ((1, 0), (1, 4), 2), ((2, 0), (1, 1), 6)]
    """
    at = start
    while at < stop:
        offsets, sizes = _box(shape, at, stop - at)
        yield offsets, sizes, at - start
        at += math.prod(sizes)


def _box(shape: tuple[int, ...], at: int, most: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the largest box that begins at an element and is at most so many elements in a row."""
    steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    offsets = tuple(at // step % size for step, size in zip(steps, shape, strict=True))
    dim = next((dim for dim, step in enumerate(steps) if at % step == 0 and step <= most), len(shape))
    if dim == len(shape):
        return offsets, (1,) * len(shape)
    length = min(most // steps[dim], shape[dim] - offsets[dim])
    return offsets, (1,) * dim + (length,) + shape[dim + 1 :]
