"""FSDP2 over a dim that two other axes split unevenly: the label says another cut than was made. Live in torch 2.15.

Five rows go over cp into 3 + 2, over tp into 2 + 1 and 1 + 1, and FSDP2 cuts each of these again. Its label is
`(_StridedShard(0, split_factor=4), Shard(0), Shard(0))`: four parts at once, and torch.chunk makes 2 + 2 + 1 + 0.
Where the sizes divide the two agree; where they do not, `full_tensor()` and checkpoints put rows in other places, and
nothing raises. Found by shardviz's own tests of its oracle against torch.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardviz
from shardviz.live.compat import Shard, distribute_tensor, fully_shard

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
