"""A weight split over tp, each part again over fsdp, and labeled as torch 2.4 did: left to right."""

from torch import nn
from torch.distributed.tensor import DTensor, Shard

AXES = ("fsdp", "tp")


def build():
    return nn.Linear(12, 12, bias=False)


def parallelize(model, mesh):
    rows = model.weight.detach()
    for axis in ("tp", "fsdp"):
        rows = rows.chunk(mesh[axis].size())[mesh.get_local_rank(axis)]
    placements = (Shard(0), Shard(0))
    model.weight = nn.Parameter(DTensor.from_local(rows, mesh, placements))
