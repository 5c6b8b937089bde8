"""What one rank holds: its tensors as lines, and the numbers of one as they lie in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.check.order.case import claimed_dims
from shardviz.check.values.copies import copies_of
from shardviz.dump.arrays import ID_NONE
from shardviz.dump.validate import leaves
from shardviz.errors import DumpError, ShardvizError
from shardviz.layout.region import Region, index_of, indices
from shardviz.picture.model.holders import ranks_of, ranks_text
from shardviz.picture.model.palette import WRONG
from shardviz.picture.model.sides import CLAIMED_AND_HELD
from shardviz.text import bytes_text, cut_at_comma

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardviz.dump.dump import Dump, Shard, Tensor
    from shardviz.layout.mesh import Mesh
    from shardviz.picture.model.sides import Cell, Sides

    Numbers = NDArray[Any]


SAMPLE = 16
"""How many rows and columns decide the width of a column of values."""

MOST_HOVERED = 40
"""Characters of the ranks in a tooltip."""

MOST_LOOKED_AT = 32
"""Ranks whose own parts are looked into while a key is typed."""


@dataclass(frozen=True)
class Memory:
    """One local tensor as it lies in memory, as a grid: the last dim to the right, the others downwards.

    Attributes:
        title: What its numbers are.
        shape: The local shape.
        array: The numbers, row by row.
    """

    title: str
    shape: tuple[int, ...]
    array: Numbers | None = None

    @property
    def num_columns(self) -> int:
        """Numbers in a row."""
        return self.shape[-1] if self.shape else 1

    @property
    def num_rows(self) -> int:
        """Rows."""
        return math.prod(self.shape[:-1])

    def keys(self, row: int, first: int, count: int) -> Numbers:
        """Return what some numbers of a row are compared by."""
        assert self.array is not None, "subclasses may do without"
        return self.array[row, first : first + count]

    def text(self, key: Any) -> str:
        """Write a number, in six digits."""
        return f"{key:.6g}" if isinstance(key, float) else str(key)

    @cached_property
    def width(self) -> int:
        """The characters of the longest of the first and the last numbers."""
        rows = {*range(min(SAMPLE, self.num_rows)), max(self.num_rows - 1, 0)}
        last = max(self.num_columns - SAMPLE, 0)
        return max((len(text) for row in rows for at in (0, last) for text in self.row(row, at, SAMPLE)), default=1)

    def row(self, row: int, first: int, count: int) -> list[str]:
        """Write some numbers of a row; none of a row that is not there."""
        return list(map(self.text, self.keys(row, first, count).tolist())) if row < self.num_rows else []

    def row_title(self, row: int) -> str:
        """Write the local index of a row: `1, 3`."""
        return ", ".join(map(str, index_of(row, self.shape[:-1])))


@dataclass(frozen=True)
class Ids(Memory):
    """Which element of the whole tensor each number is; from 0, as an index or, of a tensor with one dim, a number.

    Attributes:
        array: The elements, from 0; below that what is not an element of this tensor.
        dims: Instead of an array, if they are ranges in every dim, the global index of every local index.
    """

    whole: tuple[int, ...] = ()
    dims: tuple[NDArray[np.int64], ...] = ()

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        return tuple(math.prod(self.whole[dim + 1 :]) for dim in range(len(self.whole)))

    def keys(self, row: int, first: int, count: int) -> Numbers:
        """Return some elements of a row, counted row by row over the whole tensor."""
        if self.array is not None:
            return super().keys(row, first, count)
        if not self.dims:
            return np.array([0])
        place = zip(self.dims, index_of(row, self.shape[:-1]), self._strides, strict=False)
        base = sum(int(dim[at]) * stride for dim, at, stride in place)
        return base + self.dims[-1][first : first + count] * self._strides[-1]

    def text(self, key: Any) -> str:
        """Write an element: `6,0`."""
        if key < 0:
            return {-1: "zero", ID_NONE - 1: "no id"}.get(key, "other")
        return ",".join(map(str, index_of(key, self.whole))) or "0"

    @cached_property
    def width(self) -> int:
        """The characters of the last element, or of the words for what is none."""
        longest = len(",".join(str(max(size - 1, 0)) for size in self.whole))
        return max(longest, len("no id")) if self.array is not None else longest

    def find(self, index: Sequence[int]) -> tuple[int, ...] | None:
        """Return the local index at which an element of the whole tensor lies; None if it does not."""
        if self.array is not None:
            element = sum(at * stride for at, stride in zip(index, self._strides, strict=True))
            at_element = np.argwhere(self.array.reshape(self.shape) == element)
            return tuple(at_element[0].tolist()) if len(at_element) else None
        places = [np.flatnonzero(dim == at) for dim, at in zip(self.dims, index, strict=True)]
        return tuple(int(place[0]) for place in places) if all(map(len, places)) else None


@dataclass(frozen=True)
class Beside:
    """Numbers beside those that they are compared with.

    Attributes:
        memory: The numbers of a rank.
        due: What they should be; None if nothing is known.
        at: The local index of the chosen element, if it is here.
    """

    memory: Memory
    due: Memory | None = None
    at: tuple[int, ...] | None = None

    def wrong(self, row: int, first: int, count: int) -> list[bool]:
        """Return which numbers of a row are not what they should be; what is not a number is equal to another."""
        keys = self.memory.keys(row, first, count).tolist()
        if self.due is None:
            return [False] * len(keys)
        if row >= self.due.num_rows or self.due.shape[1:] != self.memory.shape[1:]:
            return [True] * len(keys)
        due = self.due.keys(row, first, count).tolist()
        differ = [bool(key != other and (key == key or other == other)) for key, other in zip(keys, due, strict=False)]
        return [*differ, *[True] * (len(keys) - len(due))]

    @cached_property
    def cursor(self) -> tuple[int, int] | None:
        """The row and the column of the chosen element."""
        if self.at is None:
            return None
        rows, at = self.memory.shape[:-1], self.at[:-1]
        return int(np.ravel_multi_index(at, rows)) if at else 0, self.at[-1] if self.at else 0


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
        return Ids("held", shard.held.shape, whole=whole, dims=tuple(map(indices, shard.held.dims)))
    ids = dump.local_ids(shard, name or tensor.names[0]) - 1
    rows = ids.reshape(math.prod(ids.shape[:-1]), ids.shape[-1] if ids.ndim else 1)
    return Ids("held", ids.shape, rows, whole)


def claimed_in_memory(shard: Shard) -> Ids | None:
    """Return the elements that a rank should hold by its placements; None for a plain tensor."""
    if (layout := shard.layout) is None or (dims := claimed_dims(layout).get(shard.rank)) is None:
        return None
    return Ids("claimed", Region(dims).shape, whole=layout.index_shape, dims=tuple(map(indices, dims)))


def ids_beside(dump: Dump, tensor: Tensor, rank: int, name: str = "", index: Sequence[int] | None = None) -> Beside:
    """Return the elements that a rank holds beside those that it should hold, with a chosen one.

    Raises:
        DumpError: The dump has no ids of it, or they are too many to lay out.
    """
    held = ids_in_memory(dump, tensor, rank, name)
    at = held.find(index) if index is not None and len(index) == len(held.whole) else None
    return Beside(held, claimed_in_memory(tensor.shards[rank]), at)


def values_beside(dump: Dump, tensor: Tensor, rank: int, name: str = "") -> Beside | None:
    """Return the values that a rank held, beside those of another copy: of one that differs, if there is one.

    They are of the latest moment that has them; None if the dump has none.
    """
    name = name or tensor.names[0]
    for moment in ("step", "initial"):
        other = dump.find(moment, tensor.role, name)
        if other is not None and rank in other.shards:
            values = _values(dump, other.shards[rank], name, f"rank {rank}, {moment}")
            if values is not None:
                return Beside(values, _copy(dump, other, rank, name, values))
    return None


def _values(dump: Dump, shard: Shard, name: str, title: str) -> Memory | None:
    body = shard.body
    if 0 in body.local_shape or (body.values is None and not body.dense):
        return None
    try:
        array = np.array(leaves(body.values), dtype=object) if body.values is not None else dump.values(shard, name)
    except ShardvizError:
        return None
    return Memory(title, body.local_shape, array.reshape(-1, body.local_shape[-1] if body.local_shape else 1))


def _copy(dump: Dump, tensor: Tensor, rank: int, name: str, values: Memory) -> Memory | None:
    """Return the values of another rank that should be equal, first of one whose values are not."""
    groups = copies_of(tensor, dump.stamped.get(name))
    group = next((group for group in groups if any(shard.rank == rank for shard in group)), [])
    at = tensor.index(name)
    digest = tensor.shards[rank].digest(at)
    for shard in sorted(group, key=lambda shard: shard.digest(at) == digest):
        other = _values(dump, shard, name, f"copy on rank {shard.rank}") if shard.rank != rank else None
        if other is not None and other.shape == values.shape:
            return other
    return None


def holders_at(sides: Sides, cell: Cell) -> list[tuple[str, int]]:
    """Return the ranks that should hold an element and those that do, as masks with their titles, as far as known."""
    known = ((cell.claimed, sides.has_claimed), (cell.held, sides.has_held))
    return [(title, mask) for title, (mask, is_known) in zip(sides.titles, known, strict=True) if is_known]


def named(mask: int, mesh: Mesh | None) -> str:
    """Write ranks, a single one with its coordinates on a mesh: `3 (fsdp=1 tp=1)`."""
    ranks = ranks_of(mask)
    if mesh is not None and len(ranks) == 1 and ranks[0] in mesh:
        return f"{ranks[0]} ({mesh.label(ranks[0]).replace(',', '')})"
    return ranks_text(mask) if ranks else "nobody"


def hovered(sides: Sides, place: Sequence[int], shape: Sequence[int]) -> str:
    """Say in a few words who holds an element, by its index in the holders' shape; a tensor may have fewer dims."""
    cell = sides.at(place)
    lines = [f"[{', '.join(map(str, place[len(place) - len(shape) :]))}]"]
    lines += [f"{title} by {cut_at_comma(named(mask, None), MOST_HOVERED)}" for title, mask in holders_at(sides, cell)]
    return "\n".join(lines) + (f" {WRONG}" if sides.has_held and cell.is_wrong else "")


def who_has(dump: Dump, tensor: Tensor, sides: Sides, place: Sequence[int], name: str = "") -> list[str]:
    """Say who should hold an element and who does, in a line each, with its index in their own part."""
    cell = sides.at((*(0,) * (len(sides.holders.shape) - len(place)), *place))
    mesh = tensor.claimed.mesh if tensor.claimed else dump.files.mesh

    def index_on(rank: int, title: str) -> tuple[int, ...] | None:
        if rank not in tensor.shards or title not in CLAIMED_AND_HELD:
            return None
        try:
            is_claim = title == "claimed"
            ids = claimed_in_memory(tensor.shards[rank]) if is_claim else ids_in_memory(dump, tensor, rank, name)
        except ShardvizError:
            return None
        return ids.find(place) if ids is not None and len(ids.whole) == len(place) else None

    lines = []
    for title, mask in holders_at(sides, cell):
        ranks = ranks_of(mask)
        places = {index_on(rank, title) for rank in ranks[:MOST_LOOKED_AT]}
        is_one = len(places) == 1 and None not in places and len(ranks) <= MOST_LOOKED_AT
        there = f", there at {list(places.pop() or ())}" if is_one else ""
        prefix = "" if not ranks else "rank " if len(ranks) == 1 else "ranks "
        lines.append(f"{title:<8} by {prefix}{named(mask, mesh)}{there}")
    if cell.different:
        where = "where the placements claim" if sides.titles == CLAIMED_AND_HELD else "where it is intended"
        return [*lines, f"{WRONG} it is not {where}"]
    return [*lines, *(f"{WRONG} {words}" for _, words in sides.reasons_at(cell) if cell.guilty)]


def size_text(sizes: Sequence[int]) -> str:
    """Write bytes; of several that are alike, how many: `32 × 128 KiB`; `-` for what takes no memory of its own."""
    if len(sizes) > 1 and len(set(sizes)) == 1:
        return f"{len(sizes)} × {bytes_text(sizes[0])}"
    return bytes_text(sum(sizes)) if sizes else "-"
