"""FSDP2 in nested units: each layer is a unit of its own, and the root takes what is left.

Dim 0 of every parameter is split over fsdp, whatever the units are; a unit's are gathered together, just before its
forward and again before its backward, and freed after, and their gradients are reduced and split together. With
`fully_shard` on the root only, the whole model is gathered at once and nothing is saved while it runs; with one unit a
layer, a rank holds its shards and one or two whole layers at any moment. Parameters that no inner unit claimed, here
the head's, are the root's own unit, which stays gathered from forward to backward. Call `fully_shard` from the inside
out.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardviz
from shardviz.live.compat import fully_shard
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
