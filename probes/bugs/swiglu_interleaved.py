"""SwiGLU's gate and up halves interleaved by a loader: rows come back 0 2 4 ... 1 3 5 (Megatron-LM#2769).

A checkpoint with one file per tensor-parallel rank holds gate and up chunk by chunk. A loader that concatenates the
files puts chunks in the order gate 0, up 0, gate 1, up 1, but the model reads all of gate and then all of up. The
sharding is right; the weights were wrong before it. (ROCm/Megatron-LM PR 63)
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import shardviz

AXES = ("fsdp",)
MESH = (4,)
KINDS = ("misordered",)


def build() -> nn.Linear:
    return nn.Linear(4, 16, bias=False)


def parallelize(model: nn.Linear, mesh: DeviceMesh) -> None:
    load(model.weight)
    fully_shard(model, mesh=mesh)


def load(weight: nn.Parameter) -> None:
    """Concatenate eight files, each with a chunk of gate and a chunk of up."""
    gate, up = weight.detach().clone().chunk(2)
    with torch.no_grad():
        weight.copy_(torch.stack((gate, up), dim=1).flatten(0, 1))


if __name__ == "__main__":
    shardviz.run_probe(__file__)
