"""Rows that one process has in other steps: optimizers that step otherwise, data that is split twice, other orders."""

from __future__ import annotations

import sys

import pytest

from tests.lanes import nightly
from tests.live.run.traced.test_traced import diff, run

PROGRAM = """
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))

if WORLD > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
called = DistributedDataParallel(model) if WORLD > 1 else model
optimizer = torch.optim.SGD(model.parameters(), 0.1)
rows = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))


def batches():
    if WORLD == 1:
        yield from rows.split(8)
    else:
        yield from BATCHES


for at, batch in enumerate(batches()):
    is_last = WORLD == 1 or at % MICRO == MICRO - 1
    with called.no_sync() if WORLD > 1 and not is_last else nullcontext():
        (called(batch).square().mean() / (MICRO if WORLD > 1 else 1)).backward()
    if STEP:
        optimizer.step()
        optimizer.zero_grad()
"""
OF_RANK = "(x[RANK::WORLD] for x in rows.split(8))"
HALVES = "(x[RANK::WORLD] for x in rows.split(4))"
LONGER = "(x[RANK::WORLD] for x in rows.split(16))"
TWICE = "(x[4 * RANK : 4 * RANK + 4] for x in rows[::2].split(8))"
TWICE_BY_RANK = "rows[RANK::WORLD][RANK::WORLD].split(4)"
AHEAD = "(x[RANK::WORLD] for x in rows[8:].split(8))"
SHUFFLED = "(x[RANK::WORLD] for x in rows[torch.randperm(64)].split(8))"

OWN = "(x[RANK::WORLD] for x in (rows if RANK == 0 else rows[torch.randperm(64)]).split(8))"


@nightly
@pytest.mark.parametrize(
    ("batches", "micro", "is_each", "cause", "words"),
    [
        (HALVES, 2, True, "other-step-length", "under no_sync()"),
        (HALVES, 2, False, "", ""),
        (TWICE, 1, False, "rows-split-twice", "rank 0 rows 0, 2, 4, 6, rank 1 rows 8, 10, 12, 14"),
        (HALVES, 1, True, "other-step-length", "give each rank 2 times as many rows"),
        (LONGER, 1, True, "other-step-length", "divide the batch size by 2"),
        (OF_RANK, 2, False, "other-step-length", "steps after 16 rows"),
        (TWICE_BY_RANK, 1, True, "rows-split-twice", "no step of the second run that was followed has rows 1-2"),
        (OF_RANK, 1, True, "", ""),
        (AHEAD, 1, True, "different-batch", "rank 0 rows 8"),
        (SHUFFLED, 1, True, "different-batch", ""),
        (OWN, 1, True, "own-order", "rank 1 was given rows that the other job has in other steps"),
    ],
)
def test_rows_of_other_steps_are_numbered_and_say_why(tmp_path, batches, micro, is_each, cause, words):
    script = tmp_path / "train.py"
    changes = {"BATCHES": batches, "MICRO": str(micro), "STEP": "True" if is_each else "is_last"}
    text = PROGRAM
    for word, code in changes.items():
        text = text.replace(word, code)
    script.write_text(text)
    alone = run(tmp_path, "one", sys.executable, str(script))
    ranks = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    step, _ = diff(alone, run(tmp_path, "many", *ranks, str(script)))
    assert [departure["cause_id"] for departure in step["departures"]] == [cause] * bool(cause), step
    assert not words or words in str(step["departures"][0]), step
