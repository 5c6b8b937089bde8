"""Eight blocks of a decoder: tensor parallel within a node, FSDP2 across nodes, bfloat16 while it computes."""

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

AXES = ("fsdp", "tp")
MESH = (1, 8)
BATCH_AXES = ("fsdp",)
FEATURES, HIDDEN, WORDS = 4096, 14336, 32000


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.up = nn.Linear(FEATURES, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, FEATURES, bias=False)

    def run(self, x):
        return x + self.down(self.up(self.norm(x)).relu())

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False)


def build():
    blocks = [Block() for _ in range(8)]
    return nn.Sequential(nn.Embedding(WORDS, FEATURES), *blocks, nn.Linear(FEATURES, WORDS, bias=False))


def parallelize(model, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model[1:-1]:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["fsdp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["fsdp"], mp_policy=policy)


def batch():
    return torch.zeros(16, 2048, dtype=torch.int64)


def loss(model, tokens):
    return model(tokens).float().mean()
