"""Jobs whose hooks step each parameter in backward, as soon as its gradient is there, and free the gradient."""

from __future__ import annotations

import sys

import pytest

from tests.lanes import at_night
from tests.live.run.traced.test_traced import diff, run

PROGRAM = """
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 2))
if WORLD > 1:
    dist.init_process_group("gloo")
    SHARD
optimizers = {weight: torch.optim.Adam([weight], lr=0.01, eps=1e-3) for weight in model.parameters()}


def step(weight):
    REDUCE
    optimizers[weight].step()
    optimizers[weight].zero_grad()


for weight in optimizers:
    weight.register_post_accumulate_grad_hook(step)
for number in range(3):
    draw = torch.Generator().manual_seed(number)
    x, wanted = torch.randn(8, 6, generator=draw), torch.randn(8, 2, generator=draw)
    (model(x.chunk(WORLD)[RANK]) - wanted.chunk(WORLD)[RANK]).square().mean().backward()
"""
SHARDED = {
    "SHARD": "init_device_mesh('cpu', (WORLD,), mesh_dim_names=('dp',)); fully_shard(model[1]); fully_shard(model)",
    "REDUCE": "pass",
}
BY_HAND = {"SHARD": "pass", "REDUCE": "WORLD > 1 and dist.all_reduce(weight.grad.div_(WORLD))"}
SUMMED = BY_HAND | {"REDUCE": "WORLD > 1 and dist.all_reduce(weight.grad)"}
UNREDUCED = BY_HAND | {"REDUCE": "weight.ndim == 1 and WORLD > 1 and dist.all_reduce(weight.grad.div_(WORLD))"}


@pytest.mark.recorded
@pytest.mark.parametrize(
    ("changes", "step", "words"),
    at_night(
        [
            (SHARDED, 1, ""),
            (SHARDED, 2, ""),
            (BY_HAND, 1, ""),
            (SUMMED, 1, "2 times"),
            (UNREDUCED, 1, "the gradient differs along"),
        ]
    ),
    ids=["sharded", "sharded, step 2", "by hand", "summed", "unreduced"],
)
def test_all_of_a_backward_are_one_step(tmp_path, changes, step, words):
    source = PROGRAM
    for word, code in changes.items():
        source = source.replace(word, code)
    job = tmp_path / "job.py"
    job.write_text(source)
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    one = run(tmp_path, "one", sys.executable, str(job), step=step)
    two = run(tmp_path, "two", *command, str(job), step=step)
    compared = diff(one, two)[0]
    sentences = " ".join(departure["sentence"] for departure in compared["departures"])
    assert (words in sentences) if words else not sentences, compared
    assert words or compared["has_update"], compared
