"""HSDP with FSDP2: shards within a group of ranks, equal copies of them between the groups.

The mesh has two axes, and the batch is split over both. Along `shard`, parameters, gradients and optimizer state are
split as in FSDP, so a rank holds 1/shard of them; along `replicate`, every group holds the same shards. Gradients are
averaged and split within a group by a reduce_scatter, and the parts are then averaged between groups by an all_reduce.
A gather stays within a group, typically one machine; only the all_reduce of 1/shard of the gradients crosses machines.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import shardviz

AXES = ("replicate", "shard")
MESH = (2, 4)
BATCH_AXES = ("replicate", "shard")

expect = {"*.weight": "[*/shard, *] =replicate", "*.bias": "[*/shard] =replicate"}


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
