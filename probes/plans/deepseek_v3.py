"""DeepSeek-V3 on 2,048 ranks: layers over pp, 256 experts over ep, each rank's again over fsdp, the rest over both.

The sizes are those of the published model (DeepSeek-AI 2024), without its module that predicts a second token; so are
16 stages and 64 ranks of ep. The step is one micro-batch of one sequence through one stage, forward and backward, and
tokens are spread evenly over the experts.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from shardviz.probes.plans._transformer import (
    Block,
    Decoder,
    FeedForward,
    Mixture,
    Sizes,
    keep_stage,
    over_ep,
    stage_input,
)

AXES = ("pp", "fsdp", "ep")
MESH = (16, 2, 64)
STAGE_AXES = ("pp",)
BATCH_AXES = ()
TORCH = (2, 8)  # 2.7 takes no part of a mesh that is a part itself

TOKENS = 4096
DENSE_LAYERS = 3
EXPERTS, CHOSEN, EXPERT_HIDDEN = 256, 8, 2048
SIZES = Sizes(layers=61, features=7168, heads=128, kv_heads=128, hidden=18432, words=129280)
QUERY_RANK, KEY_RANK, ROTARY = 1536, 512, 64

expect = {"layers.*.experts.*": "[*/ep, */fsdp, *]"}


class LatentAttention(nn.Module):
    """Attention whose queries, keys and values come out of narrow layers; the rotary part of keys is shared."""

    def __init__(self) -> None:
        super().__init__()
        heads, head = SIZES.heads, SIZES.head
        self.wq_a = nn.Linear(SIZES.features, QUERY_RANK, bias=False)
        self.q_norm = nn.RMSNorm(QUERY_RANK)
        self.wq_b = nn.Linear(QUERY_RANK, heads * (head + ROTARY), bias=False)
        self.wkv_a = nn.Linear(SIZES.features, KEY_RANK + ROTARY, bias=False)
        self.kv_norm = nn.RMSNorm(KEY_RANK)
        self.wkv_b = nn.Linear(KEY_RANK, heads * 2 * head, bias=False)
        self.wo = nn.Linear(heads * head, SIZES.features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.wq_b(self.q_norm(self.wq_a(x))).unflatten(-1, (SIZES.heads, -1)).transpose(1, 2)
        narrow, rotary = self.wkv_a(x).split([KEY_RANK, ROTARY], dim=-1)
        k, v = self.wkv_b(self.kv_norm(narrow)).unflatten(-1, (SIZES.heads, -1)).transpose(1, 2).chunk(2, dim=-1)
        k = torch.cat([k, rotary.unsqueeze(1).expand(-1, SIZES.heads, -1, -1)], dim=-1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


def build() -> nn.Module:
    blocks: dict[str, nn.Module] = {}
    for number in range(SIZES.layers):
        inner: nn.Module = FeedForward(SIZES.features, SIZES.hidden)
        if number >= DENSE_LAYERS:
            inner = Mixture(SIZES.features, EXPERT_HIDDEN, EXPERTS, CHOSEN, shared=True)
        blocks[str(number)] = Block(LatentAttention(), inner, SIZES.features)
    return Decoder(SIZES, blocks)


def parallelize(model: Decoder, mesh: DeviceMesh) -> None:
    keep_stage(model, mesh.get_local_rank("pp"), mesh["pp"].size())
    over_ep(model, mesh["fsdp", "ep"])


def batch() -> torch.Tensor:
    return torch.zeros(1, TOKENS, dtype=torch.int64)


def step(model: Decoder, tokens: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    rows, length = tokens.shape
    inputs = stage_input(mesh.get_local_rank("pp"), rows, length, SIZES.features)
    loss = model(inputs).float().mean()
    loss.backward()
    return loss
