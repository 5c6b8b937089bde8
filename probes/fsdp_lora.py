"""FSDP2 with LoRA: a frozen weight is split like any other; only the small matrices beside it have gradients.

`fully_shard` gathers a unit's parameters together, frozen or not, and reduces the gradients of those that have one. So
a rank holds 1/fsdp of everything, but of gradients and optimizer state only what the adapters need: next to nothing.
An adapter's inner dim, its rank, is small: split over more ranks than it has rows, some hold none.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardviz
from shardviz.live.compat import fully_shard

AXES = ("fsdp",)
MESH = (4,)
BATCH_AXES = ("fsdp",)

RANK = 3

expect = {"*.weight": "[*/fsdp, *]", "*.bias": "[*/fsdp]"}


class Adapted(nn.Module):
    """A frozen linear layer, and two trained ones in a row that add to it."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(num_in, num_out).requires_grad_(False)
        self.down = nn.Linear(num_in, RANK, bias=False)
        self.up = nn.Linear(RANK, num_out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.up(self.down(x))


def build() -> nn.Module:
    return nn.Sequential(Adapted(12, 24), nn.ReLU(), Adapted(24, 10))


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def batch() -> torch.Tensor:
    return torch.randn(120, 12)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
