"""HSDP with FSDP1: HYBRID_SHARD flattens a unit's parameters into one vector and splits it within a group of ranks.

A 10x10 weight becomes 100 elements; over four ranks each holds 25 of them: two and a half rows. That is why FSDP1's
layouts count elements, not rows: `[flat(10, 10)/shard]`. Between groups, along `replicate`, the shards are equal
copies. Gradients are reduced and split within a group, then averaged between groups. If a unit has several parameters,
each is a stretch of the concatenation.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import shardviz

AXES = ("replicate", "shard")
MESH = (2, 4)
BATCH_AXES = ("replicate", "shard")

expect = {"weight": "[flat(10, 10)/shard] =replicate"}


def build() -> nn.Module:
    return nn.Linear(10, 10, bias=False)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    device = torch.device(mesh.device_type)
    strategy = ShardingStrategy.HYBRID_SHARD
    return FullyShardedDataParallel(model, sharding_strategy=strategy, device_mesh=mesh, device_id=device)


def batch() -> torch.Tensor:
    return torch.randn(120, 10)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
