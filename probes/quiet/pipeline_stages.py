"""Stages of a pipeline: a rank has its own layers only, and nothing is missing."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardviz

AXES = ("pp",)
MESH = (2,)


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def parallelize(model: nn.Sequential, mesh: DeviceMesh) -> None:
    for stage in range(len(model)):
        if stage != mesh.get_local_rank("pp"):
            model[stage] = nn.Identity()


if __name__ == "__main__":
    shardviz.run_probe(__file__)
