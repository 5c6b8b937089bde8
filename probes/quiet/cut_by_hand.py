"""Weights cut by hand into plain tensors: no placements, but every row is on some rank, and nothing is wrong."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardviz

AXES = ("tp",)
MESH = (3,)


def build() -> nn.Linear:
    return nn.Linear(4, 9, bias=False)


def parallelize(model: nn.Linear, mesh: DeviceMesh) -> None:
    rows = model.weight.detach().chunk(mesh["tp"].size())[mesh.get_local_rank("tp")]
    model.weight = nn.Parameter(rows.clone())


if __name__ == "__main__":
    shardviz.run_probe(__file__)
