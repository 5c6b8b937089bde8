"""A small model and its plan, for tests on ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

LAYOUTS = {
    "up.weight": "[*/tp/fsdp, *]",
    "up.bias": "[*/tp/fsdp]",
    "down.weight": "[*/fsdp, */tp]",
    "down.bias": "[*/fsdp]",
}


class MLP(nn.Module):
    """Two linear layers: 12 to 24 features and back."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 24)
        self.down = nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()) * 1


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["fsdp"])
    return model
