"""The records of tensors: what their placements claim, and what a rank holds of them.

Ids count from 1 over the whole model, so that 0 is never an id.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shardviz.dump.records.base import MAX_NUMBER, Count, Moment, PerAxis, Record, Role, Shape, Span
from shardviz.layout.mesh import MAX_AXES, MAX_RANKS
from shardviz.layout.region import MAX_DIMS

Held = Annotated[tuple[tuple[Span, ...], ...], Meta(max_length=MAX_DIMS)]
"""Index ranges in each dim, half-open."""

IdRun = tuple[
    Annotated[int, Meta(ge=-1, le=MAX_NUMBER)],
    Annotated[int, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)],
    Annotated[int, Meta(ge=1, le=MAX_NUMBER)],
]
"""Ids `first`, `first + step`, ... to a number of `count`."""


class MeshRecord(Record, frozen=True, cache_hash=True):
    """A device mesh.

    Attributes:
        axes: The names of its axes.
        shape: The number of ranks along each.
        ranks: The global rank at each coordinate, row-major. A file leaves them out if they count up from 0: else every
            rank's file would name all ranks.
    """

    axes: Annotated[tuple[str, ...], Meta(max_length=MAX_AXES)]
    shape: PerAxis
    ranks: tuple[Count, ...] = ()

    def __post_init__(self) -> None:
        size = math.prod(self.shape)
        if not self.ranks and 0 < size <= MAX_RANKS:
            msgspec.structs.force_setattr(self, "ranks", _counting(size))

    def in_file(self) -> Record:
        """Return the record as written to a file: without ranks if these count up from 0."""
        return _CountingMeshRecord(self.axes, self.shape) if self._counts_up else self

    @property
    def _counts_up(self) -> bool:
        counting = _counting(len(self.ranks))
        is_whole = len(self.ranks) == math.prod(self.shape)
        return is_whole and (self.ranks is counting or self.ranks == counting)

    def kept(self) -> MeshRecord:
        """Return the one object that all equal records share: thousands of ranks write the same meshes."""
        return _kept(self.axes, self.shape, () if self._counts_up else self.ranks)


@lru_cache(maxsize=64)
def _kept(axes: tuple[str, ...], shape: tuple[int, ...], ranks: tuple[int, ...]) -> MeshRecord:
    return MeshRecord(axes, shape, ranks)


class _CountingMeshRecord(Record, frozen=True):
    """A mesh whose ranks count up from 0."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]


@lru_cache(maxsize=8)
def _counting(size: int) -> tuple[int, ...]:
    return tuple(range(size))


class FlatRecord(Record, frozen=True):
    """Where a parameter of `shape` is in FSDP1's flattened concatenation."""

    shape: Shape
    offset: Count


class LayoutRecord(Record, frozen=True):
    """The layout that placements claim.

    Attributes:
        mesh: Index into the rank file's `meshes`.
        placements: One for each axis of the mesh, as `shardviz.layout.placements` writes them.
        shape: The global shape; with `flat`, the one size of the whole concatenation.
        flat: Set for FSDP1's parameters.
        own_axes: The axes of the tensor's own mesh, if that is a part of `mesh`; empty if it is all of it.
    """

    mesh: Count
    placements: Annotated[tuple[str, ...], Meta(max_length=MAX_AXES)]
    shape: Shape
    flat: FlatRecord | None = None
    own_axes: Annotated[tuple[str, ...], Meta(max_length=MAX_AXES)] = ()


class Body(Record, frozen=True):
    """What a rank writes about a tensor, except its name: identical layers share one body.

    Attributes:
        role: What the tensor is to the model.
        moment: When it was captured; `phase` in the file.
        shape: The global shape as this rank sees it.
        local_shape: The shape of what this rank holds.
        dtype: The dtype, without `torch.`.
        device: `cpu`, `cuda:3`, ...
        layout: Index into the rank file's `layouts`; None for a plain tensor, which claims nothing.
        assumed: Nothing claims the layout: it is the one that a plain output should have.
        held: The ids as index ranges in each dim of the tensor itself, if they are such a product.
        runs: The ids otherwise, in memory order, as runs `(first id, step, count)`; 0 for zeros, -1 for no id.
        values: The values as nested lists, if they are few. `"nan"`, `"inf"` and `"-inf"` are strings.
        dense: The values are in the safetensors file, under `moment/role/name`.
        grad: Whether `.grad` was there: `none` or `here`. None if it was not looked at.
        constant: Every element is the same number, as in a fresh bias: equal shards of it say nothing.
    """

    role: Role
    moment: Moment = msgspec.field(name="phase")
    shape: Shape
    local_shape: Shape
    dtype: str
    device: str = "cpu"
    layout: Count | None = None
    held: Held | None = None
    runs: tuple[IdRun, ...] | None = None
    values: Any = None
    dense: bool = False
    grad: Literal["none", "here"] | None = None
    constant: bool = False
    assumed: bool = False


class TensorRecord(Record, frozen=True):
    """One tensor, or several whose names differ in one number only and that share a body.

    Attributes:
        name: The name; the part before the number if `numbers` is set.
        body: Index into the rank file's `bodies`.
        numbers: Half-open ranges of the numbers.
        suffix: The part after the number.
        digests: For every name in order, 16 hex digits: the BLAKE2b hash of its numbers (-0.0 is 0.0), dtype and
            shape.
    """

    name: str
    body: Count
    numbers: tuple[Span, ...] = ()
    suffix: str = ""
    digests: Annotated[str, Meta(pattern="^[0-9a-f]*$")] = ""


class FragmentRecord(Record, frozen=True):
    """The elements of a flattened tensor that a rank claims, if the cut isn't even.

    Attributes:
        name: The tensor.
        ranks: The ranks that are to divide it.
        start: The first element.
    """

    name: str
    ranks: tuple[Count, ...]
    start: Count
    size: Count


class Position(Record, frozen=True):
    """A rank's place on one mesh: its coordinate and its rank in the group along each axis."""

    mesh: Count
    coord: PerAxis
    group_ranks: PerAxis


class GatherRecord(Record, frozen=True):
    """The result of a torch collective on a stamped tensor: ids as in a `Body`, or its error."""

    name: str
    collective: str
    held: Held | None = None
    runs: tuple[IdRun, ...] | None = None
    error: str = ""


class Stamp(Record, frozen=True):
    """One tensor of the unsharded model: its ids are `first` to `first + numel - 1`, row-major.

    Attributes:
        name: Its fully qualified name.
        first: The id of its first element; ids count from 1 over the whole model.
        role: Parameter or buffer.
        tied_to: The name of the tensor whose storage it shared in the unsharded model.
    """

    name: str
    first: Annotated[int, Meta(ge=1, le=MAX_NUMBER)]
    shape: Shape
    role: Role = "param"
    tied_to: str = ""

    @property
    def last(self) -> int:
        """Its last id; one less than `first` if it has no elements."""
        return self.first + math.prod(self.shape) - 1


class SentRecord(Record, frozen=True):
    """A tensor that holds what a rank sent while the model was sharded.

    Attributes:
        op: The collective that sent it.
        place: The line of the user's code that calls it, as `train.py:57`.
    """

    name: str
    op: str
    place: str
