"""Numbers as they lie in a rank's memory, beside those that it should hold or those of another copy."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.check.order.as_claimed import claimed_dims
from shardviz.check.values.copies import copies_of
from shardviz.dump.arrays.ids import ID_NONE
from shardviz.dump.content import leaves
from shardviz.errors import DumpError, ShardvizError
from shardviz.layout.region import Region, indices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardviz.dump.dump import Dump, Shard, Tensor
    from shardviz.layout.region import Ranges

    Numbers = NDArray[Any]


SAMPLE = 16
"""How many rows and columns decide the width of a column of values."""


@dataclass(frozen=True)
class Memory(ABC):
    """One local tensor as it lies in memory, as a grid: the last dim to the right, the others downwards.

    Attributes:
        title: What its numbers are.
        shape: The local shape.
    """

    title: str
    shape: tuple[int, ...]

    @cached_property
    def num_columns(self) -> int:
        """Numbers in a row."""
        return self.shape[-1] if self.shape else 1

    @cached_property
    def num_rows(self) -> int:
        """Rows."""
        return math.prod(self.shape[:-1])

    @abstractmethod
    def keys(self, row: int, first: int, count: int) -> Numbers:
        """Return what some numbers of a row are compared by."""

    @abstractmethod
    def text(self, key: Any) -> str:
        """Write one number."""

    @property
    @abstractmethod
    def width(self) -> int:
        """The characters of the longest number, as far as that can be known without writing all."""

    def row(self, row: int, first: int, count: int) -> list[str]:
        """Write some numbers of a row; none of a row that is not there."""
        return list(map(self.text, self.keys(row, first, count).tolist())) if row < self.num_rows else []

    def row_title(self, row: int) -> str:
        """Write the local index of a row: `1, 3`."""
        parts: list[int] = []
        for size in reversed(self.shape[:-1]):
            row, at = divmod(row, size)
            parts.insert(0, at)
        return ", ".join(map(str, parts))


@dataclass(frozen=True)
class Ids(Memory):
    """Which element of the whole tensor each number is; from 0, as an index or, of a tensor with one dim, a number.

    Attributes:
        whole: The shape of the whole tensor.
        dims: Where they are ranges in every dim, the global index of every local index.
        array: Otherwise the elements, row by row, from 0; below that what is not an element of this tensor.
    """

    whole: tuple[int, ...] = ()
    dims: tuple[NDArray[np.int64], ...] = ()
    array: NDArray[np.int64] | None = None

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        return tuple(math.prod(self.whole[dim + 1 :]) for dim in range(len(self.whole)))

    def keys(self, row: int, first: int, count: int) -> Numbers:
        """Return some elements of a row, counted row by row over the whole tensor."""
        if self.array is not None:
            return self.array[row, first : first + count]
        base, rest = 0, row
        for dim in range(len(self.shape) - 2, -1, -1):
            rest, at = divmod(rest, self.shape[dim])
            base += int(self.dims[dim][at]) * self._strides[dim]
        if not self.dims:
            return np.array([base])
        return base + self.dims[-1][first : first + count] * self._strides[-1]

    def text(self, key: Any) -> str:
        """Write an element: `6,0`."""
        if key < 0:
            return {-1: "zero", ID_NONE - 1: "no id"}.get(key, "other")
        parts: list[int] = []
        for size in reversed(self.whole):
            key, at = divmod(key, size)
            parts.insert(0, at)
        return ",".join(map(str, parts)) or "0"

    @property
    def width(self) -> int:
        """The characters of the last element, or of the words for what is none."""
        longest = len(",".join(str(max(size - 1, 0)) for size in self.whole))
        return max(longest, len("no id")) if self.array is not None else longest

    def find(self, index: Sequence[int]) -> tuple[int, ...] | None:
        """Return the local index at which an element of the whole tensor lies; None where it does not."""
        if self.array is not None:
            element = sum(at * stride for at, stride in zip(index, self._strides, strict=True))
            at_element = np.argwhere(self.array.reshape(self.shape) == element)
            return tuple(at_element[0].tolist()) if len(at_element) else None
        places = [np.flatnonzero(dim == at) for dim, at in zip(self.dims, index, strict=True)]
        return tuple(int(place[0]) for place in places) if all(map(len, places)) else None


@dataclass(frozen=True)
class Values(Memory):
    """The model's own values.

    Attributes:
        array: The values, row by row.
    """

    array: Numbers

    def keys(self, row: int, first: int, count: int) -> Numbers:
        """Return some values of a row."""
        return self.array[row, first : first + count]

    @property
    def width(self) -> int:
        """The characters of the longest of the first and the last numbers."""
        rows = {*range(min(SAMPLE, self.num_rows)), max(self.num_rows - 1, 0)}
        last = max(self.num_columns - SAMPLE, 0)
        return max((len(text) for row in rows for at in (0, last) for text in self.row(row, at, SAMPLE)), default=1)

    def text(self, key: Any) -> str:
        """Write a value in six digits."""
        return f"{key:.6g}" if isinstance(key, float) else str(key)


@dataclass(frozen=True)
class Beside:
    """Numbers beside those that they are compared with.

    Attributes:
        memory: The numbers of a rank.
        due: What they should be; None where nothing is known.
        at: The local index of the chosen element, if it is here.
    """

    memory: Memory
    due: Memory | None = None
    at: tuple[int, ...] | None = None

    def wrong(self, row: int, first: int, count: int) -> list[bool]:
        """Return which numbers of a row are not what they should be."""
        keys = self.memory.keys(row, first, count)
        if self.due is None:
            return [False] * len(keys)
        if row >= self.due.num_rows or self.due.shape[1:] != self.memory.shape[1:]:
            return [True] * len(keys)
        due = self.due.keys(row, first, count)
        short = [True] * (len(keys) - len(due))
        return [*map(_differ, keys.tolist(), due.tolist()), *short]

    @cached_property
    def cursor(self) -> tuple[int, int] | None:
        """The row and the column of the chosen element."""
        if self.at is None:
            return None
        row = 0
        for at, size in zip(self.at[:-1], self.memory.shape[:-1], strict=True):
            row = row * size + at
        return row, self.at[-1] if self.at else 0


def _differ(value: Any, other: Any) -> bool:
    """Whether two numbers differ; one that is not a number is equal to another."""
    return bool(value != other and (value == value or other == other))


def part_text(shard: Shard) -> str:
    """Write which part of a tensor a shard holds: `[2:4, 0:12]`; of one without ids the local shape: `[2, 12]`."""
    if not math.prod(shard.body.local_shape):
        return "nothing"
    if shard.held is not None:
        flat = shard.layout is not None and shard.layout.flat is not None
        return f"flat {shard.held}" if flat else str(shard.held)
    return "scattered ids" if shard.body.moment == "stamped" else str(list(shard.body.local_shape))


def ids_in_memory(dump: Dump, tensor: Tensor, rank: int, name: str = "") -> Ids:
    """Return the elements that a rank holds.

    Raises:
        DumpError: The dump has no ids of it, or they are too many to lay out.
    """
    shard = tensor.shards[rank]
    if tensor.moment != "stamped":
        raise DumpError(f"{tensor.name} was not stamped, so it has no ids")
    whole = shard.layout.index_shape if shard.layout else tensor.shape
    if shard.held is not None:
        return Ids("held", shard.held.shape, whole, tuple(map(indices, shard.held.dims)))
    ids = dump.local_ids(shard, name or tensor.names[0]) - 1
    return Ids("held", ids.shape, whole, array=ids.reshape(math.prod(ids.shape[:-1]), ids.shape[-1] if ids.ndim else 1))


def claimed_in_memory(shard: Shard) -> Ids | None:
    """Return the elements that a rank should hold by its placements; None for a plain tensor."""
    layout = shard.layout
    dims: tuple[Ranges, ...] | None = claimed_dims(layout).get(shard.rank) if layout is not None else None
    if layout is None or dims is None:
        return None
    return Ids("claimed", Region(dims).shape, layout.index_shape, tuple(map(indices, dims)))


def ids_beside(dump: Dump, tensor: Tensor, rank: int, name: str = "", index: Sequence[int] | None = None) -> Beside:
    """Return the elements that a rank holds beside those that it should hold.

    Args:
        dump: The dump.
        tensor: The tensor.
        rank: The rank.
        name: Which of the tensor's names.
        index: The chosen element.

    Raises:
        DumpError: The dump has no ids of it, or they are too many to lay out.
    """
    held = ids_in_memory(dump, tensor, rank, name)
    at = held.find(index) if index is not None and len(index) == len(held.whole) else None
    return Beside(held, claimed_in_memory(tensor.shards[rank]), at)


def values_beside(dump: Dump, tensor: Tensor, rank: int, name: str = "") -> Beside | None:
    """Return the values that a rank held, beside those of another copy: of one that differs, if there is one.

    They are of the latest moment that has them; None where the dump has none.
    """
    name = name or tensor.names[0]
    for moment in ("step", "initial"):
        other = dump.find(moment, tensor.role, name)
        if other is not None and rank in other.shards:
            values = _values(dump, other.shards[rank], name, f"rank {rank}, {moment}")
            if values is not None:
                return Beside(values, _copy(dump, other, rank, name, values))
    return None


def _values(dump: Dump, shard: Shard, name: str, title: str) -> Values | None:
    body = shard.body
    if 0 in body.local_shape or (body.values is None and not body.dense):
        return None
    columns = body.local_shape[-1] if body.local_shape else 1
    if body.values is not None:
        array: Numbers = np.array(leaves(body.values), dtype=object)
    else:
        try:
            array = dump.values(shard, name)
        except ShardvizError:
            return None
    return Values(title, body.local_shape, array.reshape(-1, columns))


def _copy(dump: Dump, tensor: Tensor, rank: int, name: str, values: Values) -> Values | None:
    """Return the values of another rank that should be equal, first of one whose values are not."""
    group = next((group for group in copies_of(tensor, dump.stamped.get(name)) if rank in map(_rank, group)), [])
    at = tensor.index(name)
    digest = tensor.shards[rank].digest(at)
    for shard in sorted(group, key=lambda shard: shard.digest(at) == digest):
        other = _values(dump, shard, name, f"copy on rank {shard.rank}") if shard.rank != rank else None
        if other is not None and other.shape == values.shape:
            return other
    return None


def _rank(shard: Shard) -> int:
    return shard.rank
