"""Buffers that the forward reads and a script writes between steps: of ranks that must have the same."""

from __future__ import annotations

import json
import sys

import pytest

from tests.lanes import at_night, nightly
from tests.live.run.traced.test_traced import diff, run

PROGRAM = """
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 16), nn.Linear(16, 6)
        for name in ("bias", "counts", "mean", "noise", "logged"):
            self.register_buffer(name, torch.zeros(16))

    def forward(self, x):
        return self.experts(self.routed(self.gate(x).sigmoid()))

    def routed(self, scores):
        chosen = (scores + self.bias + self.noise).topk(4).indices
        picked = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        with torch.no_grad():
            self.counts += picked.sum(0)
            self.mean.lerp_(scores.mean(0), 0.1)
        return scores * picked


torch.manual_seed(0)
model = Routed()
called = model
if WORLD > 1:
    dist.init_process_group("gloo")
    WRAP
torch.manual_seed(RANK)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1)).chunk(WORLD, 1)[RANK]
for rows in x:
    called(rows).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    counts = model.counts.clone()
    if WORLD > 1 and SUMMED:
        dist.all_reduce(counts)
    model.WRITTEN
    model.logged.copy_(counts + RANK)
    model.counts.zero_()
"""
FSDP = "fully_shard(model, mesh=init_device_mesh('cpu', (WORLD,), mesh_dim_names=('dp',)))"
DDP = "called = DistributedDataParallel(model)"
BIAS, NOISE = "bias.add_(0.05 * (counts.mean() - counts).sign())", "noise.normal_().mul_(0.1)"


@pytest.mark.parametrize(
    ("wrap", "summed", "written", "is_named"),
    [
        *at_night([(FSDP, False, BIAS, True)]),
        *at_night([(FSDP, True, BIAS, False), (FSDP, False, NOISE, False)]),
        *at_night([(DDP, False, BIAS, True), (DDP, True, BIAS, False)]),
    ],
)
def test_a_buffer_that_each_rank_writes_by_itself_and_reads_in_forward_is_named(
    tmp_path, wrap, summed, written, is_named
):
    """Statistics that the forward writes, numbers that it doesn't read, and noise are no bugs.

    DDP sends rank 0's bias again, so that copies are equal, and the rows of the other ranks don't count.
    """
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.replace("WRAP", wrap).replace("SUMMED", str(summed)).replace("WRITTEN", written))
    alone = run(tmp_path, "one", sys.executable, str(script))
    ranks = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    step, _ = diff(alone, run(tmp_path, "many", *ranks, str(script)))
    assert [(departure["module"], departure["cause_id"]) for departure in step["departures"]] == [
        ("bias", "own-buffer-read")
    ] * is_named
    is_said = "sends rank 0's to all ranks" in json.dumps(step["departures"])
    assert is_said == (is_named and wrap == DDP)


@nightly
def test_a_bias_that_ddp_sends_is_not_called_unequal_in_a_later_step(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.replace("WRAP", DDP).replace("SUMMED", "False").replace("WRITTEN", BIAS))
    alone = run(tmp_path, "one", sys.executable, str(script), step=3)
    ranks = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    step, _ = diff(alone, run(tmp_path, "many", *ranks, str(script), step=3))
    found = [departure["cause_id"] for departure in step["departures"]]
    assert found, step
    assert "unsynchronized-buffer" not in found


@nightly
def test_a_bias_that_one_rank_alone_updates_is_not_called_drawn(tmp_path):
    """A shuffle draws between steps; rank 0 has one process's bias, and rank 1 the one that it had."""
    written = f"{BIAS} if RANK == 0 else None; torch.rand(3)"
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.replace("WRAP", FSDP).replace("SUMMED", "True").replace("WRITTEN", written))
    alone = run(tmp_path, "one", sys.executable, str(script))
    ranks = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    step, _ = diff(alone, run(tmp_path, "many", *ranks, str(script)))
    assert [departure["cause_id"] for departure in step["departures"]] == ["other-later-outputs"]
    assert step["not_compared"] == []
