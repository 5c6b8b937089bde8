"""Norms with a style for parts of a sequence, which are given the whole sequence, or a part of it."""

from __future__ import annotations

import sys

import pytest

from tests.lanes import nightly
from tests.live.run.traced.test_traced import diff, run

PROGRAM = """
import os

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.front, self.norm, self.up, self.down = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(self.norm(self.front(x))).relu())


torch.manual_seed(0)
model = Model()
if WORLD > 1:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()} | PLAN
    parallelize_module(model, init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",)), plan)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x = torch.randn(4, 6, 6, generator=torch.Generator().manual_seed(1))
model(x).square().mean().backward()
optimizer.step()
"""
WHOLE = '{"norm": SequenceParallel(use_local_output=True)}'
PARTS = (
    '{"front": ColwiseParallel(output_layouts=Shard(1), use_local_output=True), "norm": SequenceParallel(), '
    '"up": ColwiseParallel(input_layouts=Shard(1))}'
)


@nightly
@pytest.mark.parametrize(("plan", "cause"), [("{}", ""), (PARTS, ""), (WHOLE, "sequence-of-whole")])
def test_a_norm_of_the_whole_sequence_with_a_style_for_its_parts_is_named(tmp_path, plan, cause):
    (tmp_path / "train.py").write_text(PROGRAM.replace("PLAN", plan))
    alone = run(tmp_path, "one", sys.executable, "train.py")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    step, _ = diff(alone, run(tmp_path, "two", *torchrun))
    assert {one["cause_id"] for one in step["departures"]} == ({cause} if cause else set()), step
