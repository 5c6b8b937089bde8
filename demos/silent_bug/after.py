"""The same weight, split the same way, with the label that says so."""

from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

AXES = ("fsdp", "tp")


def build():
    return nn.Linear(12, 12, bias=False)


def parallelize(model, mesh):
    rows = model.weight.detach()
    for axis in ("tp", "fsdp"):
        rows = rows.chunk(mesh[axis].size())[mesh.get_local_rank(axis)]
    placements = (_StridedShard(0, split_factor=mesh["tp"].size()), Shard(0))
    model.weight = nn.Parameter(DTensor.from_local(rows, mesh, placements))
