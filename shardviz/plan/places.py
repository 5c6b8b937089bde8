"""Which ranks a representative stands for, and where they are on its meshes."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING

from shardviz.errors import DumpError
from shardviz.layout.mesh import Mesh

if TYPE_CHECKING:
    from shardviz.plan.records import PlanPart

MAX_SHIFTED = 1 << 12
"""A mesh that is another one on every rank is kept for so many ranks at a time."""


def ranks_of(part: PlanPart, mesh: Mesh) -> tuple[int, ...]:
    """Return the ranks that a part stands for, rising.

    Args:
        part: The part.
        mesh: The plan's mesh.

    Raises:
        DumpError: It names an axis or a position that the mesh does not have.
    """
    for axis, positions in part.at.items():
        if axis not in mesh.axes:
            raise DumpError(f"at names axis {axis}, expected one of {', '.join(mesh.axes)}")
        if max(positions) >= mesh.axis_size(axis) or len(set(positions)) < len(positions):
            raise DumpError(f"at {axis}: positions are 0 to {mesh.axis_size(axis) - 1}, each once")
    ways = (part.at.get(axis, range(size)) for axis, size in zip(mesh.axes, mesh.shape, strict=True))
    return tuple(sorted(map(mesh.rank_at, product(*ways))))


@lru_cache(maxsize=MAX_SHIFTED)
def mesh_for(rank: int, own: Mesh, asked: int, whole: Mesh) -> Mesh:
    """Return the mesh on which a rank has what the rank that was asked has on its own.

    Along the plan's axes on which all ranks of a mesh are at one position, the other rank's mesh is at its own one.

    Args:
        rank: The rank.
        own: A mesh of the rank that was asked.
        asked: The rank that was asked.
        whole: The plan's mesh.
    """
    if rank in own or asked not in own or any(one not in whole for one in own.ranks):
        return own
    coords = [whole.coord_of(one) for one in own.ranks]
    here = whole.coord_of(rank)
    fixed = [len({coord[axis] for coord in coords}) == 1 for axis in range(whole.ndim)]
    moved = (
        tuple(mine if is_fixed else at for mine, at, is_fixed in zip(here, coord, fixed, strict=True))
        for coord in coords
    )
    return Mesh(own.axes, own.shape, tuple(map(whole.rank_at, moved)))
