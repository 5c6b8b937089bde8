"""Run torch's own `redistribute` on real ranks, and say which collectives it ran; imported by ranks only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardviz.layout.notation import parse
from shardviz.live.compat.meshes import torch_placement
from shardviz.live.step.comms import Comms

if TYPE_CHECKING:
    from shardviz.layout.mesh import Mesh


def redistributed(world, mesh: Mesh, pairs: list[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Return, for each pair of layouts, the collectives and axes in torch's order."""
    device_mesh = init_device_mesh(world.device_type, mesh.shape, mesh_dim_names=mesh.axes)
    found = []
    for start, end in pairs:
        placements = [[torch_placement(one) for one in parse(text).layout(mesh).placements()] for text in (start, end)]
        layout = parse(start).layout(mesh)
        local = torch.zeros(layout.region_of_rank(world.rank).shape)
        shape = torch.Size(layout.shape)
        tensor = DTensor.from_local(local, device_mesh, placements[0], shape=shape, stride=torch.empty(shape).stride())
        with Comms() as comms:
            tensor.redistribute(device_mesh, placements[1])
        found.append([(one.op, *one.axes) for one in comms.records(mesh, world.rank)])
    return found
