"""A row-parallel output before its reduction, labeled Partial: ranks differ, and the label says that they must."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import shardviz

AXES = ("tp",)
MESH = (2,)


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6, bias=False))


def parallelize(model: nn.Sequential, mesh: DeviceMesh) -> None:
    style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Partial(), use_local_output=False)
    parallelize_module(model, mesh["tp"], {"0": style})


def batch() -> torch.Tensor:
    return torch.randn(8, 4)


def loss(model: nn.Sequential, rows: torch.Tensor) -> torch.Tensor:
    output = model(rows)
    whole = output.full_tensor() if isinstance(output, DTensor) else output
    return whole.square().mean()


if __name__ == "__main__":
    shardviz.run_probe(__file__)
