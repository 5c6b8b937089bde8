"""Masks of dropout in two jobs: of ranks that are given the same or different rows, with equal and with other seeds."""

from __future__ import annotations

import sys

import pytest

from tests.lanes import nightly
from tests.live.run.traced.test_traced import diff, run

PROGRAM = """
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
torch.manual_seed(0)
model = called = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.25), nn.Linear(16, 4))
if WORLD > 1:
    dist.init_process_group("gloo")
    called = DistributedDataParallel(model)
torch.manual_seed(5 + RANK * ("seeds" in sys.argv))
x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
called(x if "same" in sys.argv else x.chunk(WORLD)[RANK]).square().mean().backward()
optimizer.step()
"""


@nightly
@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (("same", "seeds"), "different-masks"),
        (("parts",), "identical-masks"),
        (("same",), ""),
        (("parts", "seeds"), ""),
    ],
)
def test_masks_must_be_equal_where_rows_are_and_differ_where_rows_do(tmp_path, options, cause):
    (script := tmp_path / "train.py").write_text(PROGRAM)
    alone = run(tmp_path, "one", sys.executable, str(script))
    ranks = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    step, _ = diff(alone, run(tmp_path, "many", *ranks, str(script), *options))
    named = [(departure["module"], departure["cause_id"]) for departure in step["departures"]]
    assert named == ([("1", cause)] if cause else []), step
