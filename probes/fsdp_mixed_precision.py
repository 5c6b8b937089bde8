"""FSDP2 with mixed precision: shards stay in float32, what is gathered and computed with is bfloat16.

Dim 0 of every parameter is split over fsdp. `param_dtype` is the dtype of the gathered copy, so half of the bytes cross
the wire; `reduce_dtype` is that of the gradients while they are summed over fsdp, where rounding would add up. The
shards, which the optimizer updates, and their gradients keep the model's own dtype. Only what a unit computes is rough,
so the loss differs from the unsharded model's in the third or fourth digit; no update is lost from step to step.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardviz
from shardviz.live.compat import MixedPrecisionPolicy, fully_shard

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
