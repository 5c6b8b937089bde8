"""Tensor parallel embeddings: the table split by its rows, the vocabulary, or by its columns, the features.

By vocabulary (`RowwiseParallel`) a rank holds some words, `[30/tp, 12]`. It looks up those, answers zero for the
others, and the sum over tp is each word's vector. By features (`ColwiseParallel`) a rank holds a part of every word's
vector, `[30, 12/tp]`, and the parts are gathered. The words to look up are the same on all ranks. Splitting by
vocabulary is more common: the same split serves the head and its loss, see `tp_loss`. A vocabulary need not divide: the
last rank holds fewer words. In backward torch makes the gradient of the first table whole on every rank before it
splits it for the optimizer: `shardviz show DUMP --memory` shows the price.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardviz
from shardviz.layout.mesh import Mesh
from shardviz.probes._refusals import refuse_empty

AXES = ("tp",)
MESH = (4,)

WORDS = 30

expect = {"by_words.weight": "[*/tp, *]", "by_features.weight": "[*, */tp]"}


class Embeddings(nn.Module):
    """Two tables, one for each way to split."""

    def __init__(self) -> None:
        super().__init__()
        self.by_words = nn.Embedding(WORDS, 12)
        self.by_features = nn.Embedding(WORDS, 12)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.by_words(words) * self.by_features(words)


def check_mesh(mesh: Mesh) -> None:
    refuse_empty(mesh, "tp", WORDS, "words", "torch looks words up in an empty table: index out of range in self")


def build() -> nn.Module:
    return Embeddings()


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    plan = {
        "by_words": RowwiseParallel(input_layouts=Replicate()),
        "by_features": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)


def batch() -> torch.Tensor:
    return torch.randint(WORDS, (120,))


if __name__ == "__main__":
    shardviz.run_probe(__file__)
