"""A mesh of one rank: on it a sharded step runs its own lines on whole tensors."""

from __future__ import annotations

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh


def mesh_of_one_rank(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh with the same axes, each of this rank alone. Every rank calls this."""
    names, groups = mesh.mesh_dim_names or (), []
    for _ in names:
        own = [distributed.new_group([rank]) for rank in range(distributed.get_world_size())]
        groups.append(own[distributed.get_rank()])
    ranks = torch.full((1,) * len(names), distributed.get_rank())
    return DeviceMesh.from_group(groups, mesh.device_type, ranks, mesh_dim_names=names)
