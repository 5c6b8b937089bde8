"""Uneven FSDP2 over TP put together as if it were even: six rows on a 2x2 mesh (pytorch PR 150490, PR 163843).

tp splits six rows into 3 + 3 and fsdp splits each three into 2 + 1. torch knew the order but not the sizes: it gathered
as if every shard were as large as the first, and rows came back out of order. Here the rows lie as FSDP2 over TP leaves
them, under the label by which torch put them together.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import shardviz

AXES = ("fsdp", "tp")
MESH = (2, 2)
KINDS = ("misordered",)


def build() -> nn.Linear:
    return nn.Linear(1, 6, bias=False)


def parallelize(model: nn.Linear, mesh: DeviceMesh) -> None:
    fsdp, tp = (mesh.get_local_rank(axis) for axis in AXES)
    rows = torch.tensor_split(model.weight.detach(), mesh["tp"].size())[tp]
    shard = torch.tensor_split(rows, mesh["fsdp"].size())[fsdp]
    whole, label = model.weight, (Shard(0), Shard(0))
    model.weight = nn.Parameter(DTensor.from_local(shard, mesh, label, shape=whole.shape, stride=whole.stride()))


if __name__ == "__main__":
    shardviz.run_probe(__file__)
