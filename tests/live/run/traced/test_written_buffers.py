"""Buffers that a forward writes: rows of which one rank's alone are left, and what looks like them and is right."""

from __future__ import annotations

import sys

import pytest

from tests.lanes import at_night, nightly
from tests.live.run.traced.test_traced import diff, run

PROGRAM = """
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))


def gathered(x, step=1):
    if WORLD == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(WORLD)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts[::step])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 5)
        self.register_buffer("rows", torch.randn(16, 5))
        self.register_buffer("columns", torch.randn(5, 16))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("state", torch.zeros(16, 5))

    @torch.no_grad()
    def keep(self, keys):
        at = int(self.at)
        self.rows[at : at + len(keys)] = keys
        self.at.fill_((at + len(keys)) % 16)

    def forward(self, x, index):
        keys = self.up(x)
        kept = keys.detach()
        FORWARD
        return y


if WORLD > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = Model()
called = DistributedDataParallel(model, broadcast_buffers=SENT) if WORLD > 1 else model
optimizer = torch.optim.SGD(model.parameters(), 0.1)
rows = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1)).chunk(WORLD, 1)[RANK]
for x in rows:
    called(x, torch.arange(8).chunk(WORLD)[RANK]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if IS_SYNCHRONIZED:
        at = (int(model.at) - 8 // WORLD) % 16
        model.rows[at : at + 8] = gathered(model.rows[at : at + 8 // WORLD].clone())
        model.at.fill_((at + 8) % 16)
"""
QUEUE = "y = keys @ self.rows.clone().T; self.keep(kept)"
COLUMNS = "y = keys @ self.columns.clone(); self.columns[:, : len(x)] = kept.T"
BANK = "y = keys @ self.rows.clone().T; self.rows[index] = kept"
STATE = "y = keys + self.state[: len(x)]; self.state[: len(x)].copy_(kept)"
BY_ANOTHER_NAME = "rows = self.rows; y = keys @ rows.clone().T; rows[index] = kept"
GATHERED = "y = keys @ self.rows.clone().T; self.keep(gathered(kept))"
TURNED_AROUND = "y = keys @ self.rows.clone().T; self.keep(gathered(kept, -1))"
SCRATCH = "self.rows[: len(x)] = kept; y = keys * self.rows[: len(x)].clone()"
LOGGED = "y = keys; self.rows[: len(x)] = kept"
IN_EVALUATION = "y = keys if self.training else keys @ self.rows.T; self.rows[index] = kept"
STATISTICS = "y = keys - self.mean.clone() * 0; self.mean.lerp_(kept.mean(0), 0.1)"
CENTERED = "y = keys - self.mean.clone(); self.mean.lerp_(kept.mean(0), 0.1)"
COUNTED = "y = keys - self.mean.clone(); self.mean.mul_(0.9).add_(kept.square().sum(0))"
REDUCED = "y = keys - self.mean.clone(); self.mean.lerp_(gathered(kept).mean(0), 0.1)"


def compare(tmp_path, forward, is_sent, *, is_synchronized=False):
    script = tmp_path / "train.py"
    words = {"FORWARD": forward, "SENT": str(is_sent), "IS_SYNCHRONIZED": str(is_synchronized)}
    text = PROGRAM
    for word, code in words.items():
        text = text.replace(word, code)
    script.write_text(text)
    alone = run(tmp_path, "one", sys.executable, str(script))
    ranks = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    return diff(alone, run(tmp_path, "many", *ranks, str(script)))


@nightly
@pytest.mark.parametrize(
    ("forward", "is_sent", "named"),
    [
        (QUEUE, True, "rows"),
        *((COLUMNS, True, "columns"), (BANK, True, "rows"), (STATE, True, "state")),
        (BY_ANOTHER_NAME, True, "rows"),
        (GATHERED, True, ""),
        *((TURNED_AROUND, True, ""), (STATE, False, ""), (BANK, False, "")),
        *((SCRATCH, True, ""), (LOGGED, True, ""), (IN_EVALUATION, True, ""), (STATISTICS, True, "")),
    ],
)
def test_rows_are_lost_that_each_rank_writes_by_itself_and_the_next_forward_reads(tmp_path, forward, is_sent, named):
    """A rank that keeps its buffers may need its own rows only; scratch and logs are written before they are read."""
    step, _ = compare(tmp_path, forward, is_sent)
    causes = [(departure["module"], departure["cause_id"]) for departure in step["departures"]]
    causes = [cause for cause in causes if cause[1] != "other-later-outputs"]  # what a rank keeps may be its own
    assert causes == [(named, "rows-of-one-rank")] * bool(named)


@nightly
def test_a_buffer_that_the_job_itself_synchronizes_behind_the_optimizers_step_is_right(tmp_path):
    step, _ = compare(tmp_path, QUEUE, True, is_synchronized=True)
    assert step["departures"] == []
    assert "rows" not in step["unjudged_buffers"]


@pytest.mark.parametrize(
    ("forward", "is_sent", "cause", "words"),
    at_night(
        [
            (CENTERED, False, "own-buffer-read", "With the mean over ranks it would be one process's: mean"),
            (COUNTED, False, "own-buffer-read", "have different values after the step"),
            (CENTERED, True, "statistics-of-one-rank", "the mean over ranks would be one process's"),
            (REDUCED, False, "", ""),
        ]
    ),
)
def test_a_buffer_that_each_rank_makes_of_its_own_rows_and_reads_differs(tmp_path, forward, is_sent, cause, words):
    """The buffer of rank 0, which DistributedDataParallel sends, is of its rows alone."""
    step, _ = compare(tmp_path, forward, is_sent)
    assert [departure["cause_id"] for departure in step["departures"]] == [cause] * bool(cause), step
    assert "columns" not in step["unjudged_buffers"]  # no forward writes it
    assert not words or words in step["departures"][0]["sentence"]
