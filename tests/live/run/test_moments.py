"""The optimizer state that a job resumes with, beside the checkpoint that it opened."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from shardviz.check.run import check_dump
from shardviz.live.run.references.sources import Opened, of_dcp
from shardviz.live.run.taking import take
from shardviz.live.run.watching import Watch
from shardviz.testing import spmd
from tests.lanes import at_night, nightly

MOMENTS = ("exp_avg", "exp_avg_sq")


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))


def trained(model, optimizer):
    torch.manual_seed(1)
    for _ in range(2):
        model(torch.randn(4, 16)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded(mesh):
    model = build()
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def report_of(seen, model, folder):
    note = take(seen, model, folder / "job.shardviz")
    assert note.kind == "captured", note.text
    torch.distributed.barrier()
    return check_dump(folder / "job.shardviz")


def exchanged(optimizer, kind):
    """Give each of two ranks the other's part of every state of a kind."""
    for state in optimizer.state.values():
        mine = state[kind].to_local()
        both = [torch.empty_like(mine) for _ in range(2)]
        torch.distributed.all_gather(both, mine.contiguous())
        mine.copy_(both[1 - torch.distributed.get_rank()])


def resumed(mesh, folder, change, load=True):
    """Resume from a DCP folder, change what was loaded, and return the report."""
    first = sharded(mesh)
    trained(*first)
    weights, states = get_state_dict(*first)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=folder / "ckpt")
    torch.distributed.barrier()
    del first
    seen = Watch(folder / "job.shardviz").session
    model, optimizer = sharded(mesh)
    weights, states = get_state_dict(model, optimizer)
    whole = {"model": weights, "optim": states} if load else {"model": weights}
    dcp.load(whole, checkpoint_id=folder / "ckpt")
    seen.sources += [of_dcp(whole, str(folder / "ckpt")), Opened(folder / "ckpt")]
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    change(optimizer)
    return report_of(seen, model, folder)


def notes_of(report):
    return [one.why for one in report.not_checked if not one.tensor]


@spmd(mesh={"fsdp": 2})
def test_moments_that_were_loaded_right_are_in_order(mesh, tmp_path):
    report = resumed(mesh, tmp_path, lambda optimizer: None)
    assert not report.findings
    assert not notes_of(report)
    assert report.num_tensors == 12


@nightly
@spmd(mesh={"fsdp": 2})
@pytest.mark.parametrize("kind", ["exp_avg", *at_night(["exp_avg_sq"])])
def test_moments_of_the_other_rank_are_named(mesh, tmp_path, kind):
    report = resumed(mesh, tmp_path, lambda optimizer: exchanged(optimizer, kind))
    found = {one.tensor: one.kind for finding in report.findings for one in finding.each}
    assert found == {f"{name}.{kind}": "misordered" for name in ("0.weight", "0.bias", "2.weight", "2.bias")}


@nightly
@spmd(mesh={"fsdp": 2})
def test_a_parameter_with_anothers_moments_is_named(mesh, tmp_path):
    def mix_up(optimizer):
        one, _, other, _ = optimizer.state.values()
        one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]

    report = resumed(mesh, tmp_path, mix_up)
    found = {one.tensor: (one.kind, one.held) for finding in report.findings for one in finding.each}
    assert found == {
        "0.weight.exp_avg": ("foreign", "the elements of 2.weight.exp_avg"),
        "2.weight.exp_avg": ("foreign", "the elements of 0.weight.exp_avg"),
    }


@nightly
@spmd(mesh={"fsdp": 2})
def test_states_that_were_read_and_never_set_are_noted(mesh, tmp_path):
    def fresh(optimizer):
        for state in optimizer.state.values():
            for kind in MOMENTS:
                state[kind].to_local().zero_()

    report = resumed(mesh, tmp_path, fresh)
    assert not report.findings
    (note,) = notes_of(report)
    assert "whether the optimizer state of ckpt was to be loaded" in note


@nightly
@spmd(mesh={"fsdp": 2})
def test_a_new_optimizer_on_weights_of_a_checkpoint_is_right(mesh, tmp_path):
    report = resumed(mesh, tmp_path, lambda optimizer: None, load=False)
    assert not report.findings
    assert not notes_of(report)


def copies(mesh, folder, load, order=lambda parameters: parameters):
    """Resume copies from a file of torch.save, whose optimizer numbers its states, and return the report."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trained(model, optimizer)
    if mesh.get_rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "last.pt")
    torch.distributed.barrier()
    last = torch.load(folder / "last.pt")
    seen = Watch(folder / "job.shardviz").session
    seen.sources.append(Opened(folder / "last.pt"))
    model = build()
    model.load_state_dict(last["model"])
    seen.remember(model)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(order([*model.parameters()]), lr=0.01)
    load(optimizer, last["optimizer"])
    return report_of(seen, model, folder)


@spmd(mesh={"dp": 2})
def test_numbered_states_are_compared_where_the_order_is_the_models(mesh, tmp_path):
    report = copies(mesh, tmp_path, torch.optim.AdamW.load_state_dict)
    assert not report.findings
    assert not notes_of(report)
    assert report.num_tensors == 12


@nightly
@spmd(mesh={"dp": 2})
def test_numbered_states_in_another_order_are_not_said_to_be_in_order(mesh, tmp_path):
    report = copies(mesh, tmp_path, torch.optim.AdamW.load_state_dict, lambda own: [*own[2:], *own[:2]])
    assert not report.findings
    assert report.num_tensors == 4


@nightly
@spmd(mesh={"dp": 2})
def test_a_rank_that_begins_without_states_is_noted(mesh, tmp_path):
    def on_the_first(optimizer, states):
        if mesh.get_rank() == 0:
            optimizer.load_state_dict(states)

    (note,) = notes_of(copies(mesh, tmp_path, on_the_first))
    assert "whether rank 1 was to begin without the optimizer state of 4 parameters that other ranks have" in note


@spmd(mesh={"fsdp": 2})
@pytest.mark.parametrize("is_own_order", [True, *at_night([False])])
def test_numbered_states_of_an_optimizer_with_an_order_of_its_own_are_not_told_apart(mesh, tmp_path, is_own_order):
    whole = build()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    trained(whole, optimizer)
    if mesh.get_rank() == 0:
        torch.save({"model": whole.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "ckpt.pt")
    torch.distributed.barrier()
    seen = Watch(tmp_path / "job.shardviz").session
    model = build()
    model.load_state_dict(whole.state_dict())
    seen.sources.append(Opened(tmp_path / "ckpt.pt"))
    seen.remember(model)
    fully_shard(model, mesh=mesh)
    first, *others = model.parameters()
    groups = [[first, *others]] if is_own_order else [others, [first]]
    resumed_optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=0.01)
    for parameter, number in zip((first, *others), range(4), strict=True):
        state = optimizer.state_dict()["state"][number]
        placed = {key: distribute_tensor(state[key], parameter.device_mesh, parameter.placements) for key in MOMENTS}
        resumed_optimizer.state[parameter] = {"step": state["step"], **placed}
    report = report_of(seen, model, tmp_path)
    assert not report.findings
    assert any("it numbers states" in note for note in notes_of(report)) is not is_own_order


@spmd(mesh={"fsdp": 2})
@pytest.mark.parametrize("is_sorted", [*at_night([False]), True])
def test_moments_that_a_job_saved_under_names_of_its_own_are_compared(mesh, tmp_path, is_sorted):
    first, trained_optimizer = sharded(mesh)
    trained(first, trained_optimizer)

    def state_of(model, optimizer):
        named = dict(model.named_parameters())
        moments = {f"optim.{n}.{key}": optimizer.state[one][key] for n, one in named.items() for key in MOMENTS}
        return {f"model.{name}": one.detach() for name, one in named.items()} | moments

    dcp.save(state_of(first, trained_optimizer), checkpoint_id=tmp_path / "ckpt")
    torch.distributed.barrier()
    seen = Watch(tmp_path / "job.shardviz").session
    model, optimizer = sharded(mesh)
    named = dict(model.named_parameters())
    order = sorted(named, key=lambda name: name.rpartition(".")[2]) if is_sorted else named
    loaded = {one: {key: torch.zeros_like(one.detach()) for key in MOMENTS} for one in named.values()}
    optimizer.state.update(loaded)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=tmp_path / "ckpt")
    seen.sources += [of_dcp(state, str(tmp_path / "ckpt")), Opened(tmp_path / "ckpt")]
    moments = {name: {key: state[f"optim.{name}.{key}"] for key in MOMENTS} for name in named}
    for one, name in zip(named.values(), order, strict=True):
        if moments[name]["exp_avg"].shape == one.shape:
            optimizer.state[one] = moments[name]
    report = report_of(seen, model, tmp_path)
    assert report.num_tensors == 12
    assert [one.kind for one in report.findings] == (["foreign"] if is_sorted else [])
