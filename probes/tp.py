"""Tensor parallel: one linear layer split by columns, the next by rows, so that one sum at the end is enough.

`ColwiseParallel` splits the weight's dim 0 (its output features) over tp: every rank computes part of the hidden
features. `RowwiseParallel` splits dim 1 (its input features): every rank turns its part into a contribution to all
outputs, and those are summed over tp. The row-wise bias is whole on every rank and added once, after the sum.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardviz

AXES = ("tp",)
MESH = (4,)

expect = {
    "up.weight": "[*/tp, *]",
    "up.bias": "[*/tp]",
    "down.weight": "[*, */tp]",
    "down.bias": "[*]",
}


class MLP(nn.Module):
    """Two linear layers: 12 to 24 features and back."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 24)
        self.down = nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def build() -> nn.Module:
    return MLP()


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def batch() -> torch.Tensor:
    return torch.randn(120, 12)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
