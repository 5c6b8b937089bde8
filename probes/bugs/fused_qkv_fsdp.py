"""A fused q,k,v split segment by segment over tp, then by FSDP2: the label gives an order that the shards do not have.

The local tensors are right; `_StridedShard(0, split_factor=3)` over tp describes them. `fully_shard` then splits each
rank's rows as one stretch, and adds a second label with a split_factor of tp's size. torch reads the two as segments
within parts, so full_tensor and checkpoints come out of order. No placements describe these shards.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard  # torch has no public name for it

import shardviz

AXES = ("fsdp", "tp")
MESH = (2, 2)
KINDS = ("misordered",)

expect = {"weight": "[(*/3/tp)/fsdp, *]"}


def build() -> nn.Linear:
    return nn.Linear(8, 48, bias=False)


def parallelize(model: nn.Linear, mesh: DeviceMesh) -> None:
    rank, ranks = mesh.get_local_rank("tp"), mesh["tp"].size()
    local = torch.cat([segment.chunk(ranks)[rank] for segment in model.weight.detach().chunk(3)])
    by_segment = _StridedShard(0, split_factor=3)
    model.weight = nn.Parameter(DTensor.from_local(local, mesh["tp"], [by_segment]))
    fully_shard(model, mesh=mesh["fsdp"])


if __name__ == "__main__":
    shardviz.run_probe(__file__)
