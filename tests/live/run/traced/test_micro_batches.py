"""Micro-batches of two jobs: what is no part of the batch is in each, and clipping hides what all gradients have."""

from __future__ import annotations

import sys

import pytest

from tests.lanes import nightly
from tests.live.run.traced.test_traced import diff, run

PROGRAM = """
import os
from math import inf

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

WORLD, rank = int(os.environ.get("WORLD_SIZE", 1)), 0


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(16, 8), nn.Embedding(8, 8)
        self.up, self.head = nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, x):
        shift = torch.arange(x.shape[1]) + START
        return self.head(torch.tanh(self.up(self.words(x) + self.places(shift))))


torch.manual_seed(0)
net = Model()
parts = 1
if WORLD > 1:
    dist.init_process_group("gloo")
    rank, parts = dist.get_rank(), 2
    net = WRAP
optimizer = torch.optim.AdamW(net.parameters())
x = torch.randint(16, (8, 4), generator=torch.Generator().manual_seed(1))
for part in x.view(parts, WORLD, -1, 4)[:, rank]:
    loss = cross_entropy(net(part)[:, :-1].flatten(0, 1), part[:, 1:].flatten())
    (LOSS).backward()
if hasattr(net, "clip_grad_norm_"):
    net.clip_grad_norm_(LIMIT)
else:
    torch.nn.utils.clip_grad_norm_(net.parameters(), LIMIT)
optimizer.step()
"""


DDP = "DistributedDataParallel(net)"
FSDP1 = "torch.distributed.fsdp.FullyShardedDataParallel(net, device_id=torch.device('cpu'))"
FSDP2 = "torch.distributed.fsdp.fully_shard(net, mesh=dist.device_mesh.init_device_mesh('cpu', (2,)))"


def program(start="0", loss="loss", limit="0.01", wrap=DDP):
    return PROGRAM.replace("START", start).replace("LOSS", loss).replace("LIMIT", limit).replace("WRAP", wrap)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the trace of one process, by the norm to which it clips."""
    folder, traces = tmp_path_factory.mktemp("alone"), {}

    def of(limit):
        if limit not in traces:
            script = folder / f"train-{limit}.py"
            script.write_text(program(limit=limit))
            traces[limit] = run(folder, f"one-{limit}", sys.executable, str(script))
        return traces[limit]

    return of


@nightly
@pytest.mark.parametrize(
    ("start", "loss", "limit", "place", "words"),
    [
        ("0", "loss / parts", "0.01", "", ""),
        ("0", "loss / parts", "100.0", "", ""),
        ("rank", "loss / parts", "0.01", "places", ""),
        (
            "0",
            "loss",
            "0.01",
            "the model itself",
            "2 times the other job's, the size of ddp; the factor is that from before",
        ),
        (
            "0",
            "3 * loss / parts",
            "0.01",
            "the model itself",
            "3 times the other job's; the factor is that from before",
        ),
        ("0", "loss / parts ** 2", "0.01", "the model itself", "1/2 of the other job's"),
        (
            "0",
            "loss",
            "100.0",
            "the model itself",
            "2 times the other job's, the size of ddp; the model's output",
        ),
    ],
)
def test_micro_batches_are_put_together_and_clipping_is_taken_back(tmp_path, alone, start, loss, limit, place, words):
    (tmp_path / "train.py").write_text(program(start, loss, limit))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    step, _ = diff(alone(limit), run(tmp_path, "many", *torchrun))
    if not place:
        assert step["departures"] == []
        return
    first = step["departures"][0]
    assert (first["module"] or "the model itself") == place
    assert words in first["sentence"]


@nightly
def test_a_norm_that_is_only_logged_clips_nothing(tmp_path, alone):
    (tmp_path / "train.py").write_text(program(loss="loss / parts", limit="inf"))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    step, _ = diff(alone("inf"), run(tmp_path, "many", *torchrun))
    assert step["departures"] == []


@nightly
@pytest.mark.parametrize("wrap", [FSDP1, FSDP2])
@pytest.mark.parametrize(("loss", "words"), [("loss / parts", ""), ("loss", "2 times the other job's, the size of")])
def test_clipping_by_a_norm_of_shards_is_taken_back(tmp_path, alone, wrap, loss, words):
    (tmp_path / "train.py").write_text(program(loss=loss, wrap=wrap))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    step, _ = diff(alone("0.01"), run(tmp_path, "many", *torchrun))
    assert words in (step["departures"][0]["sentence"] if step["departures"] else "")
    assert bool(step["departures"]) == bool(words)
