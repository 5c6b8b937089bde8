"""FSDP1 over tensor parallel: what each tp rank has of the weights is flattened, and that vector is split over fsdp.

Tensor parallel goes first and leaves DTensors. FSDP1 flattens their local parts, so a rank holds a stretch of a shard:
of `up.weight`, some rows of its tp rank's half, from anywhere in a row to anywhere in another. No placements say that,
and the notation has no form for it; the tensors read as plain here, and their ids say that each element is somewhere,
once. Biases that tensor parallel leaves whole are stretches of the whole, `[flat(12) at 300 of 312/fsdp]`.

FSDP2 over tensor parallel, beside which this is tried, has a layout for every weight: see `tp_fsdp`.
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
