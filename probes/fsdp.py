"""FSDP2: `fully_shard` splits dim 0 of every parameter over the mesh, each parameter by itself.

A layer's parameters are gathered just before the layer runs and freed after it, in forward and again in backward. Its
gradients are averaged over fsdp and split in one reduce_scatter, and each rank keeps its own part. So between layers a
rank holds 1/fsdp of the weights, gradients and optimizer state, and sees 1/fsdp of the batch. Sizes need not divide:
dim 0 is cut as `torch.chunk` cuts it, so the last ranks may hold less, or nothing.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import shardviz

AXES = ("fsdp",)
MESH = (4,)
BATCH_AXES = ("fsdp",)

expect = {"*.weight": "[*/fsdp, *]", "*.bias": "[*/fsdp]"}


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 10))


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def batch() -> torch.Tensor:
    return torch.randn(120, 12)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
