"""HSDP over tensor parallel: three axes. Split over tp, each part again over shard, and copied along replicate.

From the inside out: `parallelize_module` on the tp axis, then `fully_shard` on the two outer axes together; shards are
copied along the first of these. A column-wise weight's dim 0 reads `24/tp/shard`; a row-wise weight is `[12/shard,
24/tp]`. Activations are summed over tp; weights are gathered, and gradients reduced and split, over shard; those parts
are averaged over replicate. The batch is split over shard and replicate, and is the same along tp. Typically tp stays
within a machine, shard within a rack, and replicate runs between racks.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardviz
from shardviz.probes._models import MLP

AXES = ("replicate", "shard", "tp")
MESH = (2, 2, 2)
BATCH_AXES = ("replicate", "shard")

expect = {
    "up.weight": "[*/tp/shard, *] =replicate",
    "up.bias": "[*/tp/shard] =replicate",
    "down.weight": "[*/shard, */tp] =replicate",
    "down.bias": "[*/shard] =replicate",
}


def build() -> nn.Module:
    return MLP()


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    up = ColwiseParallel(use_local_output=False)  # a DTensor knows its global size, even if tp does not divide 24
    parallelize_module(model, mesh["tp"], {"up": up, "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["replicate", "shard"])


def batch() -> torch.Tensor:
    return torch.randn(120, 12)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
