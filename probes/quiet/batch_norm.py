"""BatchNorm in training: each rank normalizes by its own rows, so the whole batch at once gives different numbers.

That is how data parallel training computes; the unsharded model is stepped part by part so that the two can be
compared.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import shardviz

AXES = ("fsdp",)
MESH = (2,)
BATCH_AXES = ("fsdp",)


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Linear(6, 4))


def parallelize(model: nn.Sequential, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh)


def batch() -> torch.Tensor:
    return torch.randn(24, 4)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
