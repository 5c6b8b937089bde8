"""FSDP2 over a dim that two other axes split unevenly: the label describes a different split. Present in torch 2.15.

Five rows are split over cp into 3 + 2, over tp into 2 + 1 and 1 + 1, and FSDP2 splits each of these again. Its label is
`(_StridedShard(0, split_factor=4), Shard(0), Shard(0))`: four parts at once, which torch.chunk makes 2 + 2 + 1 + 0. If
the sizes divide, the two agree; if not, `full_tensor()` and checkpoints put rows in the wrong places, and nothing
raises. Found by shardviz's own tests of its oracle against torch.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import shardviz

AXES = ("fsdp", "cp", "tp")
MESH = (2, 2, 2)
KINDS = ("misordered",)
TORCH = (2, 13)


class Rows(nn.Module):
    """Five rows of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


def build() -> Rows:
    return Rows()


def parallelize(model: Rows, mesh: DeviceMesh) -> None:
    inner = mesh["cp", "tp"]
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), inner, (Shard(0), Shard(0))))
    fully_shard(model, mesh=mesh["fsdp"])


if __name__ == "__main__":
    shardviz.run_probe(__file__)
