"""AVG where SUM was needed: gradients of sequence-parallel parameters come out tp times too small (gpt-neox PR 1259).

Each tp rank has seen a part of the sequence, so a replicated weight's gradient is the sum of the ranks' gradients. The
reduction already in use for data parallel averages instead.
"""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh

import shardviz

AXES = ("tp",)
MESH = (4,)
BATCH_AXES = ("tp",)
KINDS = ("wrong-scale",)


def build() -> nn.Module:
    return nn.LayerNorm(8)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leave the norm whole on every rank; its input rows are split over tp."""


def batch() -> torch.Tensor:
    return torch.randn(24, 8)


def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return (model(rows) * torch.arange(8.0, dtype=rows.dtype)).square().mean()


def step(model: nn.Module, rows: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    own_loss = loss(model, rows)
    torch.autograd.backward(own_loss / mesh["tp"].size())
    for parameter in model.parameters():
        assert parameter.grad is not None
        distributed.all_reduce(parameter.grad, group=mesh.get_group("tp"))
        parameter.grad.div_(mesh["tp"].size())
    return own_loss


if __name__ == "__main__":
    shardviz.run_probe(__file__)
