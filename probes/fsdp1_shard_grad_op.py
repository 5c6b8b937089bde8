"""FSDP1, SHARD_GRAD_OP (ZeRO 2): gradients and optimizer state are split; parameters are whole during a step.

Between steps a rank holds its piece of each layer's flattened parameters, as under FULL_SHARD. The difference is when
parameters are freed: here the parameters gathered for forward are kept for backward. That saves the second gather
(`shardviz show DUMP --comms` shows one per layer) and costs the whole model's memory while the step runs. Gradients are
averaged and split by a reduce_scatter in both. `use_orig_params=True` keeps the original parameters, so that an
optimizer can distinguish them.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

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
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_mesh=mesh,
        device_id=torch.device(mesh.device_type),
        use_orig_params=True,
    )


def batch() -> torch.Tensor:
    return torch.randn(120, 12)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
