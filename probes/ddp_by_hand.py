"""Data parallel by hand: the loop that DistributedDataParallel wraps.

Every rank has the whole model, with its gradients and optimizer state, and its own part of the batch. The mean over the
batch is the mean of the parts' means, so the gradients are averaged over dp: summed by an all_reduce, and divided by
the number of ranks. All ranks start from the same weights and take the same step, so they stay equal. Two things are
easy to forget, and nothing raises without them: starting equal (broadcast the weights from one rank), and dividing.
"""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh

import shardviz

AXES = ("dp",)
MESH = (4,)
BATCH_AXES = ("dp",)

expect = {"*.weight": "[*, *] =dp", "*.bias": "[*] =dp"}


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 10))


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    group = mesh.get_group("dp")
    first = distributed.get_global_rank(group, 0)
    for tensor in model.state_dict().values():
        distributed.broadcast(tensor, src=first, group=group)


def batch() -> torch.Tensor:
    return torch.randn(120, 12)


def step(model: nn.Module, rows: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    loss = model(rows).square().mean()
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        distributed.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        parameter.grad.div_(mesh["dp"].size())
    return loss


if __name__ == "__main__":
    shardviz.run_probe(__file__)
