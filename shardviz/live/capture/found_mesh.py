"""The mesh of a job that does not say it: the one that its model's tensors are on, or that its engine's groups make."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.errors import MeshError
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.meshes import over_groups, plain_mesh
from shardviz.live.claims import registry
from shardviz.text import listed

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.layout.mesh import Mesh

HINT = "pass the mesh of the whole job: shardviz.capture(..., mesh=mesh)"


def found_mesh(model: nn.Module) -> DeviceMesh:
    """Return the largest mesh that a model's tensors show, sub-meshes counted as their root. Every rank calls this.

    Raises:
        MeshError: Some rank has no tensor that shows one, or ranks are on different meshes; every rank raises it.
    """
    own, groups = registry.mesh_of(model), registry.groups_of(model)
    coords = of_all_ranks({axis: group.rank() for axis, group in groups.items()})
    own = own if own is not None else over_groups(groups, coords)
    of_all = of_all_ranks(plain_mesh(own) if own is not None else None)
    without = [rank for rank, mesh in enumerate(of_all) if mesh is None]
    if len(without) == len(of_all):
        raise MeshError("no mesh was given, and no parameter or buffer is a DTensor, which would show one", HINT)
    if without:
        raise MeshError(f"no mesh was given, and there is no DTensor on ranks {listed(without, 4)} to show one", HINT)
    if len(set(of_all)) > 1:
        other = next(rank for rank, mesh in enumerate(of_all) if mesh != of_all[0])
        raise MeshError(
            f"no mesh was given, and ranks are on different ones: rank 0 on {_described(of_all[0])}, rank {other} on "
            f"{_described(of_all[other])}",
            HINT,
        )
    assert own is not None
    return own


def _described(mesh: Mesh | None) -> str:
    return f"{mesh} of ranks {listed(mesh.ranks, 4)}" if mesh is not None else "none"
