"""A rank's memory: its tensors, and the numbers of one, written only as they are shown."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.dump.content import leaves
from shardviz.errors import DumpError
from shardviz.layout.region import indices

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.dump.dump import Dump, Shard, Tensor

    from .document import Document


def entries_of_rank(document: Document, rank: int) -> list[int]:
    """Return the entries that a rank has a shard of."""
    return [index for index, entry in enumerate(document.entries) if rank in entry.tensor.shards]


def part_text(shard: Shard) -> str:
    """Write which part of a tensor a shard holds: `[2:4, 0:12]`; of one without ids the local shape: `[2, 12]`."""
    if not math.prod(shard.body.local_shape):
        return "nothing"
    if shard.held is not None:
        flat = shard.layout is not None and shard.layout.flat is not None
        return f"flat {shard.held}" if flat else str(shard.held)
    return "scattered ids" if shard.body.moment == "stamped" else str(list(shard.body.local_shape))


def parts_text(tensor: Tensor, shard: Shard) -> str:
    """Write which part of a tensor a shard holds; of identical layers how often: `80x [0:8, 0:8192]`."""
    count = len(tensor.names)
    return f"{count:,}x {part_text(shard)}" if count > 1 else part_text(shard)


@dataclass(frozen=True)
class Memory:
    """One local tensor's numbers as they lie in memory, as a grid: the last dim to the right, the others downwards.

    Attributes:
        what: The kind of numbers: ids, or values of a moment.
        shape: The local shape.
        dims: For ids in ranges, the global index of every local index, one array per dim.
        strides: For ids in ranges, the global strides.
        array: The numbers themselves otherwise.
    """

    what: str
    shape: tuple[int, ...]
    dims: tuple[NDArray[np.int64], ...] = ()
    strides: tuple[int, ...] = ()
    array: NDArray[Any] | None = None

    @cached_property
    def num_columns(self) -> int:
        """Numbers in a row."""
        return self.shape[-1] if self.shape else 1

    @cached_property
    def num_rows(self) -> int:
        """Rows."""
        return math.prod(self.shape[:-1])

    def row(self, row: int, first: int, count: int) -> list[str]:
        """Write some numbers of a row."""
        if self.array is not None:
            return list(map(_number, self.array[row, first : first + count].tolist()))
        base, rest = 1, row
        for dim in range(len(self.shape) - 2, -1, -1):
            rest, at = divmod(rest, self.shape[dim])
            base += int(self.dims[dim][at]) * self.strides[dim]
        if not self.dims:
            return [str(base)]
        return [str(base + number) for number in (self.dims[-1][first : first + count] * self.strides[-1]).tolist()]

    def row_title(self, row: int) -> str:
        """Write the local index of a row: `[1, 3]`."""
        parts: list[int] = []
        for size in reversed(self.shape[:-1]):
            row, at = divmod(row, size)
            parts.insert(0, at)
        return ", ".join(map(str, parts))


def ids_in_memory(dump: Dump, tensor: Tensor, rank: int) -> Memory:
    """Return the ids that a rank holds, counted from 1 within the tensor.

    Raises:
        DumpError: The dump has no ids of it, or they are too many to lay out.
    """
    shard = tensor.shards[rank]
    if tensor.moment != "stamped":
        raise DumpError(f"{tensor.name} was not stamped, so it has no ids")
    if shard.held is not None:
        shape = shard.layout.index_shape if shard.layout else tensor.shape
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return Memory("ids", shard.held.shape, tuple(indices(ranges) for ranges in shard.held.dims), strides)
    ids = dump.local_ids(shard, tensor.names[0])
    return Memory("ids", ids.shape, array=ids.reshape(math.prod(ids.shape[:-1]), ids.shape[-1] if ids.ndim else 1))


def values_in_memory(dump: Dump, tensor: Tensor, rank: int) -> Memory | None:
    """Return the real values that a rank held, of the latest moment that has them; None where the dump has none."""
    for moment in ("step", "initial"):
        for other in dump.at(moment):
            if other.role == tensor.role and tensor.names[0] in other.names and rank in other.shards:
                body = other.shards[rank].body
                if body.values is not None and 0 not in body.local_shape:
                    array = np.array(leaves(body.values), dtype=object)
                    columns = body.local_shape[-1] if body.local_shape else 1
                    return Memory(f"values, {moment}", body.local_shape, array=array.reshape(-1, columns))
    return None


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
