"""Sequence parallel: between the split layers, activations are split along the sequence instead of being copies.

Tensor parallel alone leaves norms and residuals whole on every rank: the same work and the same memory, tp times. Here
the row-wise layer's pending sum is not reduced to copies but scattered (`reduce_scatter`, `[batch, sequence/tp, 12]`),
the norm sees only its own tokens, and the next column-wise layer gathers. An all_reduce is these two collectives in
one, so the number of bytes is the same. The linear layers' weights are split as in `tp`. A norm's weight is whole on
every rank, and its gradient is a sum over tp because each rank saw only some of the tokens; torch leaves that sum
pending, `[12] +tp`, until it is needed.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import shardviz
from shardviz.layout.mesh import Mesh
from shardviz.probes._refusals import refuse_empty

AXES = ("tp",)
MESH = (4,)

WORDS, TOKENS = 30, 24

expect = {
    "embed.weight": "[*/tp, *]",
    "norm.*": "[*] =tp",
    "up.weight": "[*/tp, *]",
    "down.weight": "[*, */tp]",
    "last_norm.*": "[*] =tp",
    "head.weight": "[*/tp, *]",
}


class Block(nn.Module):
    """Embedding, norm, two linear layers around a residual, norm, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 12)
        self.norm = nn.LayerNorm(12)
        self.up = nn.Linear(12, 24, bias=False)
        self.down = nn.Linear(24, 12, bias=False)
        self.last_norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        x = x + self.down(self.up(self.norm(x)).relu())
        return self.head(self.last_norm(x))


def check_mesh(mesh: Mesh) -> None:
    refuse_empty(mesh, "tp", WORDS, "words", "torch looks words up in an empty table: index out of range in self")
    refuse_empty(mesh, "tp", TOKENS, "tokens", "a norm of no tokens has no gradient to sum")


def build() -> nn.Module:
    return Block()


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    sequence = Shard(1)
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence, use_local_output=False),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=sequence, use_local_output=False),
        "down": RowwiseParallel(output_layouts=sequence, use_local_output=False),
        "last_norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=sequence, output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)


def batch() -> torch.Tensor:
    return torch.randint(WORDS, (2, TOKENS))


if __name__ == "__main__":
    shardviz.run_probe(__file__)
