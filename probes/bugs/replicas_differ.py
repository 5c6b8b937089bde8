"""HSDP replicas that start from different weights, and nothing ever makes them agree (OLMo-core PR 319).

Every rank seeds itself with its own rank before it builds the model. FSDP2 shards each rank's own weights and
broadcasts nothing, so groups along `replicate` train different models: their gradients are averaged, but their weights
never agree. (composer PR 2812)
"""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import shardviz

AXES = ("replicate", "shard")
MESH = (2, 2)
KINDS = ("unreplicated",)


def build() -> nn.Module:
    torch.manual_seed(distributed.get_rank())
    return nn.Linear(8, 8)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
