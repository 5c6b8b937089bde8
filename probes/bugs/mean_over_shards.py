"""`mse_loss` of DTensors in torch 2.13: gradients too large by the number of shards, at the right loss.

The mean is over all elements, of all ranks. Its backward is given only this rank's part, and divides by the number of
elements in it. `smooth_l1_loss`, `huber_loss`, `soft_margin_loss` and `binary_cross_entropy` do the same;
`cross_entropy`, `l1_loss` and `(given - wanted).square().mean()` are right. Found by a sweep of shardviz's own over
right programs; `shardviz audit` tries such functions.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_module
from torch.nn.functional import mse_loss

import shardviz

AXES = ("dp",)
MESH = (2,)
BATCH_AXES = ("dp",)
KINDS = ("wrong-scale",)
TORCH = (2, 13)


class Model(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())


def build() -> Model:
    return Model()


def parallelize(model: Model, mesh: DeviceMesh) -> None:
    distribute_module(model, mesh)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 8), torch.randn(8, 6)


def loss(model: Model, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    weight = model.up.weight
    if not isinstance(weight, DTensor):
        return mse_loss(model(batch[0]), batch[1])
    x, wanted = (DTensor.from_local(rows, weight.device_mesh, (Shard(0),)) for rows in batch)
    return mse_loss(model(x), wanted).full_tensor()


if __name__ == "__main__":
    shardviz.run_probe(__file__)
