"""FSDP2 with mixed precision: shards stay in float32; parameters are gathered, and the model computes, in bfloat16.

Dim 0 of every parameter is split over fsdp. `param_dtype` is the dtype of the gathered copy, so each gather sends half
the bytes. `reduce_dtype` is the dtype in which gradients are summed over fsdp, where rounding errors would add up. The
shards, which the optimizer updates, and their gradients keep the model's own dtype. Only the computation is rounded, so
the loss differs from the unsharded model's in the third or fourth digit, and no small update is lost between steps.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import shardviz

AXES = ("fsdp",)
MESH = (4,)
BATCH_AXES = ("fsdp",)

expect = {"*.weight": "[*/fsdp, *]", "*.bias": "[*/fsdp]"}


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 10))


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def batch() -> torch.Tensor:
    return torch.randn(120, 12)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
