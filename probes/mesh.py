"""A device mesh: ranks in a grid with named axes, from which process groups are sliced.

`init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))` numbers ranks row by row, so neighbors lie along the
last axis: use it for the axis that communicates most. `mesh["tp"]` is this rank's row, a mesh of one axis; a slice of
several axes is a smaller grid. Flattening joins axes into one, whose group contains all of their ranks. A tensor
sharded on a slice says nothing about the other axes: every row of the grid holds a copy of its own.

Here one parameter is split along each axis, one along the first two as a grid, and one along all axes flattened. Try it
on other meshes: `--mesh pp=2,dp=2,tp=2`.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardviz
from shardviz.errors import ProbeError
from shardviz.layout.mesh import Mesh
from shardviz.live.compat.meshes import flatten_mesh  # mesh._flatten(): torch has no public name for it

MESH = (2, 4)

MAX_AXES = 4


def check_mesh(mesh: Mesh) -> None:
    if mesh.ndim > MAX_AXES:
        raise ProbeError(
            f"this probe has parameters for at most {MAX_AXES} axes, but the mesh has {mesh.ndim}", "use fewer axes"
        )


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
