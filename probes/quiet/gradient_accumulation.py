"""Gradient accumulation: the gradients of two micro-batches are reduced once; no output is that of the whole batch."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import shardviz

AXES = ("fsdp",)
MESH = (2,)
BATCH_AXES = ("fsdp",)

MICROBATCHES = 2


def build() -> nn.Linear:
    return nn.Linear(4, 4)


def parallelize(model: nn.Linear, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh)


def batch() -> torch.Tensor:
    return torch.randn(24, 4)


def step(model: nn.Linear, rows: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    total = rows.new_zeros(())
    for number, micro_batch in enumerate(rows.chunk(MICROBATCHES)):
        model.set_requires_gradient_sync(number == MICROBATCHES - 1)
        loss = model(micro_batch).square().mean() / MICROBATCHES
        loss.backward()
        total += loss.detach()
    return total


if __name__ == "__main__":
    shardviz.run_probe(__file__)
