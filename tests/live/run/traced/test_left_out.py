"""Gradients that a job's own code averages, but for some: a last bucket, a parameter that it forgets, or none."""

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

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
waiting = []


def flush():
    flat = torch.cat([one.grad.flatten() for one in waiting]) / WORLD
    dist.all_reduce(flat)
    for one, part in zip(waiting, flat.split([one.numel() for one in waiting])):
        one.grad.copy_(part.view_as(one.grad))
    waiting.clear()


def add(parameter):
    waiting.append(parameter)
    if sum(one.numel() for one in waiting) >= 100:
        flush()


if WORLD > 1:
    dist.init_process_group("gloo")
    for name, parameter in model.named_parameters():
        if REDUCED:
            parameter.register_post_accumulate_grad_hook(add)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1)):
    loss = model(x.chunk(WORLD)[RANK]).square().mean()
    loss.backward()
    if WORLD > 1 and FLUSHED and waiting:
        flush()
    optimizer.step()
    optimizer.zero_grad()
"""


@nightly
@pytest.mark.parametrize(
    ("reduced", "is_flushed", "words"),
    [
        ("True", False, ("4 other gradients", "a last bucket", "send what is left")),
        ("True", True, ()),
        ("name != '3.bias'", True, ("7 other gradients", "leaves this one out")),
        ("False", True, ("No FSDP, DDP or tensor-parallel style wraps this parameter",)),
    ],
)
@pytest.mark.parametrize("lines", ["", "lines"])
def test_gradients_that_own_code_leaves_out_are_told_from_those_that_nothing_reduces(
    tmp_path, reduced, is_flushed, words, lines
):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.replace("REDUCED", reduced).replace("FLUSHED", str(is_flushed)))
    alone = run(tmp_path, "one", sys.executable, str(script), lines=lines)
    ranks = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    step, _ = diff(alone, run(tmp_path, "many", *ranks, str(script), lines=lines))
    text = " ".join(f"{one['sentence']} {one['why']}" for one in step["departures"])
    assert bool(words) == bool(step["departures"]), step
    assert "is the first wrong line" not in text
    assert lines or all(word in text for word in words), text
