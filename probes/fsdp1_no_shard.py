"""FSDP1, NO_SHARD: nothing is split; the flattened parameters are whole on every rank, as under DDP.

Each rank has all weights, gradients and optimizer state; gradients are averaged over fsdp by an all_reduce of the flat
vector. FULL_SHARD becomes this on one rank. torch deprecates NO_SHARD and warns about it when this runs: use
DistributedDataParallel instead, which does the same.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import shardviz

AXES = ("fsdp",)
MESH = (4,)
BATCH_AXES = ("fsdp",)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 10))


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    device = torch.device(mesh.device_type)
    strategy = ShardingStrategy.NO_SHARD
    return FullyShardedDataParallel(model, sharding_strategy=strategy, device_mesh=mesh, device_id=device)


def batch() -> torch.Tensor:
    return torch.randn(120, 12)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
