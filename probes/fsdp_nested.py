"""FSDP2 in nested units: each layer is a unit of its own, and the root takes the remaining parameters.

Dim 0 of every parameter is split over fsdp, whatever the units are. A unit's parameters are gathered together, just
before its forward and again before its backward, and freed afterwards; their gradients are reduced and split together.
With `fully_shard` on the root only, the whole model is gathered at once and nothing is saved while it runs. With one
unit per layer, a rank holds its shards and one or two whole layers at any moment. Parameters that belong to no inner
unit (here the head's) are the root's own unit, which stays gathered from forward to backward. Call `fully_shard` from
the inside out.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import shardviz
from shardviz.probes._models import Blocks

AXES = ("fsdp",)
MESH = (4,)
BATCH_AXES = ("fsdp",)

expect = {"*.weight": "[*/fsdp, *]", "*.bias": "[*/fsdp]"}


def build() -> nn.Module:
    return nn.Sequential(Blocks(3), nn.Linear(12, 10))


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model[0].layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def batch() -> torch.Tensor:
    return torch.randn(120, 12)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
