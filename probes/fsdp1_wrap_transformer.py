"""FSDP1, wrapped by class: every transformer block becomes a unit, whatever its size.

`transformer_auto_wrap_policy` takes the classes of the blocks. This suits a transformer: a block runs as a whole, so
its parameters are one vector, split over fsdp, gathered and freed together, one block at a time. Parameters outside the
blocks (here the head's) belong to the root's unit and stay gathered from the beginning of forward to the end of
backward. `shardviz show DUMP --comms` shows two gathers per block and one of the root.
"""

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

import shardviz
from shardviz.probes._models import MLP, Blocks

AXES = ("fsdp",)
MESH = (4,)
BATCH_AXES = ("fsdp",)


def build() -> nn.Module:
    return nn.Sequential(Blocks(3), nn.Linear(12, 10))


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={MLP}),
        device_mesh=mesh,
        device_id=torch.device(mesh.device_type),
        use_orig_params=True,
    )


def batch() -> torch.Tensor:
    return torch.randn(120, 12)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
