"""Jobs as people write them: scripts that torchrun starts, unedited, with `shardviz run` in front of the command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint as dcp

from shardviz.check.run import check_dump
from tests.lanes import TORCH
from tests.live.run import ranks

if TYPE_CHECKING:
    from pathlib import Path

BEGIN = """
import os, sys
import torch
from torch import nn, distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

def build():
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.LayerNorm(16))

def exchange(weight):
    # Two ranks' shards change places, as a loader does that counts ranks from the other end.
    mine = weight.to_local().detach()
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine.contiguous())
    with torch.no_grad():
        mine.copy_(both[1 - dist.get_rank()])

def train(model, steps=3, seed=1):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(seed)
    for _ in range(steps):
        loss = model(torch.randn(4, 16)).pow(2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss, optimizer

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
"""

END = """
dist.barrier()
dist.destroy_process_group()
"""

ON_TWO_RANKS = """
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
model = build()
fully_shard(model, mesh=mesh)
"""

ON_META = """
from safetensors import safe_open
from safetensors.torch import load_file, save_file
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
with torch.device("meta"):
    model = build()
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
model.to_empty(device="cpu")
full = StateDictOptions(full_state_dict=True)

def by_hand(read, skipped=-1):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if rank != skipped:
                parameter.to_local().copy_(read(name).chunk(2)[rank])
"""
"""A model without values, for a checkpoint to be loaded; `save_weights` writes one."""

STEP = "model(torch.randn(4, 16)).pow(2).sum().backward()\n"
"""A step without the optimizer, which imports dynamo on each rank for a second."""

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
ON_FOUR = (*TORCHRUN[:-1], "4")
RANKS = (sys.executable, ranks.__file__, *TORCHRUN[-2:])
"""The same ranks as torchrun's in two seconds less of the processor's time."""
FORKED = (*RANKS, "--forked")
"""The same ranks, which import torch once together: each takes two seconds less."""


def save_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Write the weights of the scripts' model in three formats, and return them."""
    torch.manual_seed(3)
    layers = (nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.LayerNorm(16))
    weights = {name: value.contiguous() for name, value in nn.Sequential(*layers).state_dict().items()}
    weights["3.weight"] = torch.randn(16)
    torch.save({"model": weights, "epoch": 3}, folder / "weights.pt")
    save_file(weights, folder / "weights.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(weights, checkpoint_id=folder / "dcp")
    return weights


@dataclass(frozen=True)
class Ran:
    """What a job under `shardviz run` came to."""

    code: int
    out: str
    err: str
    folder: Path

    def report(self, number: int = 1):
        """Return the report of a dump."""
        return check_dump(self.folder / ("job.shardviz" if number == 1 else f"job-{number}.shardviz"))


def run(folder: Path, body: str, *options: str, command=TORCHRUN, whole: bool = False, words=()) -> Ran:
    """Run a script's body on two ranks under `shardviz run`."""
    script = folder / "job.py"
    script.write_text(body if whole else BEGIN + body + END)
    return Ran(*_call(command_for(folder, *command, str(script), *words, options=options), folder), folder)


def command_for(folder: Path, *job: str, options=()) -> tuple[str, ...]:
    """Return the command that runs a job under `shardviz run`."""
    return sys.executable, "-m", "shardviz", "run", "-o", str(folder / "job.shardviz"), *options, "--", *job


def environment() -> dict[str, str]:
    """Return the environment of a job that shares a small machine with others.

    Of torch 2.6.0 and 2.9.1, torchrun takes port 29500 unless it is given one; of 2.13.0 and 2.15.0, a free one.
    """
    port = {"PET_MASTER_PORT": ranks.free_port()} if TORCH < (2, 13) else {}
    return os.environ | {"OMP_NUM_THREADS": "1", "TORCH_NUM_THREADS": "1"} | port


def run_plain(folder: Path, body: str, command=TORCHRUN, words=()) -> Ran:
    """Run the same script without it."""
    script = folder / "job.py"
    script.write_text(BEGIN + body + END)
    return Ran(*_call((*command, str(script), *words), folder), folder)


ABORTED = "terminate called without an active exception"
"""What a rank says when torch's gloo aborts it at its exit, as torch 2.13 does now and then, without shardviz too."""


def without_aborts(call, folder: Path):
    """Call a job again that gloo aborted at its exit: that is not what a test is about."""
    for _ in range(3):
        done = call()
        if ABORTED not in done.stderr:
            break
        for dump in folder.glob("*.shardviz"):
            shutil.rmtree(dump)
    return done


def _call(command, folder: Path):
    done = without_aborts(
        lambda: subprocess.run(
            command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=240, check=False
        ),
        folder,
    )
    skip_what_torch_lacks(done.stderr)
    return done.returncode, done.stdout, done.stderr


def skip_what_torch_lacks(error: str) -> None:
    """Skip a test whose job steps under FSDP2: torch 2.6 cannot do that on a CPU, without shardviz neither."""
    if TORCH < (2, 7) and "'Stream' object has no attribute 'record_event'" in error:
        pytest.skip("FSDP2 steps on a CPU since torch 2.7")
