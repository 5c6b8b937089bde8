"""FSDP1 over tensor parallel: each tp rank's part of the weights is flattened, and that vector is split over fsdp.

Tensor parallel goes first and leaves DTensors. FSDP1 flattens their local parts, so a rank holds a stretch of a shard:
of `up.weight`, some of the rows in its tp rank's half, from the middle of one row to the middle of another. No
placements describe that, and the notation has no form for it. The tensors are therefore shown as plain, and their ids
show that each element exists exactly once. Biases that tensor parallel leaves whole are stretches of the whole tensor:
`[flat(12) at 300 of 312/fsdp]`.

FSDP2 over tensor parallel has a layout for every weight: compare this with `tp_fsdp`.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardviz
from shardviz.probes._models import MLP

AXES = ("fsdp", "tp")
MESH = (2, 2)
BATCH_AXES = ("fsdp",)


def build() -> nn.Module:
    return MLP()


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    device = torch.device(mesh.device_type)
    return FullyShardedDataParallel(model, device_mesh=mesh["fsdp"], use_orig_params=True, device_id=device)


def batch() -> torch.Tensor:
    return torch.randn(120, 12)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
