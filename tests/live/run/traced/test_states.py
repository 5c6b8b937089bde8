"""A job that begins with states of a checkpoint, with those of other ranks, weights or steps, beside one process."""

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
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.Linear(16, 6))
called, rows = model, slice(RANK, None, WORLD)
KINDS = {"exp_avg": torch.randn, "exp_avg_sq": torch.rand}
drawn = torch.Generator().manual_seed(7)
saved = {
    name: {kind: 1e-2 * draw(weight.shape, generator=drawn) for kind, draw in KINDS.items()}
    for name, weight in model.named_parameters()
}
if WORLD > 1:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
    WRAP
OTHERS = {"2.weight": "4.weight", "4.weight": "2.weight", "2.bias": "4.bias", "4.bias": "2.bias"}


def of_rank(weight, whole, rank=RANK):
    if not isinstance(weight, DTensor):
        return whole.clone()
    (placement,) = weight.placements
    part = whole.chunk(WORLD, placement.dim)[rank].clone() if placement.is_shard() else whole.clone()
    return DTensor.from_local(part, weight.device_mesh, weight.placements, shape=whole.shape, stride=whole.stride())


def load():
    for name, weight in model.named_parameters():
        states = {}
        for kind, whole in saved[name].items():
            states[kind] = PUT if WORLD > 1 else of_rank(weight, whole)
        optimizer.state[weight] = {"step": torch.tensor(5.0), **states}


optimizer = OPTIMIZER
if LOAD:
    load()
x = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(1))
for step in range(4):
    with torch.autocast("cpu", torch.bfloat16, enabled=WORLD == 1 and HALF):
        loss = called(x[step, rows]).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
DDP = "called = DistributedDataParallel(model)"
FSDP = "fully_shard(model[2], mesh=mesh); fully_shard(model, mesh=mesh)"
FLAT = "called = model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device('cpu'))"
NARROW = "fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))"
TENSOR = (
    "rows = slice(None); parallelize_module(model, mesh, {'0': ColwiseParallel(), '2': RowwiseParallel(), "
    "'4': ColwiseParallel(), '5': RowwiseParallel()})"
)
USUAL = {
    "WRAP": FSDP,
    "PUT": "of_rank(weight, whole)",
    "OPTIMIZER": "torch.optim.AdamW(model.parameters(), 0.01)",
    "LOAD": "True",
    "HALF": "False",
}
RIGHT = [
    (USUAL, 1),
    ({"WRAP": DDP}, 1),
    ({"WRAP": TENSOR}, 1),
    ({"WRAP": NARROW, "HALF": "True"}, 1),
    ({"WRAP": FLAT, "LOAD": "False"}, 3),
    ({"WRAP": DDP, "LOAD": "False", "OPTIMIZER": "torch.optim.Adafactor(model.parameters(), 0.01)"}, 3),
]
OF_RANK_0 = {"PUT": "of_rank(weight, whole, 0)"}
WRONG = [
    (OF_RANK_0, "state-of-another-rank", "of the same part on every rank, rank 0's; rank 1 has"),
    (OF_RANK_0 | {"WRAP": TENSOR}, "state-of-another-rank", "of the same part on every rank, rank 0's; rank 1 has"),
    ({"PUT": "of_rank(weight, whole, 1 - RANK)"}, "state-of-another-rank", "rank 0 has that of rank 1"),
    (
        {"PUT": "of_rank(weight, saved[OTHERS.get(name, name)][kind])"},
        "state-by-number",
        "has the values of the other job's of 4.bias",
    ),
    (
        {"PUT": "of_rank(weight, whole if whole.ndim == 1 else whole.mT.contiguous().view(whole.shape))"},
        "state-in-another-order",
        "ranks together have the numbers of the optimizer's state, at other places",
    ),
    ({"PUT": "of_rank(weight, whole * (kind == 'exp_avg'))"}, "state-not-loaded", "on ranks 0, 1"),
    (
        {"PUT": "of_rank(weight, whole * RANK)", "WRAP": DDP},
        "state-not-loaded",
        "on rank 0 the optimizer's state is zeros",
    ),
    ({"PUT": "of_rank(weight, whole / WORLD)"}, "different-states", "but 0.5 times that"),
    (
        {"PUT": "of_rank(weight, whole + 1e-3 * whole.cos())"},
        "different-states",
        "is not the other job's on 2 of 2 ranks",
    ),
    ({"LOAD": "RANK == 0", "WRAP": DDP}, "lost-states", "rank 1 of the second run with none"),
]


def program(changed):
    text = PROGRAM
    for word, code in (USUAL | changed).items():
        text = text.replace(word, code)
    return text


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder, traces = tmp_path_factory.mktemp("alone"), {}

    def of(changed, step):
        text = program(changed | {"WRAP": "", "PUT": "", "LOAD": str(changed.get("LOAD") != "False")})
        text = text.replace("    \nOTHERS", "OTHERS").replace(" =  if WORLD > 1 else", " =")
        if (text, step) not in traces:
            script = folder / f"train{len(traces)}.py"
            script.write_text(text)
            traces[text, step] = run(folder, f"one{len(traces)}", sys.executable, str(script), step=step)
        return traces[text, step]

    return of


def compared(tmp_path, alone, changed, step=1):
    (tmp_path / "train.py").write_text(program(changed))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    compared_step, _ = diff(alone(changed, step), run(tmp_path, "two", *torchrun, step=step))
    return compared_step


@pytest.mark.parametrize(("changed", "traced"), [*at_night(RIGHT)], ids=str)
def test_a_right_job_has_the_states_of_one_process(tmp_path, alone, changed, traced):
    step = compared(tmp_path, alone, changed, traced)
    assert step["departures"] == []
    assert step["has_update"]


@pytest.mark.parametrize(("changed", "cause", "words"), [*at_night(WRONG)], ids=str)
def test_other_states_before_the_step_are_named(tmp_path, alone, changed, cause, words):
    first = compared(tmp_path, alone, changed)["departures"][0]
    assert words in first["sentence"]
    assert cause == first["cause_id"]
