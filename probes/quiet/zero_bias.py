"""A bias that starts at zero: its shards are bitwise the same on every rank, as they should be."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import shardviz

AXES = ("fsdp",)
MESH = (2,)


def build() -> nn.Linear:
    model = nn.Linear(4, 4)
    nn.init.zeros_(model.bias)
    return model


def parallelize(model: nn.Linear, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
