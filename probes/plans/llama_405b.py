"""Llama 3.1 405B on 16,384 ranks: layers over pp, weights over tp, each part again over fsdp.

The sizes are those of the published model, the mesh that of its first phase of training (Llama Team 2024, table 4): 16
stages, 128 ranks that share a batch, 8 that share a layer. Weights are float32, and bfloat16 is what is gathered. The
step is one micro-batch of one sequence through one stage, forward and backward: a whole step has as many as the batch.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardviz.probes.plans._transformer import (
    Attention,
    Block,
    Decoder,
    FeedForward,
    Sizes,
    keep_stage,
    over_fsdp,
    over_tp,
    stage_input,
)

AXES = ("pp", "fsdp", "tp")
MESH = (16, 128, 8)
STAGE_AXES = ("pp",)
BATCH_AXES = ()
TORCH = (2, 8)  # 2.7 does not split 128,256 words over tensor parallel and FSDP unevenly

TOKENS = 8192
SIZES = Sizes(layers=126, features=16384, heads=128, kv_heads=8, hidden=53248, words=128256)

expect = {
    "layers.*.attention.wq.weight": "[*/tp/fsdp, *]",
    "layers.*.attention.wo.weight": "[*/fsdp, */tp]",
    "layers.*.feed_forward.w1.weight": "[*/tp/fsdp, *]",
    "layers.*.feed_forward.w2.weight": "[*/fsdp, */tp]",
    "tok_embeddings.weight": "[*/tp/fsdp, *]",
    "output.weight": "[*/tp/fsdp, *]",
}


def build() -> nn.Module:
    blocks = {
        str(number): Block(Attention(SIZES), FeedForward(SIZES.features, SIZES.hidden), SIZES.features)
        for number in range(SIZES.layers)
    }
    return Decoder(SIZES, blocks)


def parallelize(model: Decoder, mesh: DeviceMesh) -> None:
    keep_stage(model, mesh.get_local_rank("pp"), mesh["pp"].size())
    over_tp(model, mesh["tp"])
    over_fsdp(model, mesh["fsdp"])


def batch() -> torch.Tensor:
    return torch.zeros(1, TOKENS, dtype=torch.int64)


def step(model: Decoder, tokens: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    rows, length = tokens.shape
    inputs = stage_input(mesh.get_local_rank("pp"), rows, length, SIZES.features)
    loss = model(inputs).float().mean()
    loss.backward()
    return loss
