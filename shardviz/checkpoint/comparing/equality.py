"""Equality of stored or mapped tensors, block by block, and lookup by contents."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.checkpoint.live_job.job import JobTensor
from shardviz.checkpoint.live_job.reading import equals_job
from shardviz.checkpoint.maps.mapped_tensors import MappedTensor, pieces
from shardviz.errors import DumpError
from shardviz.groups import in_groups
from shardviz.layout.dtypes import itemsize
from shardviz.machine import cores
from shardviz.relate.casts import cast, is_narrower, is_whole
from shardviz.relate.values import BLOCK, is_alike, sampled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from shardviz.checkpoint.records import Tensor

    Turn = Callable[[NDArray[Any]], NDArray[Any]]


TILE = 256
"""Rows and columns that are compared at a time if one side lies across the other."""

PADDING = 32
"""Elements between the columns of a tile."""

SMALLEST_TURNED = 1 << 12
"""Elements of a matrix that is worth being cut into tiles."""

SHARED = 1 << 22
"""Elements of a matrix that several threads turn: numpy lets them run side by side."""

WORKERS = min(4, cores())


def narrower(dtype: str, second: str) -> str:
    """Return the type to which the other is rounded; never an integer type for floats."""
    if is_whole(dtype) != is_whole(second):
        return second if is_whole(dtype) else dtype
    return dtype if is_narrower(dtype, second) else second


def can_cast(first: str, second: str) -> bool:
    """Whether it is known how values of one of two types are rounded to the other."""
    narrow = narrower(first, second)
    sides = ((np.empty(0, f"<u{itemsize(dtype) or 1}"), dtype) for dtype in (first, second))
    return all(cast(bits, dtype, narrow) is not None for bits, dtype in sides)


def agree(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have equal shapes and values, after a cast if their dtypes differ.

    Raises:
        DumpError: One of them cannot be read.
    """
    for live, saved in ((first, second), (second, first)):
        if isinstance(live, JobTensor):
            return equals_job(live, saved)
    types = first.dtype, second.dtype
    if first.shape != second.shape or not can_cast(*types):
        return False
    if isinstance(second, MappedTensor) and not isinstance(first, MappedTensor):
        first, second, types = second, first, types[::-1]
    parts = pieces(first.node, second.bits) if isinstance(first, MappedTensor) else [(second.bits, first.bits)]
    turns = (
        None
        if types[0] == types[1]
        else (_converter(types[1], narrower(*types)), _converter(types[0], narrower(*types)))
    )
    return all(equal(view, bits, turns) for view, bits in parts)


def is_same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors agree; False if one of them cannot be read."""
    try:
        return agree(first, second)
    except (DumpError, OSError):
        return False


def _converter(dtype: str, narrow: str) -> Turn:
    def turned(bits: NDArray[Any]) -> NDArray[Any]:
        narrowed = cast(bits, dtype, narrow)
        assert narrowed is not None, "can_cast says so"
        return narrowed

    return turned


def equal(first: NDArray[Any], second: NDArray[Any], turns: tuple[Turn, Turn] | None = None) -> bool:
    """Whether two arrays of one shape are equal, block by block: what differs is soon found.

    Args:
        turns: What is done to each array before.
    """
    if first.size <= BLOCK or first.ndim == 0:
        return np.array_equal(*(first, second) if turns is None else (turns[0](first), turns[1](second)))
    near, far = _fastest(first), _fastest(second)
    if near != far and first.shape[near] * first.shape[far] >= SMALLEST_TURNED:
        first_turned, their = (np.moveaxis(side, (far, near), (-2, -1)) for side in (first, second))
        return _equal_transposed(first_turned, their, turns)
    if near == far:
        first, second = (np.moveaxis(side, near, -1) for side in (first, second))
    rows = BLOCK // max(first.size // len(first), 1)
    if not rows:
        return all(equal(own, their, turns) for own, their in zip(first, second, strict=True))
    starts = range(0, len(first), rows)
    return all(equal(first[at : at + rows], second[at : at + rows], turns) for at in starts)


def _fastest(array: NDArray[Any]) -> int:
    """Return the dim whose neighbors are nearest to each other in memory."""
    return min(range(array.ndim), key=lambda dim: (array.shape[dim] == 1, abs(array.strides[dim]), -dim))


def _equal_transposed(first: NDArray[Any], second: NDArray[Any], turns: tuple[Turn, Turn] | None) -> bool:
    """Whether two arrays are equal whose last two dims lie across each other, matrix by matrix."""
    if first.ndim == 2:
        return _equal_in_tiles(first, second, turns)
    return all(_equal_transposed(own, their, turns) for own, their in zip(first, second, strict=True))


def _equal_in_tiles(first: NDArray[Any], second: NDArray[Any], turns: tuple[Turn, Turn] | None) -> bool:
    """Whether a matrix equals a transposed one, read tile by tile to keep reads contiguous."""

    def is_equal(top: int) -> bool:
        places = [(slice(top, top + TILE), slice(left, left + TILE)) for left in range(0, first.shape[1], TILE)]
        return all(equal(first[place], _by_rows(second[place]), turns) for place in places)

    tops = range(0, first.shape[0], TILE)
    if first.size < SHARED:
        return all(map(is_equal, tops))
    pool = ThreadPoolExecutor(WORKERS)
    try:
        return all(pool.map(is_equal, tops))
    finally:
        pool.shutdown(cancel_futures=True)


def _by_rows(tile: NDArray[Any]) -> NDArray[Any]:
    """Return a tile that is stored by columns as one stored by rows.

    Its columns are brought near first. Where they come from they are often a power of two apart, and a processor keeps
    few such lines at a time.
    """
    rows, columns = tile.shape
    near = np.empty((columns, rows + PADDING), tile.dtype)[:, :rows]
    near[...] = tile.T
    return np.ascontiguousarray(near.T)


@dataclass
class ContentIndex:
    """Looks up tensors by their values."""

    by_shape: dict[tuple[int, ...], list[Tensor]]
    _samples: dict[int, NDArray[Any] | None] = field(default_factory=dict)
    _tables: dict[tuple[tuple[int, ...], str, str], dict[bytes, list[Tensor]]] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> ContentIndex:
        """Return tensors; their values are read only when one is looked for."""
        by_shape = in_groups((tensor.shape, tensor) for tensor in tensors)
        return cls(by_shape)

    def equal_to(self, tensor: Tensor) -> Iterator[Tensor]:
        """Yield the tensors that equal a given one, after a cast; none if the tensor is constant."""
        sample = sample_of(tensor)
        if sample is None:
            return
        for dtype in dict.fromkeys(dtype_of(candidate) for candidate in self.by_shape.get(tensor.shape, ())):
            if not dtype or not can_cast(dtype, tensor.dtype):
                continue
            narrow = narrower(dtype, tensor.dtype)
            key = cast(sample, tensor.dtype, narrow)
            assert key is not None, "`can_cast` says so"
            for candidate in self._table(tensor.shape, dtype, narrow).get(key.tobytes(), ()):
                if (
                    candidate is not tensor
                    and is_same(candidate, tensor)
                    and not (is_alike(tensor.bits) or is_alike(candidate.bits))
                ):
                    yield candidate

    def _table(self, shape: tuple[int, ...], dtype: str, narrow: str) -> dict[bytes, list[Tensor]]:
        key = shape, dtype, narrow
        if key not in self._tables:
            table: dict[bytes, list[Tensor]] = {}
            for tensor in self.by_shape[shape]:
                if dtype_of(tensor) != dtype:
                    continue
                if id(tensor) not in self._samples:
                    self._samples[id(tensor)] = sample_of(tensor)
                sample = self._samples[id(tensor)]
                turned = None if sample is None else cast(sample, dtype, narrow)
                if turned is not None:
                    table.setdefault(turned.tobytes(), []).append(tensor)
            self._tables[key] = table
        return self._tables[key]


def sample_of(tensor: Tensor) -> NDArray[Any] | None:
    """Return some of a tensor's values; None if it cannot be read, or has none."""
    bits = readable_bits(tensor)
    if bits is None or not bits.size:
        return None
    return sampled(bits if bits.ndim else bits.reshape(1))


def readable_bits(tensor: Tensor) -> NDArray[Any] | None:
    """Return a tensor's values as unsigned integers; None if it cannot be read."""
    try:
        return tensor.bits
    except (DumpError, OSError):
        return None


def dtype_of(tensor: Tensor) -> str:
    """Return a tensor's element type; empty if it is made of several."""
    try:
        return tensor.dtype
    except DumpError:
        return ""
