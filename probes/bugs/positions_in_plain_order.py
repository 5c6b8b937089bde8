"""Context parallel with tokens in head-tail order and positions in plain order: the causal mask is wrong.

Tokens, labels and the rotary table belong to the same sequence. The load balancer reorders its inputs; positions that
each rank cuts by itself keep their own order, so a token is read at another token's position. Shapes agree and nothing
raises. torch's `context_parallel` splits only the tensors in its `buffers`.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardviz

AXES = ("cp",)
MESH = (4,)
KINDS = ("sequence-order",)

TOKENS = 48


def build() -> nn.Module:
    return nn.Linear(8, 8)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leave the weights whole; the sequence is split."""


def sequence(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    rank, ranks = mesh.get_local_rank("cp"), mesh["cp"].size()
    everywhere = torch.arange(TOKENS)
    chunks = everywhere.chunk(2 * ranks)
    balanced = torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])
    return {"tokens": balanced, "labels": balanced, "positions": everywhere.chunk(ranks)[rank]}


if __name__ == "__main__":
    shardviz.run_probe(__file__)
