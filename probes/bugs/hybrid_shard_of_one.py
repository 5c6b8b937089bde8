"""HYBRID_SHARD on an (n, 1) mesh: gradients are never reduced (pytorch#154888).

With shards of one rank there is nothing to reduce and split, so FSDP1 falls back to keeping whole parameters, and keeps
using the group of one rank: the sum over `replicate` is lost. Every rank trains on its own batch alone.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import shardviz

AXES = ("replicate", "shard")
MESH = (4, 1)
BATCH_AXES = ("replicate", "shard")
KINDS = ("unreduced-gradient",)


def build() -> nn.Module:
    return nn.Linear(8, 8)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    device = torch.device(mesh.device_type)
    strategy = ShardingStrategy.HYBRID_SHARD
    return FullyShardedDataParallel(model, sharding_strategy=strategy, device_mesh=mesh, device_id=device)


def batch() -> torch.Tensor:
    return torch.randn(24, 8)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
