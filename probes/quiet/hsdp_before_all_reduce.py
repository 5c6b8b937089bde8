"""HSDP between backward and the all-reduce over replicas: gradients are not there yet, and must not be judged.

Gradient accumulation turns the all-reduce off for all but the last micro-batch. FSDP2 then keeps its partly reduced
gradients internally, and `.grad` is None.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import shardviz

AXES = ("replicate", "shard")
MESH = (2, 2)
BATCH_AXES = ("replicate", "shard")


def build() -> nn.Linear:
    return nn.Linear(4, 4)


def parallelize(model: nn.Linear, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh)


def batch() -> torch.Tensor:
    return torch.randn(8, 4)


def step(model: nn.Linear, rows: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    model.set_requires_all_reduce(False)
    own_loss = model(rows).square().mean()
    torch.autograd.backward(own_loss)
    return own_loss


if __name__ == "__main__":
    shardviz.run_probe(__file__)
