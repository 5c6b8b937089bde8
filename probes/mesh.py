"""A device mesh: ranks in a grid with named axes, out of which process groups are sliced.

`init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))` numbers ranks row by row, so the last axis is made of
neighbours: put there what communicates most. `mesh["tp"]` is the row that this rank is in, a mesh of one axis; a slice
of several axes is a smaller grid. Flattening joins axes to one, whose group is all of their ranks. A tensor sharded on
a slice says nothing of the other axes: every row of the grid holds a copy of its own.

Here one parameter is split along each axis, one along the first two as a grid, one along all of them flattened. Try it
with other meshes: `--mesh pp=2,dp=2,tp=2`.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardviz
from shardviz.errors import ProbeError
from shardviz.layout.mesh import Mesh
from shardviz.live.compat import Shard, distribute_tensor, flatten_mesh

MESH = (2, 4)
TORCH = (2, 6)

MAX_AXES = 4


def check_mesh(mesh: Mesh) -> None:
    if mesh.ndim > MAX_AXES:
        raise ProbeError(f"this probe has a parameter for each of {MAX_AXES} axes, the mesh has {mesh.ndim}")


def build() -> nn.Module:
    along = {f"along_axis_{number}": nn.Parameter(torch.randn(24, 2)) for number in range(MAX_AXES)}
    return nn.ParameterDict({**along, "grid": nn.Parameter(torch.randn(12, 12)), "flat": nn.Parameter(torch.randn(24))})


def parallelize(model: nn.ParameterDict, mesh: DeviceMesh) -> None:
    axes = mesh.mesh_dim_names or ()
    for number, axis in enumerate(axes):
        split(model, f"along_axis_{number}", mesh[axis], Shard(0))
    if len(axes) > 1:
        split(model, "grid", mesh[axes[:2]], Shard(0), Shard(1))
        split(model, "flat", flatten_mesh(mesh), Shard(0))


def split(model: nn.ParameterDict, name: str, mesh: DeviceMesh, *placements: Shard) -> None:
    model[name] = nn.Parameter(distribute_tensor(model[name].detach(), mesh, placements))


if __name__ == "__main__":
    shardviz.run_probe(__file__)
