"""What a job of several ranks is given, and which layers it calls, compared with the job of one process."""

from __future__ import annotations

import sys

import pytest

from tests.lanes import nightly
from tests.live.run.traced.test_traced import diff, run

SHARED = """
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WORLD = int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(0)
model = nn.ModuleDict({"up": nn.Linear(6, 8), "down": nn.Linear(8, 6)})
net = nn.Sequential(model["up"], nn.Tanh(), model["down"])
rank = 0
if WORLD > 1:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    SHARD
optimizer = torch.optim.SGD(net.parameters())
x = torch.randn(8, 6, generator=torch.Generator().manual_seed(GIVEN))
net(x).square().mean().backward()
optimizer.step()
"""
STAGES = """
import os

import torch
import torch.distributed as dist
from torch import nn

WORLD = int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(0)
layers, rank = [nn.Linear(6, 6) for _ in range(5)], 0
bounds = [0, 5]
if WORLD > 1:
    dist.init_process_group("gloo")
    rank, bounds = dist.get_rank(), BOUNDS
net = nn.Sequential(*layers, nn.Linear(6, 2))
for number in range(5):
    if number not in range(bounds[rank], bounds[rank + 1]):
        delattr(net, str(number))
if rank < WORLD - 1:
    del net[-1]
optimizer = torch.optim.SGD(net.parameters())
x = torch.randn(8, 6, generator=torch.Generator().manual_seed(3)).requires_grad_()
if rank:
    x = torch.empty(8, 6)
    dist.recv(x, 0)
    x.requires_grad_()
out = net(x)
if rank < WORLD - 1:
    dist.send(out.detach(), 1)
    grad = torch.empty_like(out)
    dist.recv(grad, 1)
    out.backward(grad)
else:
    out.square().mean().backward()
if rank:
    dist.send(x.grad, 0)
optimizer.step()
"""
TENSOR_PARALLEL = 'parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})'


def causes(folder, program):
    (folder / "train.py").write_text(program)
    one = run(folder, "one", sys.executable, "train.py")
    many = run(folder, "many", sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    return [departure["why"] for departure in diff(one, many)[0]["departures"]]


@nightly
@pytest.mark.parametrize(
    ("shard", "given", "cause"),
    [
        (TENSOR_PARALLEL, "7 + rank + (WORLD > 1)", "Ranks along tp are given different rows"),
        (TENSOR_PARALLEL, "7 + (WORLD > 1)", "The jobs read different batches"),
        ("fully_shard(net, mesh=mesh)", "7 + rank + (WORLD > 1)", "The jobs read different batches"),
        (TENSOR_PARALLEL, "7", ""),
    ],
)
def test_ranks_that_share_features_need_the_same_rows(tmp_path, shard, given, cause):
    why = causes(tmp_path, SHARED.replace("SHARD", shard).replace("GIVEN", given))
    assert [each.startswith(cause) for each in why] == ([True] if cause else [])


@nightly
@pytest.mark.parametrize(("bounds", "is_left_out"), [("[0, 2, 4]", True), ("[0, 2, 5]", False)])
def test_a_layer_on_no_stage_is_named(tmp_path, bounds, is_left_out):
    why = causes(tmp_path, STAGES.replace("BOUNDS", bounds))
    assert [each.startswith("No rank calls module 4, so module 5 is given") for each in why] == [True] * is_left_out


@nightly
@pytest.mark.parametrize(("shard", "is_named"), [(TENSOR_PARALLEL, True), ("fully_shard(net, mesh=mesh)", False)])
def test_a_batch_dealt_to_ranks_that_share_features_is_named(tmp_path, shard, is_named):
    """Together they have all rows, as under FSDP, where that is right."""
    program = SHARED.replace("SHARD", shard).replace("GIVEN", "7").replace("net(x)", "net(x.chunk(WORLD)[rank])")
    whys = causes(tmp_path, program)
    assert [why.startswith("Ranks along tp are given different rows") for why in whys] == [True] * is_named


UNCALLED = """
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORLD, rank = int(os.environ.get("WORLD_SIZE", 1)), 0
torch.manual_seed(0)


class Trained(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Embedding(16, 4), nn.Linear(4, 16))

    def forward(self, x):
        return self.model(x)


trained = Trained()
call = trained.model
if WORLD > 1:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    call = DistributedDataParallel(trained)
optimizer = torch.optim.SGD(trained.parameters())
x = torch.randint(16, (8, 3), generator=torch.Generator().manual_seed(3))[ROWS]
call(x).square().mean().backward()
optimizer.step()
"""
"""Trains a module that one process does not call, as Lightning runs its `training_step` there."""


@nightly
@pytest.mark.parametrize(
    ("rows", "cause"),
    [("rank::WORLD", None), (": 8 // WORLD", "What chooses a rank's rows leaves out its coordinate along")],
)
def test_rows_are_those_of_the_module_that_is_called(tmp_path, rows, cause):
    whys = causes(tmp_path, UNCALLED.replace("ROWS", rows))
    assert [why.startswith(cause) for why in whys] == [True] if cause else whys == []


REDIRECTED = """import os
import torch
from torch import distributed as dist, nn
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
rank = 0


class Trained(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 4), nn.Linear(4, 16)

    def forward(self, x, depth=0):
        hidden = self.embed(x) if depth == 0 else x
        hidden = self(hidden.tanh(), depth + 1) if depth < 2 else hidden
        return self.head(hidden) if depth == 0 else hidden

    def training_step(self, batch):
        x, weights = batch
        return {"loss": (self(x).square().mean(-1) * weights).mean(), "weights": weights}


def redirected(ddp, batch):
    own = trained.forward

    def forward(batch):
        trained.forward = own
        return trained.training_step(batch)

    trained.forward = forward
    return ddp(batch)


trained = Trained()
optimizer = torch.optim.SGD(trained.parameters(), 0.5)
draw = torch.Generator().manual_seed(3)
x, weights = torch.randint(16, (8, 3), generator=draw), torch.rand(8, 3, generator=draw)
if WORLD > 1:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    batch = x[ROWS], weights[ROWS]
    loss = redirected(DistributedDataParallel(trained), batch)["loss"]
else:
    loss = trained.training_step((x, weights))["loss"]
loss.backward()
optimizer.step()
"""
"""Trains a recursive module by a method that the wrapped module runs as its forward, as Lightning does under DDP."""


@nightly
@pytest.mark.parametrize(
    ("rows", "cause"),
    [
        ("rank::WORLD", None),
        (": 8 // WORLD", "What chooses a rank's rows leaves out its coordinate along"),
    ],
)
def test_a_method_that_is_run_as_the_forward_of_the_module_is_no_call_of_it(tmp_path, rows, cause):
    whys = causes(tmp_path, REDIRECTED.replace("ROWS", rows))
    assert [why.startswith(cause) for why in whys] == [True] if cause else whys == []
