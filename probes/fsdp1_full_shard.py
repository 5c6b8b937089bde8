"""FSDP1, FULL_SHARD (ZeRO 3): a unit's parameters are flattened into one vector, and that is split over the ranks.

The vector is padded until it divides, so every rank has as many elements, wherever that cuts: through rows, through
parameters. With `use_orig_params=False` the model has one `_flat_param` a unit; with True the original parameters are
views into it, of which a rank may hold a piece, or nothing. Layouts count elements: `[flat(24, 12)/fsdp]`, and where a
unit has several parameters, `flat(24) at 288 of 312`. The vector is gathered for forward, freed, and gathered again for
backward; gradients are reduced and split in one reduce_scatter.
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
    strategy = ShardingStrategy.FULL_SHARD
    return FullyShardedDataParallel(model, sharding_strategy=strategy, device_mesh=mesh, device_id=device)


def batch() -> torch.Tensor:
    return torch.randn(120, 12)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
