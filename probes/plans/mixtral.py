"""Mixtral 8x7B on 64 ranks: experts over ep, each rank's again over fsdp, the rest over both.

The sizes are those of the published model. A rank of ep has one expert of the eight; tokens travel over ep in two
all_to_all. The plan spreads them evenly over the experts.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardviz.probes.plans._transformer import Attention, Block, Decoder, Mixture, Sizes, over_ep

AXES = ("fsdp", "ep")
MESH = (8, 8)
BATCH_AXES = ("fsdp", "ep")

TOKENS = 4096
EXPERTS = 8
SIZES = Sizes(layers=32, features=4096, heads=32, kv_heads=8, hidden=14336, words=32000)

expect = {"layers.*.experts.*": "[*/ep, */fsdp, *]"}


def build() -> nn.Module:
    blocks = {
        str(number): Block(Attention(SIZES), Mixture(SIZES.features, SIZES.hidden, EXPERTS, chosen=2), SIZES.features)
        for number in range(SIZES.layers)
    }
    return Decoder(SIZES, blocks)


def parallelize(model: Decoder, mesh: DeviceMesh) -> None:
    over_ep(model, mesh)


def batch() -> torch.Tensor:
    return torch.zeros(64, TOKENS, dtype=torch.int64)
