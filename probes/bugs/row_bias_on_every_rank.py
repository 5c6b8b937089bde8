"""A row-parallel bias added on every rank: after the sum over tp it counts tp times (TGI#1036).

Each rank multiplies its columns of the weight, adds the whole bias, and the outputs are summed. The bias must be added
once: after the sum, or on one rank.
"""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.nn.functional import all_reduce

import shardviz

AXES = ("tp",)
MESH = (4,)
KINDS = ("wrong-scale",)


class RowParallel(nn.Linear):
    """A linear layer whose input features are split over a group of ranks."""

    group: distributed.ProcessGroup | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return super().forward(x)
        rank, size = distributed.get_rank(self.group), distributed.get_world_size(self.group)
        output = nn.functional.linear(x.chunk(size, dim=-1)[rank], self.weight, self.bias)
        return all_reduce(output, group=self.group)


def build() -> RowParallel:
    return RowParallel(8, 6)


def parallelize(model: RowParallel, mesh: DeviceMesh) -> None:
    columns = model.weight.detach().chunk(mesh["tp"].size(), dim=1)[mesh.get_local_rank("tp")]
    model.weight = nn.Parameter(columns.clone())
    model.group = mesh.get_group("tp")


def batch() -> torch.Tensor:
    return torch.randn(12, 8)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
