"""`.item()` of a Partial tensor: each rank logs its own contribution as if it were the total (pytorch#144054).

The columns of the weight are split, so its sum is pending over tp: a DTensor with placement Partial. `.item()` reads
the local value and communicates with no other rank. `full_tensor().item()` gives the total.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardviz

AXES = ("tp",)
MESH = (4,)
KINDS = ("unreduced-scalar",)


def build() -> nn.Linear:
    return nn.Linear(8, 6, bias=False)


def parallelize(model: nn.Linear, mesh: DeviceMesh) -> None:
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, (Shard(1),)))


def batch() -> torch.Tensor:
    return torch.randn(12, 8)


def loss(model: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    weight = model.weight
    if isinstance(weight, DTensor):
        rows = distribute_tensor(rows, weight.device_mesh, (Shard(1),))
        product = (rows @ weight.t()).redistribute(placements=(Replicate(),))
        return product.to_local().square().mean()
    return (rows @ weight.t()).square().mean()


def log(model: nn.Linear, rows: torch.Tensor, loss: torch.Tensor) -> dict[str, float]:
    weight = model.weight.detach()
    return {"weight_sum": weight.sum().item()}


if __name__ == "__main__":
    shardviz.run_probe(__file__)
