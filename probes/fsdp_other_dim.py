"""FSDP2 on another dim: `shard_placement_fn` chooses, for each parameter, the dim that is split.

Here it is the last dim: weights are split by columns, `[24, 12/fsdp]`, and biases, which have one dim, as usual. Dim 0
is the default because a shard is then one stretch of memory, and gathers need no further copy. Another dim pays off
where dim 0 is shorter than the number of ranks, or where tensor parallel has taken it. Dim 0 may be uneven; every other
dim must divide by the number of ranks, or `fully_shard` raises. Gathers and sums are as in `fsdp`.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import shardviz
from shardviz.layout.mesh import Mesh
from shardviz.probes._refusals import refuse_uneven

AXES = ("fsdp",)
MESH = (4,)
BATCH_AXES = ("fsdp",)

FEATURES = 12

expect = {"*.weight": "[*, */fsdp]", "*.bias": "[*/fsdp]"}


def check_mesh(mesh: Mesh) -> None:
    refuse_uneven(mesh, "fsdp", FEATURES, "columns", "torch: FSDP does not support uneven sharding on dim 1")


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 2 * FEATURES), nn.ReLU(), nn.Linear(2 * FEATURES, 10))


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh, shard_placement_fn=last_dim)


def last_dim(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.ndim - 1)


def batch() -> torch.Tensor:
    return torch.randn(120, FEATURES)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
