"""FSDP2 without resharding after forward: ZeRO 2. More memory, less communication.

`reshard_after_forward=True` (ZeRO 3) frees a unit's gathered parameters after its forward and gathers them again for
backward: two gathers per step. With False the first gather is kept until backward is over: one gather per step, and the
whole model in memory in between. An int keeps a smaller gather: the parameters are resharded over that many ranks. In
all three cases gradients are averaged over fsdp and split, and the captured shards, split along dim 0, are the same;
`shardviz show DUMP --comms` shows the gathers.
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
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


def batch() -> torch.Tensor:
    return torch.randn(120, 12)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
