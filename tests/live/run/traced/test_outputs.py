"""A module with a second output that only the loss reads, in two jobs."""

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


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        scores = self.router(x)
        shares = scores.softmax(-1)
        return sum(share[:, None] * expert(x) for share, expert in zip(shares.T, self.experts)), scores


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.mixture, self.head = nn.Linear(6, 8), Mixture(), nn.Linear(8, 4)

    def forward(self, x):
        mixed, scores = self.mixture(self.up(x).tanh())
        return self.head(mixed), scores


torch.manual_seed(0)
called = Model()
if WORLD > 1:
    dist.init_process_group("gloo")
    called = DistributedDataParallel(called)
optimizer = torch.optim.SGD(called.parameters(), lr=0.1)
x = torch.randn(8, 6)[RANK::WORLD]
out, scores = called(x)
(out.square().mean() + WEIGHT * scores.logsumexp(-1).square().mean()).backward()
optimizer.step()
"""
RANKS = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@nightly
@pytest.mark.recorded
@pytest.mark.parametrize(("weight", "cause"), [("0.5", []), ("0.5 * WORLD", ["wrong-outside"])])
def test_a_term_of_the_loss_that_reads_a_second_output_is_named_if_its_weight_is_wrong(weight, cause, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM.replace("WEIGHT", weight))
    one, two = (
        run(tmp_path, name, *launcher, str(tmp_path / "train.py"))
        for name, launcher in (("one", (sys.executable,)), ("two", RANKS))
    )
    step, _ = diff(one, two)
    assert [departure["cause_id"] for departure in step["departures"]] == cause, step
