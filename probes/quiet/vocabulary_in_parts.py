"""Logits that stay in parts: each rank returns its own words, and the loss adds up exponentials over tp."""

from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh

import shardviz

AXES = ("dp", "tp")
MESH = (1, 2)
BATCH_AXES = ("dp",)

WORDS = 32


class SumOfParts(torch.autograd.Function):
    """A sum over ranks whose backward passes the gradient on: every rank computes the same loss."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, group: distributed.ProcessGroup) -> torch.Tensor:
        total = logits.clone()
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class GradientOfParts(torch.autograd.Function):
    """Pass hidden states on; in backward, sum the gradients from each rank's words."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, group: distributed.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.clone()
        distributed.all_reduce(total, group=ctx.group)
        return total, None


class Model(nn.Module):
    """A hidden layer and a head over a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.head = nn.Linear(16, WORDS, bias=False)
        self.group: distributed.ProcessGroup | None = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(rows))
        return self.head(hidden if self.group is None else GradientOfParts.apply(hidden, self.group))


def build() -> Model:
    return Model()


def parallelize(model: Model, mesh: DeviceMesh) -> None:
    tp = mesh["tp"]
    shard = model.head.weight.detach().chunk(tp.size())[tp.get_local_rank()]
    model.head.weight = nn.Parameter(shard.clone())
    model.group = tp.get_group()


def batch() -> torch.Tensor:
    return torch.randn(12, 8)


def loss(model: Model, rows: torch.Tensor) -> torch.Tensor:
    logits, words = model(rows), torch.arange(len(rows), device=rows.device) % WORDS
    if model.group is None:
        return nn.functional.cross_entropy(logits, words)
    first = distributed.get_rank(model.group) * logits.shape[1]
    is_own = (words >= first) & (words < first + logits.shape[1])
    of_word = logits.gather(1, ((words - first) * is_own)[:, None])[:, 0] * is_own
    total = SumOfParts.apply(logits.exp().sum(1), model.group)
    return (total.log() - SumOfParts.apply(of_word, model.group)).mean()


if __name__ == "__main__":
    shardviz.run_probe(__file__)
