"""The elements of a large tensor that a step's trace keeps: every 2nd, 4th, 8th... of a dim.

The indices kept with a wider stride are among those kept with a narrower one, and a part that begins at a multiple of
the stride keeps what the whole keeps of it. So a part can be laid beside the whole wherever both have an element.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

PHASE = 0x2B5D
"""Where the kept indices begin: its lowest bits, so that those of a wider stride are among those of a narrower one."""


def kept_indices(size: int, stride: int) -> range:
    """Return the indices that are kept along a dim."""
    return range(PHASE % stride, size, stride)


def strides_for(shape: Sequence[int], most: int) -> tuple[int, ...]:
    """Return strides that keep at most `most` elements; the longest dims are thinned first."""
    strides = [1] * len(shape)
    counts = list(shape)
    while math.prod(counts) > max(most, 1):
        dim = max(range(len(shape)), key=lambda one: counts[one])
        strides[dim] *= 2
        counts[dim] = len(kept_indices(shape[dim], strides[dim]))
    return tuple(strides)


def strides_between(shape: Sequence[int], sampled: Sequence[int]) -> tuple[int, ...] | None:
    """Return the strides that sample a tensor of one shape into a second; None if none do."""
    if len(shape) != len(sampled):
        return None
    strides = [_stride(size, count) for size, count in zip(shape, sampled, strict=True)]
    return None if 0 in strides else tuple(strides)


def _stride(size: int, count: int) -> int:
    """Return the stride that samples a number of indices; 0 if none does."""
    stride = 1
    while len(kept_indices(size, stride)) > count:
        stride *= 2
    return stride if len(kept_indices(size, stride)) == count else 0
