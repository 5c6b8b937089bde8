"""FSDP1, SHARD_GRAD_OP (ZeRO 2): gradients and optimizer state are split; parameters are whole during a step.

Between steps a rank holds its shard of the flattened parameters, as under FULL_SHARD. The difference is when they are
freed: here the gather of forward is kept for backward, which saves the second gather and costs the whole model's memory
while the step runs. `use_orig_params=True` keeps the original names, so that an optimizer can tell them apart.
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
    return FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        device_mesh=mesh,
        device_id=torch.device(mesh.device_type),
        use_orig_params=True,
    )


def batch() -> torch.Tensor:
    return torch.randn(120, 12)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
