"""Vocabulary-parallel loss: cross entropy without ever gathering the logits.

The head is split by the vocabulary, `[32/tp, 24]`, so each rank has the logits of some words for all tokens, `[tokens,
words/tp]`. If they were gathered, they would be the largest tensor of a training step. Under `loss_parallel()`, torch's
own cross entropy takes the maximum, the sum of exponentials and the target's logit within each rank, and reduces those
over tp: three numbers per token are sent instead of a vocabulary. Backward must run under `loss_parallel()` too: each
rank computes the gradient of its own logits, and the gradient of the body's output is summed over tp. The body is whole
on every rank.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional

import shardviz
from shardviz.layout.mesh import Mesh
from shardviz.probes._refusals import refuse_empty

AXES = ("tp",)
MESH = (4,)

WORDS = 32

expect = {"head.weight": "[*/tp, *]", "body.*": "[*, *] =tp"}

Batch = tuple[torch.Tensor, torch.Tensor]


class Speaker(nn.Module):
    """A body that is whole on every rank, and a head that scores every word."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(12, 24, bias=False)
        self.head = nn.Linear(24, WORDS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).relu())


def check_mesh(mesh: Mesh) -> None:
    refuse_empty(mesh, "tp", WORDS, "words", "the maximum of no logits: torch's amax raises on a dim of size 0")


def build() -> nn.Module:
    return Speaker()


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh["tp"], {"head": head})


def batch() -> Batch:
    return torch.randn(60, 12), torch.randint(WORDS, (60,))


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    tokens, words = batch
    return functional.cross_entropy(model(tokens), words)


def step(model: nn.Module, batch: Batch, mesh: DeviceMesh) -> torch.Tensor:
    with loss_parallel():
        value = loss(model, batch)
        value.backward()
    return value


if __name__ == "__main__":
    shardviz.run_probe(__file__)
