"""FSDP2 over TP labeled left to right: tp split the rows first, but the placements claim fsdp did (pytorch#129229).

torch 2.4 left tensors in this state. The data is right: rows are split over tp first, and each part over fsdp. The
label `(Shard(0), Shard(0))` claims the opposite, so `full_tensor()` puts the parts together in the wrong order, and a
checkpoint saved from it is permuted. Nothing raised; filling the weight with arange and printing each rank's shard
showed it. Fixed by pytorch PR 130760, which labels it `(_StridedShard(0, split_factor=tp), Shard(0))`.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import shardviz

AXES = ("fsdp", "tp")
MESH = (2, 4)
KINDS = ("misordered",)


def build() -> nn.Linear:
    return nn.Linear(12, 12, bias=False)


def parallelize(model: nn.Linear, mesh: DeviceMesh) -> None:
    fsdp, tp = (mesh.get_local_rank(axis) for axis in AXES)
    rows = model.weight.detach().chunk(mesh["tp"].size())[tp].chunk(mesh["fsdp"].size())[fsdp]
    whole = model.weight
    label = (Shard(0), Shard(0))
    model.weight = nn.Parameter(DTensor.from_local(rows, mesh, label, shape=whole.shape, stride=whole.stride()))


if __name__ == "__main__":
    shardviz.run_probe(__file__)
