"""One tensor over all ranks: what each rank holds of it, and what its placements claim."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from shardviz.dump.records.base import DIGEST_LENGTH
from shardviz.layout.mesh import ranks_by
from shardviz.layout.region import Region

if TYPE_CHECKING:
    from shardviz.dump.records.base import Moment, Role
    from shardviz.dump.records.tensors import Body
    from shardviz.layout.layout import Layout
    from shardviz.text import Fold


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
