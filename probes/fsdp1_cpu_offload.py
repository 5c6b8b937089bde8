"""FSDP1 with CPU offload: shards, gradients and optimizer state live in the machine's memory, not the GPU's.

The layout is that of `fsdp1_full_shard`: each rank has a piece of the flattened parameters, and the same share of the
gradients and the optimizer state. A unit's shard is copied to the GPU just before it is gathered there, and its reduced
gradient is copied back, so the optimizer steps on the CPU. This fits models that fit in no other way, at the price of
the copies. If the ranks have no GPU, the shards are on the CPU anyway, and this is FULL_SHARD.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel

import shardviz

AXES = ("fsdp",)
MESH = (4,)
BATCH_AXES = ("fsdp",)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 10))


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    device = torch.device(mesh.device_type)
    offload = CPUOffload(offload_params=device.type != "cpu")
    return FullyShardedDataParallel(model, cpu_offload=offload, device_mesh=mesh, device_id=device)


def batch() -> torch.Tensor:
    return torch.randn(120, 12)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
