"""Two jobs whose optimizers step other parameters, or the same ones with other settings."""

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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.lstm, self.head = nn.Linear(6, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, state, x):
        return self.head(self.lstm(self.body(x), (state, state))[0])


def groups(model):
    named = list(model.named_parameters())
    heads = [one for name, one in named if name.startswith("head")]
    return [{"params": [one for name, one in named if not name.startswith("head")]}, {"params": heads, "lr": 0.5}]


torch.manual_seed(0)
model = Model()
made = groups(model)
wrapped = model
if WORLD > 1:
    dist.init_process_group("gloo")
    WRAP
optimizer = OPTIMIZER(GROUPS, lr=0.1) if WORLD > 1 else torch.optim.SGD(made, lr=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.25)
rows = torch.arange(RANK, 8, WORLD)
x, state = torch.randn(8, 3, 6), torch.rand(1, 8, 8)
for part in range(2):
    SYNC
    wrapped(state[:, rows], x[rows]).square().mean().backward()
optimizer.step()
"""
DDP = ("wrapped = DistributedDataParallel(model)", "pass")
ZERO = "lambda groups, lr: ZeroRedundancyOptimizer(groups, torch.optim.SGD, lr=lr)"
FSDP = "wrapped = fully_shard(model, mesh=init_device_mesh('cpu', (2,)))"
SYNC = "wrapped.set_requires_gradient_sync(part == {}) if WORLD > 1 else None"


def program(wrap=DDP[0], sync="pass", optimizer="torch.optim.SGD", groups="made"):
    words = {"WRAP": wrap, "SYNC": sync, "OPTIMIZER": optimizer, "GROUPS": groups}
    text = PROGRAM
    for word, code in words.items():
        text = (
            text.replace(f" {word}\n", f" {code}\n")
            .replace(f"= {word}(", f"= ({code})(")
            .replace(f"({word},", f"({code},")
        )
    return text


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    (folder / "train.py").write_text(program())
    return run(folder, "one", sys.executable, "train.py")


@nightly
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, ()),
        ({"optimizer": ZERO}, ()),
        ({"wrap": FSDP, "sync": SYNC.format(1), "groups": "groups(model)"}, ()),
        ({"groups": "groups(wrapped)"}, ("head.weight", "different settings")),
        ({"wrap": FSDP, "sync": SYNC.format(2), "groups": "groups(model)"}, ("FSDP holds the gradient back",)),
    ],
    ids=["right", "zero", "fsdp", "names after wrapping", "never reduced"],
)
def test_what_optimizers_step_is_compared(tmp_path, alone, changed, words):
    (tmp_path / "train.py").write_text(program(**changed))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    step, _ = diff(alone, run(tmp_path, "two", *torchrun))
    found = " ".join(f"{one['module']} {one['sentence']}" for one in step["departures"])
    assert bool(found) == bool(words), found
    assert all(word in found for word in words), found


SCHEDULED = """
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
torch.manual_seed(0)
model = nn.Linear(6, 4)
if WORLD > 1:
    dist.init_process_group("gloo")
called = DistributedDataParallel(model) if WORLD > 1 else model
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
for x in torch.randn(6, 8, 6):
    called(x.chunk(WORLD)[RANK]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    for _ in range(TIMES):
        scheduler.step()
"""


@nightly
@pytest.mark.parametrize(("times", "cause"), [("WORLD", "other-pace"), ("1", "")])
def test_a_scheduler_that_is_stepped_twice_a_step_is_told_on_all_ranks(tmp_path, times, cause):
    (tmp_path / "train.py").write_text(SCHEDULED.replace("TIMES", times))
    alone = run(tmp_path, "one", sys.executable, "train.py")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    step, _ = diff(alone, run(tmp_path, "two", *torchrun))
    assert [one["cause_id"] for one in step["departures"]] == [cause] * bool(cause), step
    assert not cause or "in step 2 the optimizers on ranks 0-1 step" in step["departures"][0]["sentence"], step
