"""One tensor over all ranks: what each holds and claims of it, and its whole values, put together offline."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from shardviz.dump.records.base import DIGEST_LENGTH
from shardviz.errors import DumpError
from shardviz.layout.mesh import ranks_by
from shardviz.layout.region import Region
from shardviz.text import Fold, printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.dump.dump import Dump
    from shardviz.dump.records.base import Moment, Role
    from shardviz.dump.records.tensors import Body
    from shardviz.layout.layout import Layout


@dataclass(frozen=True)
class Shard:
    """What one rank holds of a tensor.

    Attributes:
        rank: The global rank.
        body: Its record.
        layout: What its placements claim; None for a plain tensor.
        digests: For every name of the fold, 16 hex digits of the numbers' hash; empty if none was taken.
    """

    rank: int
    body: Body
    layout: Layout | None
    digests: str = ""

    @cached_property
    def held(self) -> Region | None:
        """The region that it holds, if the ids are a product of ranges in every dim."""
        return Region(self.body.held) if self.body.held is not None else None

    def digest(self, index: int) -> str:
        """Return the digest of the fold's name number `index`; empty if none was taken."""
        return self.digests[index * DIGEST_LENGTH : (index + 1) * DIGEST_LENGTH]


class LazyShards(Mapping[int, Shard]):
    """Shards made on demand, with summaries that don't need every rank's shard."""

    @abstractmethod
    def claims(self) -> dict[Layout | None, tuple[int, ...]]:
        """Return the ranks, rising, by what they claim."""

    @abstractmethod
    def distinct(self) -> list[Shard]:
        """Return one shard for each claim and each shape of a part, by rank, rising."""


@dataclass(frozen=True)
class Tensor:
    """One tensor over all ranks, or several layers' whose records are the same on every rank.

    Attributes:
        fold: Its name, or the folded names of identical layers.
        role: What it is to the model.
        moment: When it was captured.
        shards: What each rank holds, by rank, rising; in a plan made when it is asked for.
    """

    fold: Fold
    role: Role
    moment: Moment
    shards: Mapping[int, Shard]

    @property
    def name(self) -> str:
        """The name, or the folded names: `layers.[0-31].wq.weight`."""
        return str(self.fold)

    @cached_property
    def names(self) -> list[str]:
        """Every name."""
        return self.fold.names()

    def index(self, name: str) -> int:
        """Return the position of one of its names, which is that of its digest, too."""
        return self._positions[name]

    def is_equal_on_ranks(self, name: str) -> bool:
        """Whether digests show that one of its names has the same values on all ranks."""
        digests = {shard.digest(self.index(name)) for shard in self.shards.values()}
        return len(digests) == 1 and "" not in digests

    @cached_property
    def _positions(self) -> Mapping[str, int]:
        return {name: position for position, name in enumerate(self.names)}

    @cached_property
    def first(self) -> Shard:
        """The shard of the lowest rank that has the tensor."""
        return next(iter(self.shards.values()))

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape, as the lowest rank sees it."""
        return self.first.body.shape

    @property
    def dtype(self) -> str:
        """The dtype, as the lowest rank sees it."""
        return self.first.body.dtype

    @property
    def claimed(self) -> Layout | None:
        """The layout that the placements claim on the lowest rank; None for a plain tensor."""
        return self.first.layout

    @cached_property
    def distinct(self) -> list[Shard]:
        """One shard for each claim and each shape of a part, by rank, rising."""
        if isinstance(self.shards, LazyShards):
            return self.shards.distinct()
        shards: dict[tuple[int, tuple[int, ...]], Shard] = {}
        for shard in self.shards.values():
            shards.setdefault((id(shard.layout), shard.body.local_shape), shard)
        return list(shards.values())

    @cached_property
    def claims(self) -> dict[Layout | None, tuple[int, ...]]:
        """Ranks by claimed layout; several keys if ranks disagree or meshes are disjoint."""
        if isinstance(self.shards, LazyShards):
            return self.shards.claims()
        groups = ranks_by((rank, shard.layout) for rank, shard in self.shards.items())
        return {layout: tuple(ranks) for layout, ranks in groups.items()}


def whole_values(dump: Dump, tensor: Tensor, name: str) -> NDArray[np.float64]:
    """Return a tensor's values, each from the lowest rank that has it; NaN if no rank does.

    Returns:
        Them in the shape in which the claimed regions count; the lowest rank's own of a plain tensor.

    Raises:
        DumpError: The dump does not have the values, or a rank does not have the shape that it claims.
    """
    return values_and_places(dump, tensor, name)[0]


def values_and_places(dump: Dump, tensor: Tensor, name: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return a tensor's whole values, and which of them any rank of the dump has.

    Raises:
        DumpError: The dump does not have the values, or a rank does not have the shape that it claims.
    """
    shape = tensor.claimed.index_shape if tensor.claimed else tensor.shape
    whole, has = np.full(shape, np.nan), np.zeros(shape, dtype=bool)
    for rank, shard in reversed(list(tensor.shards.items())):
        values = dump.values(shard, name)
        if shard.layout is None:
            whole, has = values, np.ones(values.shape, dtype=bool)
            continue
        region = shard.layout.region_of_rank(rank)
        if region.shape != values.shape:
            own_shape, claimed = list(values.shape), list(region.shape)
            raise DumpError(f"{printable(name)}: rank {rank} has a shape of {own_shape}, but claims {claimed}")
        if not region.is_within(shape):
            raise DumpError(f"{printable(name)}: rank {rank} claims a part that lies outside {list(shape)}")
        places = region.flat_ids(shape)
        whole.ravel()[places], has.ravel()[places] = values, True
    return whole, has


def shape_before(dump: Dump, tensor: Tensor, name: str) -> tuple[int, ...]:
    """Return a tensor's global shape; a plain one's is its weight's before sharding.

    A plain tensor that doesn't have the local shape of its stamped weight keeps its own shape.

    Args:
        tensor: The tensor, or the fold that it is in.
        name: Its name; that of an optimizer's state begins with its weight's.
    """
    weight = name.rpartition(".")[0] if tensor.role == "optim" else name
    stamp = dump.stamps.get(weight)
    stamped = dump.stamped.get(weight) if tensor.claimed is None else None
    is_alike = stamped is not None and stamped.first.body.local_shape == tensor.first.body.local_shape
    return stamp.shape if stamp is not None and is_alike else tensor.shape
