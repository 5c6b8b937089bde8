"""ZeRO 1: parameters and gradients are whole on every rank; the optimizer's state is distributed.

`ZeroRedundancyOptimizer` assigns every parameter to one rank. After DistributedDataParallel has averaged the gradients
over dp, each rank steps only its own parameters, keeps state for those alone, and broadcasts them to the others. Adam
keeps two numbers per parameter. So out of four numbers (parameter, gradient and two of state) each of many ranks holds
little more than two. Whole parameters are assigned, largest first, so shares are uneven; no parameter is split.
`shardviz show DUMP --memory` has the table, next to ZeRO 2 (gradients are split too, see `fsdp_no_reshard`) and ZeRO 3
(parameters too, see `fsdp`) by the formula.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import shardviz

AXES = ("dp",)
MESH = (4,)
BATCH_AXES = ("dp",)

expect = {"*.weight": "[*, *] =dp", "*.bias": "[*] =dp"}


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 10))


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def optimizer(model: nn.Module, mesh: DeviceMesh) -> ZeroRedundancyOptimizer:
    group = mesh.get_group("dp")
    return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, process_group=group)


def batch() -> torch.Tensor:
    return torch.randn(120, 12)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
