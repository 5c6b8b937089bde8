"""Parameters that hooks and lists know, and a function that torch replaces: a plan's step goes through them, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from shardviz import probe_files
from shardviz.commands.probe import mesh_for
from shardviz.dump.read import read_files
from shardviz.dump.write import prepare_folder, write_plan, write_run
from shardviz.live.compat.fsdp import parameters_are_held
from shardviz.live.compat.worlds import fake_world
from shardviz.live.job import ProbeJob
from shardviz.live.plan.forks import ask
from shardviz.live.plan.planning import PlanJob, plan
from tests.lanes import at_night, nightly
from tests.plan.agreeing import differences

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LAYERS = """
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
AXES = BATCH_AXES = ("dp",)
MESH = (2,)
def build(): return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
def batch(): return torch.randn(8, 8)
def reduce(one, group): distributed.all_reduce(one.div_(distributed.get_world_size(group)), group=group)
"""

AFTER = """
def parallelize(model, mesh):
    for one in model.parameters():
        one.register_post_accumulate_grad_hook(lambda one: reduce(one.grad, mesh.get_group()))
"""

BEFORE = """
def parallelize(model, mesh):
    def hook(grad):
        own = grad.clone()
        reduce(own, mesh.get_group())
        return own
    for one in model.parameters(): one.register_hook(hook)
"""

OF_NODES = """
def parallelize(model, mesh):
    model.nodes = [one.expand_as(one).grad_fn.next_functions[0][0] for one in model.parameters()]
    for one, node in zip(model.parameters(), model.nodes):
        node.register_hook(lambda *_, one=one: reduce(one.grad, mesh.get_group()))
"""

LISTED = """
def parallelize(model, mesh): model.listed = list(model.parameters())
def loss(model, x): return model(x).square().mean()
def step(model, x, mesh):
    found = loss(model, x)
    found.backward()
    for one in model.listed:
        if one.grad is not None: reduce(one.grad, mesh.get_group())
    return found
"""

OF_DTENSORS = """
AXES, BATCH_AXES, MESH = ("dp", "tp"), ("dp",), (2, 2)
def parallelize(model, mesh):
    for layer in (model[0], model[2]):
        for name, one in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(distribute_tensor(one, mesh["tp"], [Replicate()])))
    for one in model.parameters():
        one.register_post_accumulate_grad_hook(lambda one: reduce(one.grad.to_local(), mesh.get_group("dp")))
    local = lambda module, given, made: made.full_tensor()
    model.register_forward_pre_hook(lambda module, given: distribute_tensor(given[0], mesh["tp"], [Replicate()]))
    model.register_forward_hook(local)
"""

OF_FSDP = """
AXES = BATCH_AXES = ("copies", "dp")
MESH = (2, 2)
def parallelize(model, mesh):
    fully_shard(model, mesh=mesh["dp"])
    for one in model.parameters():
        one.register_post_accumulate_grad_hook(lambda one: reduce(one.grad.to_local(), mesh.get_group("copies")))
"""

PROGRAMS = {"before": BEFORE, "of_nodes": OF_NODES, "listed": LISTED, "of_dtensors": OF_DTENSORS, "of_fsdp": OF_FSDP}


@nightly
@pytest.mark.parametrize(("name", "text"), [("after", AFTER), *at_night(PROGRAMS.items())])
def test_a_plan_sends_what_hooks_and_lists_of_parameters_send(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.py"
    path.write_text(LAYERS + text)
    probe = probe_files.find(str(path))
    mesh = mesh_for(probe, None)
    ProbeJob(probe, mesh, prepare_folder(tmp_path / "real")).launch()
    run, record = plan(PlanJob(probe, mesh, double=True))
    write_run(prepare_folder(tmp_path / "plan"), run)
    write_plan(tmp_path / "plan", record)
    real = read_files(tmp_path / "real")
    assert any(one.op == "all_reduce" for one in real.ranks[0].collectives)
    assert list(differences(real, read_files(tmp_path / "plan"), with_step=True)) == []


def by_node(model: nn.Module) -> object:
    weight = next(model.parameters())
    return weight.expand_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def tied(model: nn.Module) -> None:
    model.again = nn.Linear(4, 4)
    model.again.weight = model.get_parameter("0.weight")  # type: ignore[assignment]


def mislabeled(model: nn.Module) -> None:
    local = torch.empty(3, 4)  # of 4 rows a rank has 2
    mesh = init_device_mesh("cpu", (2,))
    model.get_submodule("0").weight = nn.Parameter(
        DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size((4, 4)), stride=(4, 1))
    )


@pytest.mark.parametrize(
    ("change", "held"),
    [
        (lambda _: None, False),
        (tied, False),
        (mislabeled, False),
        (lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (2,))) and None, False),
        (lambda model: [one.requires_grad_(False) for one in model.parameters()] and None, False),
        (lambda model: torch.optim.SGD(model.parameters()), True),
        (lambda model: model.get_parameter("0.bias"), True),
        (lambda model: model.get_parameter("0.bias").register_hook(lambda grad: grad) and None, True),
        (by_node, True),
    ],
)
def test_parameters_are_held_by_what_is_no_module(change: Callable[[nn.Module], object], held: bool) -> None:
    def work(_: int) -> bool:
        with fake_world(0, 2), torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            holder = change(model)
            found = parameters_are_held(model)
            del holder
            return found

    assert ask([0], work)[0] == held


CONTEXT = """
import torch
from torch import nn
from torch.distributed.tensor.experimental import context_parallel
AXES, BATCH_AXES, MESH = ("cp",), (), (2,)
def build(): return nn.Linear(16, 16)
def parallelize(model, mesh): pass
def batch(): return torch.randn(2, 2, 8, 16)
def step(model, x, mesh):
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
        q = model(x)
        found = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum()
        found.backward()
    return found
"""


def test_attention_of_a_split_context_is_not_planned_as_each_ranks_own(tmp_path: Path) -> None:
    import torch.distributed.tensor.experimental  # noqa: F401  # once, and not by each rank that is asked

    path = tmp_path / "context.py"
    path.write_text(CONTEXT)
    probe = probe_files.find(str(path))
    record = plan(PlanJob(probe, mesh_for(probe, None)))[1]
    assert "does not have a sharding strategy" in record.without_step  # of a CPU's attention, on real ranks neither
    path.write_text(CONTEXT.replace("with context_parallel", "if True or context_parallel"))
    assert plan(PlanJob(probe, mesh_for(probe, None)))[1].without_step == ""
