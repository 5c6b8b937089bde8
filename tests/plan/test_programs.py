"""Programs in which a plan and real ranks once differed, beside each other: each must agree to the byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardviz import probe_files
from shardviz.commands.probe import mesh_for
from shardviz.dump.read import read_files
from shardviz.dump.write import prepare_folder, write_plan, write_run
from shardviz.layout.mesh import Mesh
from shardviz.live.job import ProbeJob
from shardviz.live.plan.planning import PlanJob, plan
from shardviz.live.step.comms import Comms
from shardviz.testing import spmd
from tests.lanes import at_night, nightly
from tests.plan.agreeing import differences

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.dump.records.files import PlanRecord, RankRecord

LAYERS = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
AXES = BATCH_AXES = ("dp",)
MESH = (2,)
def build(): return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
def batch(): return torch.randn(8, 8)
"""

BY_FSDP = """
def parallelize(model, mesh):
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
"""

BY_DDP = """
def parallelize(model, mesh): return DistributedDataParallel(model, process_group=mesh.get_group("dp"))
"""

TIED = """
AXES, BATCH_AXES = ("tp",), ()
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.middle, self.out = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
        self.out.weight = self.words.weight
    def forward(self, x): return self.out(self.middle(self.words(x)))
def build(): return Tied()
def parallelize(model, mesh):
    words = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, mesh, {"words": words, "out": ColwiseParallel(output_layouts=Replicate())})
    model.out.weight = model.words.weight
def batch(): return torch.randint(0, 16, (4, 6))
"""

LAMB = """
class Lamb(torch.optim.Optimizer):
    def __init__(self, params): super().__init__(params, {})
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["exp_avg"], state["exp_avg_sq"] = p.grad * 0.1, p.grad**2 * 0.01
            update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-6)
            p.add_(update * (p.norm() / update.norm()), alpha=-1e-3)
def optimizer(model, mesh): return Lamb(model.parameters())
"""

TWICE = """
def loss(model, x):
    x = x.detach().clone().requires_grad_()
    y = model(x)
    slope, = torch.autograd.grad(y.sum(), x, create_graph=True)
    return (slope**2).mean() + y.mean()
"""

ZERO = """
from torch.distributed.optim import ZeroRedundancyOptimizer
def loss(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
    return y.float().square().mean()
def optimizer(model, mesh): return ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
"""

OTHER_DIM = """
def parallelize(model, mesh):
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda one: Shard(1) if one.ndim == 2 else Shard(0))
"""

OFFLOAD = """
def parallelize(model, mesh): fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
"""

LATE_SUM = """
AXES = BATCH_AXES = ("replica", "dp")
MESH = (2, 2)
def step(model, x, mesh):
    for last in (False, True):
        model.set_requires_all_reduce(last)
        loss = model(x).square().mean()
        loss.backward()
    return loss
"""

OF_LAYERS_AND_TP = """
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
AXES, BATCH_AXES, MESH = ("dp", "tp"), ("dp",), (2, 2)
def parallelize(model, mesh):
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    _pre_dp_module_transform(model)
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))
"""

BY_FSDP1 = """
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
def parallelize(model, mesh):
    return FullyShardedDataParallel(
        model, device_mesh=mesh, device_id=torch.device("cpu"), use_orig_params=True,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
    )
"""

PARTLY = """
MESH = (4,)
def parallelize(model, mesh):
    fully_shard(model[0], mesh=mesh, reshard_after_forward=2, ignored_params={model[0].bias})
    fully_shard(model[2], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
def step(model, x, mesh):
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        loss = model(x).square().mean() / 2
        loss.backward()
    return loss
"""

NARROW = """
from torch.distributed.fsdp import MixedPrecisionPolicy
def parallelize(model, mesh):
    narrow = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    fully_shard(model[0], mesh=mesh, mp_policy=narrow)
    fully_shard(model[2], mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    fully_shard(model, mesh=mesh)
"""

PARALLEL_LOSS = """
from torch.distributed.tensor.parallel import SequenceParallel, loss_parallel
AXES, BATCH_AXES, MESH = ("dp", "tp"), ("dp",), (2, 2)
def build(): return nn.Sequential(nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 16, bias=False))
def batch(): return torch.randint(0, 16, (4, 6))
def parallelize(model, mesh):
    words = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    out = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    parallelize_module(model, mesh["tp"], {"0": words, "1": SequenceParallel(), "2": out})
    fully_shard(model, mesh=mesh["dp"])
def loss(model, x): return nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
def step(model, x, mesh):
    with loss_parallel():
        found = loss(model, x)
        found.backward()
    return found.full_tensor()
"""

PROGRAMS = {
    "partly_resharded": LAYERS + PARTLY,
    "narrow_policies": LAYERS + NARROW,
    "loss_parallel": LAYERS + PARALLEL_LOSS,
    "ddp_and_tp": LAYERS + OF_LAYERS_AND_TP,
    "fsdp1_grad_op": LAYERS + BY_FSDP1,
    "lamb": LAYERS + BY_FSDP + LAMB,
    "double_backward_ddp": LAYERS + BY_DDP + TWICE,
    "zero1_autocast": LAYERS + BY_DDP + ZERO,
    "placement_fn": LAYERS + OTHER_DIM,
    "offload": LAYERS + OFFLOAD,
    "late_all_reduce": LAYERS + BY_FSDP + LATE_SUM,
}


def planned(path: Path) -> PlanRecord:
    probe = probe_files.find(str(path))
    return plan(PlanJob(probe, mesh_for(probe, None), double=True))[1]


@pytest.mark.parametrize(("name", "text"), [("tied", LAYERS + TIED), *at_night(PROGRAMS.items())])
def test_a_plan_agrees_with_real_ranks(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    probe = probe_files.find(str(path))
    mesh = mesh_for(probe, None)
    ProbeJob(probe, mesh, prepare_folder(tmp_path / "real")).launch()
    run, record = plan(PlanJob(probe, mesh, double=True))
    assert record.without_step == ""
    write_run(prepare_folder(tmp_path / "plan"), run)
    write_plan(tmp_path / "plan", record)
    real = read_files(tmp_path / "real")
    assert not any(one.raised for one in real.ranks.values())
    assert list(differences(real, read_files(tmp_path / "plan"), with_step=True)) == []


def _layouts(record: RankRecord, role: str) -> dict[tuple[object, ...], object]:
    found: dict[tuple[object, ...], object] = {}
    for tensor in record.tensors:
        body = record.bodies[tensor.body]
        if body.role == role:
            assert body.layout is not None
            found[tensor.name, tensor.numbers, tensor.suffix] = record.layouts[body.layout]
    return found


@nightly
def test_gradients_of_a_stage_are_on_the_mesh_of_its_parameters() -> None:
    probe = probe_files.find("pp_fsdp_tp")
    for part in plan(PlanJob(probe, mesh_for(probe, "2,1,2")))[1].parts:
        assert _layouts(part.record, "grad") == _layouts(part.record, "param") != {}


def test_a_second_backward_through_what_fsdp_has_freed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.py"
    path.write_text(LAYERS + BY_FSDP + TWICE)
    assert "weights that FSDP has freed" in planned(path).without_step
    path.write_text(LAYERS + BY_FSDP)
    assert planned(path).without_step == ""


@nightly
def test_real_ranks_raise_at_that_second_backward_too(tmp_path: Path) -> None:
    path = tmp_path / "twice.py"
    path.write_text(LAYERS + BY_FSDP + TWICE)
    probe = probe_files.find(str(path))
    ProbeJob(probe, mesh_for(probe, None), prepare_folder(tmp_path / "real")).launch()
    for one in read_files(tmp_path / "real").ranks.values():
        assert "out of bounds for storage of size 0" in one.raised[0].error


def test_what_a_static_graph_sends_once_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "static.py"
    path.write_text(LAYERS + BY_DDP.replace('"dp")', '"dp"), static_graph=True'))
    assert any("first step reduces 16 bytes more" in line for line in planned(path).how)
    path.write_text(LAYERS + BY_DDP)
    assert not any("first step" in line for line in planned(path).how)


@nightly
@spmd(mesh={"dp": 2})
def test_a_static_graph_sends_that_in_its_first_step_and_never_again(mesh: DeviceMesh) -> None:
    layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    model = DistributedDataParallel(layers, static_graph=True)
    sizes = []
    for _ in range(3):
        with Comms(model) as comms:
            model(torch.randn(4, 8)).sum().backward()
        records = comms.records(Mesh(("dp",), (2,)), mesh.get_rank())
        sizes.append(sum(one.bytes for one in records if one.op == "all_reduce"))
    assert sizes[0] - 16 == sizes[1] == sizes[2] == 1120
