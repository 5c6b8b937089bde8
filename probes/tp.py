"""Tensor parallel: one linear layer split by columns, the next by rows, so that one sum at the end is enough.

`ColwiseParallel` splits the weight's dim 0 (its output features) over tp: every rank computes part of the hidden
features, of all rows of the batch. `RowwiseParallel` splits dim 1 (its input features): every rank turns its part into
a contribution to all outputs, and those are summed over tp by an all_reduce. So input and output are copies on every
rank, and of the weights, their gradients and the hidden features a rank has 1/tp. The row-wise bias is whole on every
rank and added once, after the sum. In backward the input's gradient, where one is needed, is a sum over tp as well; the
weights' are not: each rank has its own.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardviz
from shardviz.probes._models import MLP

AXES = ("tp",)
MESH = (4,)

expect = {
    "up.weight": "[*/tp, *]",
    "up.bias": "[*/tp]",
    "down.weight": "[*, */tp]",
    "down.bias": "[*]",
}


def build() -> nn.Module:
    return MLP()


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    up = ColwiseParallel(use_local_output=False)  # a DTensor knows its global size, also where 24 does not divide
    parallelize_module(model, mesh["tp"], {"up": up, "down": RowwiseParallel()})


def batch() -> torch.Tensor:
    return torch.randn(120, 12)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
