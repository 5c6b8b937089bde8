"""A job's dump as one side of a comparison: ranks' claimed parts and hashes.

A dump has a hash of every shard's bytes, and the values themselves only of small ones. So what is equal is proved; what
differs is found where the checkpoint has the very bytes somewhere else, and is counted where the dump has the values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.dump.validate import bits_of_values
from shardviz.errors import DumpError, LayoutError, ShardvizError
from shardviz.layout.region import Region
from shardviz.relate.values import part_of
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from shardviz.dump.dump import Dump, Shard
    from shardviz.dump.dump import Tensor as Dumped
    from shardviz.dump.records.base import Role

ROLES: tuple[Role, ...] = ("param", "buffer", "optim")
AGAIN = "capture the job without stamps: `shardviz run -- CMD`, or shardviz.capture(model, folder)"


@dataclass(frozen=True, eq=False)
class JobShard:
    """What one rank holds of a tensor.

    Attributes:
        claimed: The part that it claims, in the tensor's `index_shape`; None if it does not say.
        digest: The hash of its bytes; empty if the dump has none.
        why: Why it claims no part; empty if it does.
        held: The part of the job's own reference that it was found to have, where it was looked up.
    """

    rank: int
    shard: Shard
    claimed: Region | None
    digest: str
    why: str = ""
    held: Region | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.shard.body.local_shape

    @property
    def is_alike(self) -> bool:
        """Whether all of its elements are the same number, which says nothing of where they belong."""
        return self.shard.body.constant

    @cached_property
    def bits(self) -> NDArray[Any] | None:
        """Its values as unsigned integers; None if the dump does not have them."""
        return bits_of_values(self.shard.body)


@dataclass(frozen=True, eq=False)
class JobTensor:
    """One tensor of a job, with the shards of all ranks.

    Attributes:
        dumped: What the dump has of it.
        pieces: What each rank holds.
        tied: The other names that share its storage.
    """

    name: str
    role: Role
    dumped: Dumped
    pieces: tuple[JobShard, ...]
    tied: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the model sees."""
        return self.dumped.claimed.tensor_shape if self.dumped.claimed else self.dumped.shape

    @property
    def index_shape(self) -> tuple[int, ...]:
        """The shape in which parts are counted: the number of elements of what FSDP1 has flattened."""
        return self.dumped.claimed.index_shape if self.dumped.claimed else self.dumped.shape

    @property
    def dtype(self) -> str:
        """Its dtype."""
        return self.dumped.dtype

    @property
    def bits(self) -> NDArray[Any]:
        """Its values as unsigned integers, put together by what ranks claim.

        Raises:
            DumpError: The dump has hashes of them only, or not all.
        """
        parts = [(piece.claimed, piece.bits) for piece in self.pieces]
        known_parts = [(region, bits) for region, bits in parts if region is not None and bits is not None]
        is_fit = all(region.shape == bits.shape for region, bits in known_parts)
        if not is_fit or sum(bits.size for _, bits in known_parts) < max(math.prod(self.shape), 1):
            raise DumpError(f"{printable(self.name)}: the dump has hashes of its values, not the values")
        whole = np.zeros(self.index_shape, known_parts[0][1].dtype)
        is_filled = np.zeros(self.index_shape, bool)
        for region, bits in known_parts:
            at = region.flat_ids(self.index_shape)
            whole.reshape(-1)[at], is_filled.reshape(-1)[at] = bits, True
        if not is_filled.all():
            raise DumpError(f"{printable(self.name)}: the dump does not have all of its values")
        return whole.reshape(self.shape)

    def read(self, region: Region) -> NDArray[Any]:
        """Return the values of a part, in the region's order."""
        return part_of(self.bits, region)

    @cached_property
    def absent(self) -> tuple[int, ...]:
        """Ranks of its mesh that the dump lacks, and whose part no other rank has."""
        layout = self.dumped.claimed
        if layout is None:
            return ()
        there = {piece.rank for piece in self.pieces}
        claimed_regions = {piece.claimed for piece in self.pieces}
        return tuple(
            rank
            for rank, region in layout.regions()
            if rank not in there and region.size and region not in claimed_regions
        )


@dataclass(frozen=True)
class Job:
    """A job's dump, with the attributes that a checkpoint has for pairing names.

    Attributes:
        tensors: Its weights by name, as they were captured first.
        without_values: Names of which it says where their elements are, and not what they are.
        objects: Nothing: a dump has no other objects.
        values: Nothing, too.
    """

    path: Path
    dump: Dump
    tensors: Mapping[str, JobTensor]
    without_values: tuple[str, ...] = ()
    objects: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The folder of its files."""
        return self.path

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks of the run without a readable file."""
        return self.dump.files.missing_ranks

    @property
    def states(self) -> frozenset[str]:
        """The names of optimizer state."""
        return frozenset(name for name, one in self.tensors.items() if one.role == "optim")


def job_of(dump: Dump) -> Job:
    """Return a dump as what a checkpoint is compared with.

    Raises:
        ShardvizError: It has no values and no hashes of them: it is a plan, or its weights were stamped.
    """
    path = dump.files.path
    if dump.files.planned is not None:
        raise ShardvizError(f"{path} is a plan: no rank ran, and there are no values to compare", AGAIN)
    tensors: dict[str, JobTensor] = {}
    for role in ROLES:
        for name, dumped in dump.by_name("initial", role).items():
            tied = tuple(other for other in dump.ties.get(name, ()) if other != name)
            tensors.setdefault(name, JobTensor(name, role, dumped, tuple(_pieces(dump, dumped, name)), tied))
    stamped = tuple(name for name in dump.stamped if name not in tensors)
    if not tensors:
        what = "its weights were stamped, and ids are not weights" if stamped else "it has no weights"
        raise ShardvizError(f"{path} has no values to compare: {what}", AGAIN)
    return Job(path, dump, tensors, stamped)


def _pieces(dump: Dump, dumped: Dumped, name: str) -> Iterator[JobShard]:
    """Yield what each rank holds of a tensor."""
    index = dumped.index(name)
    placed = dump.find("stamped", dumped.role, name)
    for rank, shard in dumped.shards.items():
        claimed, why = _claim(shard)
        placed_shard = placed.shards.get(rank) if placed else None
        yield JobShard(rank, shard, claimed, shard.digest(index), why, placed_shard.held if placed_shard else None)


def _claim(shard: Shard) -> tuple[Region | None, str]:
    """Return the part that a rank claims, or why it claims none."""
    body, layout = shard.body, shard.layout
    if layout is None:
        is_whole = body.local_shape == body.shape
        return (Region.whole(body.shape), "") if is_whole else (None, "it is plain, and does not say which part it is")
    if layout.partial:
        axes = " and ".join(axis for axis, _ in layout.partial)
        return None, f"its sum over {'axes' if len(layout.partial) > 1 else 'axis'} {axes} is pending"
    if shard.rank not in layout.mesh:
        return None, "it is not on the tensor's mesh"
    try:
        return layout.region_of_rank(shard.rank), ""
    except LayoutError as error:
        return None, error.message
