"""FSDP1, wrapped by size: every module with at least a given number of parameters becomes a unit of its own.

A unit's parameters are flattened, split over fsdp and gathered together. `size_based_auto_wrap_policy` walks the model
from the inside out and is not aware of its structure: here the two large layers, with 520 and 820 parameters, become
units, and the small one, with 63, stays in the root's unit. Large units mean few, large gathers and more memory while
they run. Wrapping by size may also split a block that runs as a whole.
"""

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

import shardviz

AXES = ("fsdp",)
MESH = (4,)
BATCH_AXES = ("fsdp",)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 20), nn.ReLU(), nn.Linear(20, 3))


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=500),
        device_mesh=mesh,
        device_id=torch.device(mesh.device_type),
        use_orig_params=True,
    )


def batch() -> torch.Tensor:
    return torch.randn(120, 12)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
