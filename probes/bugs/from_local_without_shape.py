"""Uneven shards passed to DTensor.from_local without their global shape: ranks disagree on the shape.

`from_local` assumes that the global size is the local size times the number of ranks: 10 rows on 4 ranks are 3, 3, 3
and 1, so three ranks assume 12 rows and one assumes 4. Pass `shape=` and `stride=` to prevent this. Otherwise
collectives abort or wait for each other.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import shardviz

AXES = ("tp",)
MESH = (4,)
KINDS = ("wrong-shape",)


def build() -> nn.Linear:
    return nn.Linear(4, 10, bias=False)


def parallelize(model: nn.Linear, mesh: DeviceMesh) -> None:
    rows = model.weight.detach().chunk(mesh["tp"].size())[mesh.get_local_rank("tp")]
    model.weight = nn.Parameter(DTensor.from_local(rows.clone(), mesh["tp"], [Shard(0)]))


if __name__ == "__main__":
    shardviz.run_probe(__file__)
