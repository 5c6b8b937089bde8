"""The elements of a tensor that a trace kept: all of them, or a sample along some dims."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.dump.arrays.sample import kept_indices, strides_between
from shardviz.relate.tolerance import ELEMENT, EXACT, TENSOR_FLOAT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardviz.layout.region import Ranges, Region


@dataclass(frozen=True)
class Kept:
    """Elements of a tensor.

    Attributes:
        shape: The tensor's own shape.
        at: The indices that are kept along each dim, rising.
        values: The elements at all of them.
        dtype: The tensor's dtype.
        device: Where it was.
        is_stepped: Whether it is a weight that optimizer steps before the traced one have rounded.
    """

    shape: tuple[int, ...]
    at: tuple[NDArray[np.int64], ...]
    values: NDArray[np.float64]
    dtype: str
    device: str = "cpu"
    is_stepped: bool = False

    @staticmethod
    def of(shape: tuple[int, ...], values: NDArray[np.float64], dtype: str, device: str = "cpu") -> Kept | None:
        """Return the elements that a sample of a tensor has; None if its shape is not a sample's."""
        strides = strides_between(shape, values.shape)
        if strides is None:
            return None
        at = (np.array(kept_indices(size, stride), np.int64) for size, stride in zip(shape, strides, strict=True))
        return Kept(shape, tuple(at), values, dtype, device)

    @property
    def tolerance(self) -> float:
        """How far rounding may take an element that is computed, relative to the largest one."""
        is_rounded = self.dtype == "float32" and not self.device.startswith("cpu")
        return TENSOR_FLOAT if is_rounded else ELEMENT.get(self.dtype, EXACT)

    @property
    def is_whole(self) -> bool:
        """Whether all elements are there."""
        return self.values.size == math.prod(self.shape)

    def with_values(self, values: NDArray[np.float64]) -> Kept:
        """Return the same elements with other values."""
        return replace(self, values=values)

    def reordered(self, order: NDArray[np.int64]) -> Kept:
        """Return the tensor with its rows in another order: row `order[i]` becomes row `i`."""
        inverse = np.argsort(order)
        at = inverse[self.at[0]]
        by = np.argsort(at)
        return replace(self, at=(at[by], *self.at[1:]), values=self.values[by])


def joined(parts: Sequence[Kept | None], dim: int = 0) -> Kept | None:
    """Concatenate micro-batches; return None if one is missing or they don't fit."""
    present = [part for part in parts if part is not None]
    if len(present) < len(parts) or len(parts) < 2:
        return present[0] if present and len(parts) == 1 else None
    return joined_along(dim, present)


def joined_along(dim: int, parts: Sequence[Kept]) -> Kept | None:
    """Return parts as one tensor, one behind the other along a dim; None if they do not fit."""
    first = parts[0]
    if len(first.shape) <= dim or not all(_fits(dim, first, part) for part in parts):
        return None
    starts = np.cumsum([0, *(part.shape[dim] for part in parts)])
    at = np.concatenate([part.at[dim] + start for part, start in zip(parts, starts[:-1], strict=True)])
    values = np.concatenate([part.values for part in parts], dim)
    shape = *first.shape[:dim], int(starts[-1]), *first.shape[dim + 1 :]
    return replace(first, shape=shape, at=(*first.at[:dim], at, *first.at[dim + 1 :]), values=values)


def _fits(dim: int, first: Kept, second: Kept) -> bool:
    """Whether two parts have the same elements along all dims but one."""
    return len(first.at) == len(second.at) and all(
        at == dim or (first.shape[at] == second.shape[at] and np.array_equal(first.at[at], second.at[at]))
        for at in range(len(first.at))
    )


def in_both(whole: Kept, shard: Kept, region: Region) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Return the elements kept of both a tensor and its part, the whole's first.

    Args:
        whole: The tensor.
        shard: The part.
        region: Where the part lies.

    Returns:
        Two arrays of one shape; None if no element is kept of both.
    """
    if whole.is_whole and shard.is_whole and all(len(spans) == 1 for spans in region.dims):
        return whole.values[tuple(slice(*spans[0]) for spans in region.dims)], shard.values
    whole_dims, shard_dims = [], []
    for spans, at, others in zip(region.dims, shard.at, whole.at, strict=True):
        indices = _in_whole(spans, at)
        places = np.minimum(np.searchsorted(others, indices), max(len(others) - 1, 0))
        is_there = others[places] == indices if len(others) else np.zeros(len(indices), bool)
        whole_dims.append(places[is_there])
        shard_dims.append(np.flatnonzero(is_there))
    if any(not len(one) for one in whole_dims):
        return None
    return whole.values[np.ix_(*whole_dims)], shard.values[np.ix_(*shard_dims)]


def places_in_whole(part: Kept, region: Region) -> tuple[NDArray[np.int64], ...]:
    """Return where in a tensor the elements are that are kept of a part of it, along each dim."""
    return tuple(_in_whole(spans, at) for spans, at in zip(region.dims, part.at, strict=True))


def _in_whole(spans: Ranges, at: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where indices of a part stand in the whole, of whose dim it has some ranges."""
    ends = np.cumsum([stop - start for start, stop in spans])
    which = np.searchsorted(ends, at, side="right")
    starts = np.array([start for start, _ in spans], np.int64)
    before = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    places: NDArray[np.int64] = starts[which] + at - before[which]
    return places
