"""100 tests on 8 ranks, against a minute and against torch.multiprocessing.spawn; what the plugin costs the others."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from whole import compare, python, verdict

NUM_TESTS = 100
NUM_SPAWNED = 2
MODEL = """
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.fsdp import fully_shard
from shardviz.testing import assert_layout

LAYOUTS = {
    "up.weight": "[*/tp/fsdp, *]",
    "up.bias": "[*/tp/fsdp]",
    "down.weight": "[*/fsdp, */tp]",
    "down.bias": "[*/fsdp]",
}


def body(mesh):
    model = nn.Sequential()
    model.up, model.down = nn.Linear(12, 24), nn.Linear(24, 12)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["fsdp"])
    assert_layout(model, LAYOUTS, mesh=mesh)
"""
TESTS = f"""
import pytest
from shardviz.testing import spmd
from model import body


@spmd(mesh={{"fsdp": 2, "tp": 4}})
@pytest.mark.parametrize("number", range({NUM_TESTS}))
def test_layout(mesh, number):
    body(mesh)
"""
SPAWNED = f"""
import os
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from model import body


def rank_main(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    dist.init_process_group("gloo", rank=rank, world_size=8)
    body(init_device_mesh("cpu", (2, 4), mesh_dim_names=("fsdp", "tp")))
    dist.destroy_process_group()


if __name__ == "__main__":
    for test in range({NUM_SPAWNED}):
        mp.spawn(rank_main, (29700 + test,), nprocs=8)
"""
LOADED = """
import time, pytest
start = time.process_time_ns()
import shardviz.testing.plugin.hooks
print(time.process_time_ns() - start)
"""


def main() -> None:
    """Print the ratios."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in {"model.py": MODEL, "test_ranks.py": TESTS, "spawned.py": SPAWNED}.items():
            (folder / file).write_text(text)
        (ours,) = compare([*pytest, "test_ranks.py"], runs=2, cwd=folder)
        (spawned,) = compare([sys.executable, "spawned.py"], runs=1, cwd=folder)
    print(f"{NUM_TESTS} tests on 8 ranks: {ours}\n{NUM_SPAWNED} by spawn: {spawned}")
    verdict(f"{NUM_TESTS} tests, seconds", ours.median, 60)
    ratio = (spawned.median / NUM_SPAWNED) / (ours.median / NUM_TESTS)
    verdict("one test by spawn / one test", ratio, 10, at_least=True)
    loaded = [int(subprocess.run(python(LOADED), check=True, capture_output=True).stdout) for _ in range(20)]
    verdict("loading the plugin where no test needs it, milliseconds", statistics.median(loaded) / 1e6, 20)


if __name__ == "__main__":
    main()
