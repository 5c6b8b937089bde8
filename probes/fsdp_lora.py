"""FSDP2 with LoRA: a frozen weight is split like any other; only the small matrices beside it have gradients.

`fully_shard` gathers a unit's parameters together, frozen or not, and reduces the gradients of those that have one. So
a rank holds 1/fsdp of every weight, but gradients and optimizer state only for the adapters, which are small. An
adapter's inner dim (its rank) is small too: if it is split over more ranks than it has rows, some ranks hold none.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import shardviz

AXES = ("fsdp",)
MESH = (4,)
BATCH_AXES = ("fsdp",)

RANK = 3

expect = {"*.weight": "[*/fsdp, *]", "*.bias": "[*/fsdp]"}


class Adapted(nn.Module):
    """A frozen linear layer plus the output of two trained ones in a row."""

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
