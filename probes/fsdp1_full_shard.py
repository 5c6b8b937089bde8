"""FSDP1, FULL_SHARD (ZeRO 3): a unit's parameters are flattened into one vector, which is split over the ranks.

Here each linear layer is a unit. Its vector is padded until it divides, so every rank has the same number of elements,
wherever the cuts fall: within rows, within parameters. With `use_orig_params=False` the model has one `_flat_param` per
unit; with True the original parameters are views into it, and a rank may hold a piece of one, or nothing. Layouts count
elements: `[flat(24, 12) at 0 of 312/fsdp]` is the weight and `[flat(24) at 288 of 312/fsdp]` the bias of one vector of
312.

The vector is gathered for the unit's forward, freed, and gathered again for its backward. Gradients are averaged and
split in one reduce_scatter. So a rank holds 1/fsdp of the weights, gradients and optimizer state, plus one whole unit
at a time.
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
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_mesh=mesh,
        device_id=torch.device(mesh.device_type),
    )


def batch() -> torch.Tensor:
    return torch.randn(120, 12)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
