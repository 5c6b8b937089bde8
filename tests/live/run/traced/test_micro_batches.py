"""Micro-batches of two jobs: what is no part of the batch is in each, and clipping hides what all gradients have."""

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
    net = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(net.parameters())
x = torch.randint(16, (8, 4), generator=torch.Generator().manual_seed(1))
for part in x.view(parts, WORLD, -1, 4)[:, rank]:
    loss = cross_entropy(net(part)[:, :-1].flatten(0, 1), part[:, 1:].flatten())
    (LOSS).backward()
torch.nn.utils.clip_grad_norm_(net.parameters(), LIMIT)
optimizer.step()
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the trace of one process, by the norm to which it clips."""
    folder, traces = tmp_path_factory.mktemp("alone"), {}

    def of(limit):
        if limit not in traces:
            script = folder / f"train-{limit}.py"
            script.write_text(PROGRAM.replace("START", "0").replace("LOSS", "loss").replace("LIMIT", limit))
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
        ("0", "loss", "0.01", "the model itself", "2 times the unsharded model's, the size of dp; that is before"),
        ("0", "3 * loss / parts", "0.01", "the model itself", "3 times the unsharded model's; that is before"),
        ("0", "loss / parts ** 2", "0.01", "the model itself", "1/2 of the unsharded model's"),
        ("0", "loss", "100.0", "the model itself", "2 times the unsharded model's, the size of dp; the model's output"),
    ],
)
def test_micro_batches_are_put_together_and_clipping_is_taken_back(tmp_path, alone, start, loss, limit, place, words):
    (tmp_path / "train.py").write_text(PROGRAM.replace("START", start).replace("LOSS", loss).replace("LIMIT", limit))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    step, _ = diff(alone(limit), run(tmp_path, "many", *torchrun))
    if not place:
        assert step["departures"] == []
        return
    first = step["departures"][0]
    assert (first["module"] or "the model itself") == place
    assert words in first["sentence"]
