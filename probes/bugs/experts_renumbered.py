"""Experts renumbered on every rank: one name, different weights (KempnerForge#202).

Expert parallel gives each rank some of the experts. If a rank keeps its own in a list that starts at 0, `experts.0` is
a different expert on every rank, and any code that goes by name, such as a checkpoint or a broadcast, overwrites one
expert with another.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardviz

AXES = ("ep",)
MESH = (4,)
KINDS = ("name-collision",)


def build() -> nn.Module:
    return nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(8))})


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    size, rank = mesh["ep"].size(), mesh.get_local_rank("ep")
    per_rank = len(model["experts"]) // size
    model["experts"] = nn.ModuleList(model["experts"][rank * per_rank : (rank + 1) * per_rank])


if __name__ == "__main__":
    shardviz.run_probe(__file__)
