"""Data parallel: DistributedDataParallel keeps the whole model on every rank and averages gradients during backward.

At the start rank 0's parameters and buffers are broadcast, so all copies begin equal whatever each rank's seed was. The
batch is split over dp; from there on ranks differ only in their gradients. Gradients are packed into buckets (25 MB by
default), last layer first, and each bucket is averaged over dp by one all_reduce as soon as it is full, while backward
continues; a model as small as this one fits in one bucket. Rank 0's buffers are broadcast again before each forward.
Memory: every rank holds the whole model, its gradients and its optimizer state.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import shardviz

AXES = ("dp",)
MESH = (4,)
BATCH_AXES = ("dp",)

expect = {"*weight": "[*, *] =dp", "*bias": "[*] =dp", "scale": "[*] =dp"}


class Scaled(nn.Module):
    """Two linear layers and a buffer, which has no gradient but must also be equal on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 24)
        self.last = nn.Linear(24, 10)
        self.register_buffer("scale", torch.rand(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu() * self.scale)


def build() -> nn.Module:
    return Scaled()


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    if mesh.get_local_rank("dp") != 0:  # other ranks start differently, which the broadcast corrects
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.zero_()
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def batch() -> torch.Tensor:
    return torch.randn(120, 12)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
