"""The product of a 2x4 and a 4x2 matrix, with the second one split over tp, both ways. It is 76 82 / 252 274.

Split by columns, `[4, 2/tp]`: every rank has all it needs to compute its own columns of the product, and its numbers
are final: `[2, 2/tp]`. Split by rows, `[4/tp, 2]`: a rank has only some rows, and needs only the matching columns of
the first matrix; it computes a contribution to every number of the product: `[2, 2] +tp`, a sum that is pending.
Gathering the columns and summing the contributions give the same matrix. `shardviz show DUMP by_rows` shows the
contributions.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardviz

AXES = ("tp",)
MESH = (2,)

Placement = Replicate | Shard | Partial

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
        by_columns = self.by_columns(product(x, Replicate(), self.columns, Shard(1)))
        by_rows = self.by_rows(product(x, Shard(1), self.rows, Partial()))
        return torch.stack([whole(by_columns), whole(by_rows)])


def product(x: torch.Tensor, needed: Placement, matrix: torch.Tensor, gives: Placement) -> torch.Tensor:
    """Multiply the part of the first matrix that a rank needs by its part of the second; label the result `gives`."""
    if not isinstance(matrix, DTensor):
        return x @ matrix
    mesh, shape = matrix.device_mesh, (len(x), matrix.shape[1])
    product_here = distribute_tensor(x, mesh, (needed,)).to_local() @ matrix.to_local()
    return DTensor.from_local(product_here, mesh, (gives,), shape=torch.Size(shape), stride=(shape[1], 1))


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


def log(model: nn.Module, x: torch.Tensor, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    by_columns, by_rows = model(x).detach()
    assert torch.equal(by_columns, by_rows)
    return {f"product[{index}]": number for index, number in enumerate(by_rows.flatten())}


if __name__ == "__main__":
    shardviz.run_probe(__file__)
