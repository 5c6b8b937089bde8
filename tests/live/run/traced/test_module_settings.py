"""Two jobs that make a module with different settings; a wrong module whose settings differ by local sizes alone."""

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
from torch.nn import functional

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))


class Gated(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.activation, self.scale, self.num_heads = activation, 0.5, 8
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)

    def forward(self, x):
        x = self.down(self.activation(self.up(x)) * self.scale)
        return SUMMED(x) if WORLD > 1 and self.num_heads < 8 else x


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), Gated(functional.gelu), nn.Linear(6, 2))
if WORLD > 1:
    dist.init_process_group("gloo")
    CHANGE
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
model(x).square().mean().backward()
optimizer.step()
"""
SPLIT = """model[2].num_heads = 4
    model[2].up.weight = nn.Parameter(model[2].up.weight.detach().chunk(2)[RANK].clone())
    model[2].down.weight = nn.Parameter(model[2].down.weight.detach().chunk(2, 1)[RANK].clone())"""
CASES = {
    "another function": ("model[2].activation = functional.silu", "activation is silu in the second run and gelu in"),
    "another scale": ("model[2].scale = 0.25", "scale is 0.25 in the second run and 0.5 in the first run"),
    "another eps": ("model[1].eps = 0.1", "eps is 0.1 in the second run and 1e-05 in the first run"),
    "parts that nothing sums": (SPLIT, ""),
}


@nightly
@pytest.mark.parametrize("case", CASES)
def test_settings_of_the_first_wrong_module_are_compared(tmp_path, case):
    change, words = CASES[case]
    (tmp_path / "job.py").write_text(PROGRAM.replace("CHANGE", change).replace("SUMMED", "(lambda x: x)"))
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "job.py")
    step, _ = diff(run(tmp_path, "one", sys.executable, "job.py"), run(tmp_path, "two", *command))
    first = step["departures"][0]
    assert (first["cause_id"] == "other-module-settings") is bool(words), step
    assert words in first["why"]
