"""Every shard draws the same random numbers: one seed on every rank (OLMo-core PR 307, torchtitan#3106).

The model is sharded first and initialized afterwards, and each rank fills its own shard. With one seed on all ranks
every shard of a weight is bitwise the same, and the whole matrix has only the rank of one shard. It trains, badly.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardviz

AXES = ("fsdp",)
MESH = (4,)
KINDS = ("identical-shards",)


def build() -> nn.Linear:
    return nn.Linear(8, 16, bias=False)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh)


def initialize(model: nn.Module, mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    for parameter in model.parameters():
        shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        shard.detach().normal_()


if __name__ == "__main__":
    shardviz.run_probe(__file__)
