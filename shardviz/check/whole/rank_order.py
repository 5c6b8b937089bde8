"""`rank-order`: a rank's number in a process group is not its coordinate on that axis.

Collectives put results in the order of the group, placements in that of the mesh. Where the two differ, every gather
along the axis comes back permuted, whatever the shards are: a tensor that is split over the axis is not in order, even
where each shard is where it is claimed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.report import NotChecked
from shardviz.check.verdicts import is_of_model
from shardviz.dump.read import mesh_of
from shardviz.dump.validate import mesh_of as mesh_from
from shardviz.explain.placement.whole_run import GroupAgainstMesh, MeshNotRising

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.dump.dump import Dump
    from shardviz.dump.records.tensors import MeshRecord
    from shardviz.explain.finding import Finding
    from shardviz.layout.mesh import Mesh

Places = dict[tuple["MeshRecord", int], dict[int, tuple[int, int]]]
"""For a mesh and one of its axes: the ranks that differ, with their coordinate and their number in the group."""


IN_QUESTION = "what collectives along {axis} return: the process group has its ranks in a different order than the mesh"


def check_rank_order(dump: Dump) -> Iterator[Finding | NotChecked]:
    """Yield each mesh axis along which group ranks differ from coordinates, with its tensors."""
    groups: dict[str, set[tuple[int, ...]]] = {}
    for (record, axis), ranks in differing(dump).items():
        rank, (position, in_group) = next(iter(ranks.items()))
        name = record.axes[axis]
        cause = MeshNotRising() if _is_by_rank(record, axis, ranks) else GroupAgainstMesh(name)
        yield cause.finding(
            "",
            tuple(sorted(ranks)),
            f"{len(ranks):,} ranks have a number in the group along {name} that is not their coordinate on mesh "
            f"{mesh_of(record)}: rank {rank} is {name}={position} but number {in_group} of its group",
        )
        named_groups = _groups(mesh_from(record), name)
        groups.setdefault(name, set()).update(group for group in named_groups if not ranks.keys().isdisjoint(group))
    for name, odd in groups.items():
        yield from _unchecked_tensors(dump, name, odd)


def _unchecked_tensors(dump: Dump, axis: str, groups: set[tuple[int, ...]]) -> Iterator[NotChecked]:
    """Yield the tensors that are split or summed over an axis with one of some groups.

    A part of a mesh has its groups, so that the mesh that a tensor claims need not be the one that differs.
    """
    for tensor in filter(is_of_model, (*dump.at("stamped"), *dump.at("initial"))):
        claims = [claim for claim in tensor.claims if claim and axis in (*claim.split_axes, *dict(claim.partial))]
        if any(not groups.isdisjoint(_groups(claim.mesh, axis)) for claim in claims):
            yield from (NotChecked(name, IN_QUESTION.format(axis=axis), "gathering") for name in tensor.names)


@lru_cache(maxsize=64)
def _groups(mesh: Mesh, axis: str) -> frozenset[tuple[int, ...]]:
    return frozenset(mesh.groups(axis))


def _is_by_rank(record: MeshRecord, axis: int, ranks: dict[int, tuple[int, int]]) -> bool:
    """Whether an axis's groups number ranks rising, and it is the mesh that does not."""
    groups = np.moveaxis(np.array(record.ranks).reshape(record.shape), axis, -1).reshape(-1, record.shape[axis])
    numbers = {int(rank): int((group < rank).sum()) for group in groups for rank in group if int(rank) in ranks}
    return all(numbers[rank] == in_group for rank, (_, in_group) in ranks.items())


def differing(dump: Dump) -> Places:
    """Return the ranks whose number in a group is not their coordinate, by mesh and axis."""
    ranks: Places = {}
    for rank, record in dump.files.ranks.items():
        for position in record.positions:
            if position.coord == position.group_ranks:
                continue
            pairs = zip(position.coord, position.group_ranks, strict=False)
            for axis, (coordinate, in_group) in enumerate(pairs):
                if coordinate != in_group:
                    ranks.setdefault((record.meshes[position.mesh], axis), {})[rank] = (coordinate, in_group)
    return ranks
