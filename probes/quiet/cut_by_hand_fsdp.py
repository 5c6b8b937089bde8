"""Columns and rows that code cuts over tp, which FSDP splits again over dp: its mesh does not have tp, and says so."""

from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import shardviz

AXES = ("dp", "tp")
MESH = (2, 2)
BATCH_AXES = ("dp",)

Group = distributed.ProcessGroup


class SumForward(torch.autograd.Function):
    """The ranks' terms, summed; each rank's gradient is that of the sum."""

    @staticmethod
    def forward(ctx: Any, term: torch.Tensor, group: Group) -> torch.Tensor:
        total = term.clone()
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class SumBackward(torch.autograd.Function):
    """What all ranks read, as it is; the gradients that they send back are summed."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.clone()
        distributed.all_reduce(total, group=ctx.group)
        return total, None


class Block(nn.Module):
    """Two linear layers behind each other, with a residual around them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.group: Group | None = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return rows + self.down(self.up(rows).relu())
        term = functional.linear(self.up(SumBackward.apply(rows, self.group)).relu(), self.down.weight)
        return rows + SumForward.apply(term, self.group) + self.down.bias


def build() -> nn.Sequential:
    return nn.Sequential(Block(), Block())


def parallelize(model: nn.Sequential, mesh: DeviceMesh) -> None:
    rank, size = mesh["tp"].get_local_rank(), mesh["tp"].size()
    for block in model.children():
        assert isinstance(block, Block)
        block.group = mesh["tp"].get_group()
        block.up.weight = nn.Parameter(block.up.weight.detach().chunk(size)[rank].clone())
        block.up.bias = nn.Parameter(block.up.bias.detach().chunk(size)[rank].clone())
        block.down.weight = nn.Parameter(block.down.weight.detach().chunk(size, 1)[rank].clone())
    fully_shard(model, mesh=mesh["dp"])


def batch() -> torch.Tensor:
    return torch.randn(8, 8)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
