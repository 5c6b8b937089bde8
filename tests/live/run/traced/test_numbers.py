"""Weights of complex numbers, and modules that a transform of `torch.func` calls, are compared in two jobs."""

from __future__ import annotations

import sys

import pytest

from tests.lanes import nightly
from tests.live.run.traced.test_traced import diff, run

PROGRAM = """
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.turn = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def forward(self, x):
        return (torch.func.vmap(self.inner)(x).to(torch.complex64) @ self.turn).abs()


model = called = Model()
if WORLD > 1:
    dist.init_process_group("gloo")
    called = DistributedDataParallel(model)
x = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    optimizer.zero_grad()
    called(x[step, RANK::WORLD]).square().mean().backward()
    if WORLD > 1:
        AFTER
    optimizer.step()
"""


@nightly
@pytest.mark.recorded
@pytest.mark.parametrize(("after", "tensors"), [("pass", []), ("model.turn.grad.mul_(2)", ["turn"])])
def test_complex_weights_and_transformed_calls_are_compared(tmp_path, after, tensors):
    (tmp_path / "train.py").write_text(PROGRAM.replace("AFTER", after))
    alone = run(tmp_path, "one", sys.executable, "train.py")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    step, _ = diff(alone, run(tmp_path, "two", *torchrun))
    assert [one["module"] for one in step["departures"]] == tensors
    assert not step["not_compared"]
