"""FSDP2 from the meta device: no rank ever holds the whole model, and each loads only its own shards.

A model built under `torch.device("meta")` has shapes and no values. `fully_shard` splits dim 0 of the shapes over fsdp;
`to_empty` then allocates only this rank's shards, uninitialized; a sharded load fills them from a checkpoint, each rank
its own part. From there on it works as in `fsdp`.

The checkpoint here is the model that `build` made, in memory; a real one is a file. Buffers that are computed rather
than loaded must be computed again after `to_empty`, or they stay uninitialized.
"""

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import shardviz

AXES = ("fsdp",)
MESH = (4,)
BATCH_AXES = ("fsdp",)

expect = {"*.weight": "[*/fsdp, *]", "*.bias": "[*/fsdp]"}


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 10))


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    checkpoint = model.state_dict()
    sharded = copy.deepcopy(model).to("meta")
    for layer in (sharded[0], sharded[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    sharded.to_empty(device=mesh.device_type)
    state = {
        name: distribute_tensor(checkpoint[name], parameter.device_mesh, parameter.placements)
        for name, parameter in sharded.named_parameters()
    }
    sharded.load_state_dict(state)
    return sharded


def batch() -> torch.Tensor:
    return torch.randn(120, 12)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
