"""Batch norms of a rank's own rows, and what looks like them and is right."""

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
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))


class OwnNorm(nn.Module):
    def forward(self, x):
        return F.batch_norm(x, None, None, training=True)


class SharedNorm(nn.Module):
    def forward(self, x):
        sums = torch.cat([x.sum(0), x.square().sum(0)])
        if WORLD > 1:
            sums = dist.nn.all_reduce(sums)
        mean, square = (sums / (len(x) * WORLD)).chunk(2)
        return (x - mean) / (square - mean**2 + 1e-5).sqrt()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 5), NORM, nn.Linear(5, 3)

    def forward(self, x):
        return self.down(self.norm(self.up(x)).relu())


if WORLD > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = Model()
called = DistributedDataParallel(model) if WORLD > 1 else model
optimizer = torch.optim.SGD(model.parameters(), 0.1)
rows = torch.randn(3, 16, 6, generator=torch.Generator().manual_seed(1))
for x in rows:
    SHARE.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
OF_RANK, STRIDED, OF_ALL = "called(x[:8].chunk(WORLD)[RANK])", "called(x[RANK::WORLD])", "called(x)"


@nightly
@pytest.mark.parametrize(
    ("norm", "share", "words"),
    [
        ("nn.BatchNorm1d(5)", OF_RANK, "BatchNorm1d takes mean and variance of each rank's own rows"),
        ("SharedNorm()", OF_RANK, ""),
        ("nn.BatchNorm1d(5)", STRIDED, "BatchNorm1d takes mean and variance of each rank's own rows"),
        ("OwnNorm()", STRIDED, "Each rank normalizes by the mean or variance of its own part"),
        ("nn.BatchNorm1d(5)", OF_ALL, ""),
        ("nn.BatchNorm1d(5).eval()", OF_RANK, ""),
        ("nn.LayerNorm(5)", STRIDED, ""),
    ],
)
def test_a_batch_norm_of_the_ranks_own_rows_is_named(tmp_path, norm, share, words):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.replace("NORM", norm).replace("SHARE", share))
    alone = run(tmp_path, "one", sys.executable, str(script))
    ranks = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    step, _ = diff(alone, run(tmp_path, "many", *ranks, str(script)))
    named = [(departure["module"], departure["cause_id"]) for departure in step["departures"]]
    assert named == [("norm", "statistics-of-part")] * bool(words), step
    assert not words or step["departures"][0]["why"].startswith(words)
