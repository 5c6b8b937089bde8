"""Context parallel in head-tail order throughout, and a table that is whole on every rank: nothing is out of order.

Tokens and labels are reordered alike, which is the load balancer's purpose. The rotary table is not split but looked up
by position, and the mask's rows follow the tokens' order.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardviz

AXES = ("cp",)
MESH = (4,)

TOKENS = 48
SEQUENCE = {"table": 0, "mask": 0}


class Encoded(nn.Module):
    """A linear layer with two position-dependent tables."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.randn(TOKENS, 8))
        self.register_buffer("mask", torch.ones(TOKENS, TOKENS).tril())


def build() -> nn.Module:
    return Encoded()


def balanced(mesh: DeviceMesh) -> torch.Tensor:
    rank, ranks = mesh.get_local_rank("cp"), mesh["cp"].size()
    chunks = torch.arange(TOKENS).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def parallelize(model: Encoded, mesh: DeviceMesh) -> None:
    model.mask = model.mask[balanced(mesh)]


def sequence(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    return {"tokens": balanced(mesh), "labels": balanced(mesh)}


if __name__ == "__main__":
    shardviz.run_probe(__file__)
