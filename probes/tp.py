"""Tensor parallel: one linear layer split by columns, the next by rows, so that one sum at the end is enough.

`ColwiseParallel` splits the weight's dim 0 (its output features) over tp: every rank computes some of the hidden
features, for all rows of the batch. `RowwiseParallel` splits dim 1 (its input features): every rank turns its hidden
features into a contribution to all outputs, and an all_reduce sums the contributions over tp. So input and output are
copies on every rank, and a rank has 1/tp of the weights, their gradients and the hidden features. The row-wise bias is
whole on every rank and is added once, after the sum. In backward, the gradient of the input (where one is needed) is a
sum over tp as well; the gradients of the weights are not: each rank has its own.
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
    up = ColwiseParallel(use_local_output=False)  # a DTensor knows its global size, even if tp does not divide 24
    parallelize_module(model, mesh["tp"], {"up": up, "down": RowwiseParallel()})


def batch() -> torch.Tensor:
    return torch.randn(120, 12)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
