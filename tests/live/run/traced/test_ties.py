"""A weight of two names in one job, which sharding makes two weights in the other."""

from __future__ import annotations

import sys

import pytest

from tests.lanes import nightly
from tests.live.run.traced.test_traced import diff, run

PROGRAM = """
import os

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WORLD = int(os.environ.get("WORLD_SIZE", 1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 16, bias=False)
        self.tie()

    def tie(self):
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


torch.manual_seed(0)
model = Model()
if WORLD > 1:
    embed = RowwiseParallel(input_layouts=Replicate())
    head = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",)), {"embed": embed, "head": head})
    AFTER
tokens = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
optimizer.step()
"""


@nightly
@pytest.mark.parametrize(("after", "causes"), [("pass", ["broken-tie"]), ("model.tie()", [])])
def test_a_tie_that_sharding_breaks_is_named(tmp_path, after, causes):
    (tmp_path / "train.py").write_text(PROGRAM.replace("AFTER", after))
    alone = run(tmp_path, "one", sys.executable, "train.py")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    step, _ = diff(alone, run(tmp_path, "two", *torchrun))
    assert [one["cause_id"] for one in step["departures"]] == causes
