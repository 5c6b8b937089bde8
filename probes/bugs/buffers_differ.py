"""Buffers that differ between ranks: FSDP shards parameters and leaves buffers as each rank made them.

A positional table is drawn at random when the module is built. If parameters disagreed, it would show, because each
rank contributes its shard; the buffer is a plain tensor on every rank, and each rank computes with its own.
(LlamaFactory PR 10820)
"""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import shardviz

AXES = ("fsdp",)
MESH = (4,)
KINDS = ("unreplicated",)


class Encoded(nn.Module):
    """A linear layer on inputs with positions added."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        generator = torch.Generator().manual_seed(distributed.get_rank())
        self.register_buffer("positions", torch.randn(4, 8, generator=generator))


def build() -> nn.Module:
    return Encoded()


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
