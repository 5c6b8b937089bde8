"""Gradients of a replicated norm weight, not summed under sequence parallel (Megatron-LM#1446).

Under sequence parallel each tp rank normalizes its own part of the sequence with an equal copy of the norm's weight.
Each copy's gradient has seen only that part: the gradients must be summed over tp before the optimizer steps, or the
copies drift apart.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardviz

AXES = ("tp",)
MESH = (4,)
BATCH_AXES = ("tp",)
KINDS = ("unreduced-gradient",)


def build() -> nn.Module:
    return nn.LayerNorm(8)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leave the norm whole on every rank; its input rows are split over tp."""


def batch() -> torch.Tensor:
    return torch.randn(24, 8)


def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return (model(rows) * torch.arange(8.0, dtype=rows.dtype)).square().mean()


if __name__ == "__main__":
    shardviz.run_probe(__file__)
