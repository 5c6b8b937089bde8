"""FSDP2 over tensor parallel: every weight is split over tp, and each part again over fsdp.

Tensor parallel goes first, on the inner mesh axis, where communication is fast; `fully_shard` then splits each tp
rank's part on the outer axis. So dim 0 of a column-wise weight reads `12/tp/fsdp`: over tp first, although fsdp is the
first axis of the mesh. torch spells that `(_StridedShard(0, split_factor=tp), Shard(0))`; torch 2.4 spelled it
`(Shard(0), Shard(0))`, and its full tensors came back out of order (pytorch#129229).

The batch is split over fsdp and is the same along tp. Weights are gathered over fsdp only, which gives a rank its
tensor-parallel part. Activations are summed over tp; gradients are averaged over fsdp and split again; over tp each
rank has its own. So a rank holds 1/(fsdp * tp) of the weights, gradients and optimizer state.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardviz
from shardviz.probes._models import MLP

AXES = ("fsdp", "tp")
MESH = (2, 4)
BATCH_AXES = ("fsdp",)

expect = {
    "up.weight": "[*/tp/fsdp, *]",
    "up.bias": "[*/tp/fsdp]",
    "down.weight": "[*/fsdp, */tp]",
    "down.bias": "[*/fsdp]",
}


def build() -> nn.Module:
    return MLP()


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    up = ColwiseParallel(use_local_output=False)  # a DTensor knows its global size, even if tp does not divide 24
    parallelize_module(model, mesh["tp"], {"up": up, "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["fsdp"])


def batch() -> torch.Tensor:
    return torch.randn(120, 12)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
