"""A plan's tensors over all ranks; a rank's shards are computed on demand."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from shardviz.dump.tensor import LazyShards, Shard, Tensor
from shardviz.text import Fold, fold

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.dump.plan.ranks import PlannedPart, PlannedRanks
    from shardviz.layout.layout import Layout

Bodies = tuple[tuple[int, int], ...]
"""For every part that has a tensor, its number among the parts, and that of the tensor's body in it."""

Place = tuple[str, str]
"""Role and moment."""


class PlannedShards(LazyShards):
    """The shards of one tensor on all ranks of some parts.

    Args:
        ranks: The plan's ranks.
        bodies: Every part that has the tensor, with the number of its body.
    """

    def __init__(self, ranks: PlannedRanks, bodies: list[tuple[PlannedPart, int]]) -> None:
        self._ranks = ranks
        self._bodies = dict(bodies)

    def __getitem__(self, rank: int) -> Shard:
        planned_part = self._ranks.part_of(rank)
        index = self._bodies[planned_part]
        body = planned_part.body(rank, index)
        return Shard(rank, body, None if body.layout is None else planned_part.layout(rank, body.layout))

    def __iter__(self) -> Iterator[int]:
        return iter(self._sorted)

    @cached_property
    def _sorted(self) -> tuple[int, ...]:
        if len(self._bodies) == 1:
            return next(iter(self._bodies)).ranks
        return tuple(sorted(rank for part in self._bodies for rank in part.ranks))

    def __len__(self) -> int:
        return sum(len(part.ranks) for part in self._bodies)

    def __contains__(self, rank: object) -> bool:
        return rank in self._ranks and self._ranks.part_of(rank) in self._bodies  # type: ignore[arg-type]

    @property
    def asked(self) -> list[int]:
        """The ranks that were asked for it: one of each part."""
        return [part.part.record.rank for part in self._bodies]

    def claims(self) -> dict[Layout | None, tuple[int, ...]]:
        """Return the ranks, rising, by what they claim."""
        ranks_by_layout: dict[Layout | None, tuple[int, ...]] = {}
        for planned_part, index in self._bodies.items():
            for layout, ranks in planned_part.claims(index).items():
                ranks_by_layout[layout] = (*ranks_by_layout.get(layout, ()), *ranks)
        return {layout: tuple(sorted(ranks)) for layout, ranks in ranks_by_layout.items()}

    def distinct(self) -> list[Shard]:
        """Return one shard for each claim and each shape of a part, by rank, rising."""
        shards: dict[tuple[Layout | None, tuple[int, ...]], Shard] = {}
        for rank in sorted(rank for part, index in self._bodies.items() for rank in part.unlike(index)):
            shard = self[rank]
            shards.setdefault((shard.layout, shard.body.local_shape), shard)
        return list(shards.values())


def tensors_of(ranks: PlannedRanks) -> list[Tensor]:
    """Return every tensor of a plan; names that all parts have with the same bodies are folded."""
    tensors: list[Tensor] = []
    for folded, (_, bodies) in fold(_keyed(ranks)):
        parts = [(ranks.parts[number], index) for number, index in bodies]
        first = parts[0][0].part.record.bodies[parts[0][1]]
        tensors.append(Tensor(folded, first.role, first.moment, PlannedShards(ranks, parts)))
    return tensors


def _keyed(ranks: PlannedRanks) -> Iterator[tuple[str, tuple[Place, Bodies]]]:
    by_name: dict[tuple[str, Place], list[tuple[int, int]]] = {}
    for number, planned_part in enumerate(ranks.parts):
        for tensor in planned_part.part.record.tensors:
            body = planned_part.part.record.bodies[tensor.body]
            for name in Fold(tensor.name, tensor.numbers, tensor.suffix).names():
                by_name.setdefault((name, (body.role, body.moment)), []).append((number, tensor.body))
    for (name, place), bodies in by_name.items():
        yield name, (place, tuple(bodies))
