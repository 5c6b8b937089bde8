"""The product of a 2x4 and a 4x2 matrix, with the second one split over tp, both ways. It is 76 82 / 252 274.

Split by columns, `[4, 2/tp]`: every rank has all it needs to compute its own columns of the product, whole numbers that
are final: `[2, 2/tp]`. Split by rows, `[4/tp, 2]`: a rank has only some rows, and needs only the same columns of the
first matrix; what it computes is a contribution to every number of the product: `[2, 2] +tp`, a sum that is pending.
Gathering the first and summing the second give the same matrix. `shardviz show DUMP by_rows` shows the contributions.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardviz
from shardviz.live.compat import DTensor, Replicate, Shard, distribute_tensor

AXES = ("tp",)
MESH = (2,)

expect = {"columns": "[4, 2/tp]", "rows": "[4/tp, 2]"}


class Products(nn.Module):
    """The same 4x2 matrix twice, once for each way to split it."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.Parameter(torch.arange(8.0, 16.0).view(4, 2))
        self.rows = nn.Parameter(torch.arange(8.0, 16.0).view(4, 2))
        self.by_columns = nn.Identity()
        self.by_rows = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        by_columns = self.by_columns(placed(x, self.columns, Replicate()) @ self.columns)
        by_rows = self.by_rows(placed(x, self.rows, Shard(1)) @ self.rows)
        return torch.stack([whole(by_columns), whole(by_rows)])


def placed(x: torch.Tensor, beside: torch.Tensor, placement: Replicate | Shard) -> torch.Tensor:
    """Put a matrix on the mesh of another one; where there is none, leave it."""
    return distribute_tensor(x, beside.device_mesh, (placement,)) if isinstance(beside, DTensor) else x


def whole(product: torch.Tensor) -> torch.Tensor:
    """Gather the columns, or sum the contributions."""
    return product.full_tensor() if isinstance(product, DTensor) else product


def build() -> nn.Module:
    return Products()


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    model.columns = nn.Parameter(distribute_tensor(model.columns.detach(), mesh, (Shard(1),)))
    model.rows = nn.Parameter(distribute_tensor(model.rows.detach(), mesh, (Shard(0),)))


def batch() -> torch.Tensor:
    return torch.arange(8.0).view(2, 4)


def optimizer(model: nn.Module, mesh: DeviceMesh) -> torch.optim.SGD:
    # Where two columns do not divide, torch leaves their gradient whole, and Adam's state cannot be updated by it.
    return torch.optim.SGD(model.parameters(), foreach=False)


def log(model: nn.Module, x: torch.Tensor, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    by_columns, by_rows = model(x).detach()
    assert torch.equal(by_columns, by_rows)
    return {f"product[{index}]": number for index, number in enumerate(by_rows.flatten())}


if __name__ == "__main__":
    shardviz.run_probe(__file__)
