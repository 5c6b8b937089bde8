"""Query and key rows permuted on load, for the other rotary convention (torchtitan PR 1483).

Hugging Face's checkpoints keep the two halves of each head apart; Llama's own interleave them. A loader that permutes
weights which are already in the right order, or forgets to permute them, keeps every row and misplaces most of them.
FSDP and TP shard the permuted weight faithfully.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import shardviz

AXES = ("fsdp", "tp")
MESH = (2, 2)
KINDS = ("misordered",)

HEADS = 2


class Attention(nn.Module):
    """Two projections of an attention layer: queries, and values."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(8, 16, bias=False)
        self.wv = nn.Linear(8, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wq(x) * self.wv(x)


def build() -> Attention:
    return Attention()


def parallelize(model: Attention, mesh: DeviceMesh) -> None:
    load(model.wq.weight)
    parallelize_module(model, mesh["tp"], {"wq": ColwiseParallel(), "wv": ColwiseParallel()})
    fully_shard(model, mesh=mesh["fsdp"])


def load(weight: nn.Parameter) -> None:
    """Permute each head's rows as transformers' Llama conversion does."""
    rows, columns = weight.shape
    permuted = weight.detach().view(HEADS, rows // HEADS // 2, 2, columns).transpose(1, 2)
    with torch.no_grad():
        weight.copy_(permuted.reshape(rows, columns).clone())


if __name__ == "__main__":
    shardviz.run_probe(__file__)
