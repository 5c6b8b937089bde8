"""The mesh of a job whose model claims none, from the process groups that its ranks made."""

from __future__ import annotations

import math
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from shardviz.layout.mesh import Mesh

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardviz.check.step.trace.traces import JobTrace
    from shardviz.dump.dump import Dump

    Groups = frozenset[tuple[int, ...]]

MAX_KINDS = 8
"""Of so many ways in which groups divide the ranks, all combinations are tried."""


def mesh_of_job(dump: Dump, job: JobTrace) -> Mesh:
    """Return the mesh of a job's model, or that of its process groups where this has more axes; else all its ranks."""
    num_ranks = job.dump.files.run.num_ranks
    recorded = dump.files.mesh if dump.files.run.mesh is not None and dump.files.mesh.size == num_ranks else None
    records = [mesh for record in job.dump.files.ranks.values() for mesh in record.meshes]
    from_groups = mesh_of_groups(
        [(mesh.axes[0], mesh.ranks) for mesh in dict.fromkeys(records) if len(mesh.axes) == 1], num_ranks
    )
    meshes = [mesh for mesh in (recorded, from_groups) if mesh is not None]
    return max(meshes, key=lambda mesh: mesh.ndim, default=Mesh(("world",), (num_ranks,)))


def mesh_of_groups(groups: Iterable[tuple[str, tuple[int, ...]]], num_ranks: int) -> Mesh | None:
    """Return the mesh along whose axes groups run: they divide all ranks, and any two of an axis's cross in one rank.

    Args:
        groups: Each with the name of its axis.
        num_ranks: The world's size.
    """
    by_axis: dict[str, set[tuple[int, ...]]] = {}
    for axis, ranks in groups:
        by_axis.setdefault(axis, set()).add(ranks)
    divisions = {name: of for axis, every in by_axis.items() for name, of in _divisions(axis, every)}
    kinds = {axis: frozenset(of) for axis, of in divisions.items() if _divide(of, num_ranks)}
    names = list(kinds)[:MAX_KINDS]
    for count in range(len(names), 0, -1):
        for axes in combinations(names, count):
            mesh = _crossing(axes, [kinds[axis] for axis in axes], num_ranks)
            if mesh is not None:
                return mesh
    return None


def _divisions(axis: str, groups: set[tuple[int, ...]]) -> Iterator[tuple[str, set[tuple[int, ...]]]]:
    """Yield groups of one name in sets of which no two share a rank: those of two axes of one size are named alike."""
    divisions: list[set[tuple[int, ...]]] = []
    for group in sorted(groups):
        apart = (of for of in divisions if not any(set(group) & set(ranks) for ranks in of))
        division = next(apart, None)
        if division is None:
            divisions.append({group})
        else:
            division.add(group)
    yield from ((axis if not at else f"{axis}_{at + 1}", of) for at, of in enumerate(divisions))


def _divide(groups: set[tuple[int, ...]], num_ranks: int) -> bool:
    every = sorted(rank for group in groups for rank in group)
    sizes = {len(group) for group in groups}
    return every == list(range(num_ranks)) and len(sizes) == 1 and sizes != {1}


def _crossing(axes: Sequence[str], kinds: Sequence[Groups], num_ranks: int) -> Mesh | None:
    """Return the mesh with an axis for each division of the ranks; None if they are not a grid."""
    shape = tuple(len(next(iter(groups))) for groups in kinds)
    if math.prod(shape) != num_ranks:
        return None
    grid = np.full(shape, -1)
    for rank in range(num_ranks):
        at = tuple(next(group.index(rank) for group in groups if rank in group) for groups in kinds)
        grid[at] = rank
    if np.any(grid < 0):
        return None
    mesh = Mesh(tuple(axes), shape, tuple(grid.ravel().tolist()))
    is_grid = all(frozenset(mesh.groups(axis)) == groups for axis, groups in zip(axes, kinds, strict=True))
    return mesh if is_grid else None
