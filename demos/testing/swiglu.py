"""A SwiGLU whose gate and up projections are one weight, and two ways to split it over tp."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up = nn.Linear(8, 32, bias=False)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up)


def by_rows(model, tp):
    parallelize_module(model, tp, {"gate_up": ColwiseParallel(), "down": RowwiseParallel()})


def by_segments(model, tp):
    parallelize_module(model, tp, {"down": RowwiseParallel()})
    own = [part.chunk(tp.size())[tp.get_local_rank()] for part in model.gate_up.weight.detach().chunk(2)]
    placements = (_StridedShard(0, split_factor=2),)
    model.gate_up.weight = nn.Parameter(DTensor.from_local(torch.cat(own), tp, placements))
