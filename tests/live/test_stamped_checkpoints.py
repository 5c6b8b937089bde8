"""Stamped copies of checkpoints, loaded by every loader that a test can have: right ones and wrong ones."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardviz
from shardviz.check.run import check_dump
from shardviz.cli import main
from shardviz.testing import spmd
from tests.lanes import at_night

TP = {"tp": 2}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 48)
        self.down = nn.Linear(48, 32)


def built():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).to(torch.bfloat16)


def stamped(folder, model):
    """Return the stamped copy of a model's checkpoint, which rank 0 writes."""
    if distributed.get_rank() == 0:
        save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "m.safetensors")
        assert main(["stamp-checkpoint", str(folder / "m.safetensors"), "-o", str(folder / "s.safetensors")]) == 0
    distributed.barrier()
    return folder / "s.safetensors"


def sharded(mesh):
    model = parallelize_module(built(), mesh["tp"], {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["fsdp"])


def load(model, values, *, strict=True):
    set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True, strict=strict))


def found(model, mesh, folder, copy):
    shardviz.capture(model, folder, mesh=mesh, reference=copy, force=True)
    report = check_dump(folder)
    assert not report.not_checked
    return report.findings


@spmd(mesh={"fsdp": 2, "tp": 2})
def test_a_loaded_copy_is_in_order_down_to_the_norms_and_one_that_was_never_loaded_is_one_finding(mesh, shard_dump):
    copy = stamped(shard_dump.parent, built())
    model = sharded(mesh)
    (never,) = found(model, mesh, shard_dump, copy)
    assert set(never.tensors) == {name for name, _ in built().named_parameters()}
    assert "never loaded" in never.cause
    load(model, load_file(copy))
    assert not found(model, mesh, shard_dump, copy)


@spmd(mesh={"fsdp": 2, "tp": 2})
def test_one_ranks_load_that_was_skipped_is_found_on_that_rank(mesh, shard_dump):
    copy = stamped(shard_dump.parent, built())
    model = sharded(mesh)
    before = {name: parameter.to_local().clone() for name, parameter in model.named_parameters()}
    load(model, load_file(copy))
    if mesh.get_rank() == 2:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.to_local().copy_(before[name])
    report = found(model, mesh, shard_dump, copy)
    assert {one.kind for one in report} == {"foreign"}
    assert {rank for one in report for rank in one.ranks} == {2}
    assert {name for one in report for name in one.tensors} == set(before)


@spmd(mesh={"fsdp": 2, "tp": 2})
def test_a_key_that_the_file_lacks_and_nobody_missed_is_found(mesh, shard_dump):
    copy = stamped(shard_dump.parent, built())
    model = sharded(mesh)
    values = load_file(copy)
    del values["1.norm.bias"], values["0.up.weight"]
    load(model, values, strict=False)
    assert {name for one in found(model, mesh, shard_dump, copy) for name in one.tensors} == {
        "1.norm.bias",
        "0.up.weight",
    }


@spmd(mesh=TP)
@pytest.mark.parametrize("number", [*at_night([32]), 2048])
@pytest.mark.parametrize("wrong", [False, True])
def test_a_norm_and_a_bias_that_a_converter_permuted_are_found_element_by_element(mesh, shard_dump, number, wrong):
    model = nn.ModuleDict({"norm": nn.LayerNorm(number)}).to(torch.bfloat16)
    copy = stamped(shard_dump.parent, model)
    values = load_file(copy)
    order = torch.arange(number).view(2, -1).T.reshape(-1) if wrong else torch.arange(number)
    model.load_state_dict({name: value[order] for name, value in values.items()})
    (finding,) = found(model, mesh, shard_dump, copy) if wrong else [None]
    assert wrong or not found(model, mesh, shard_dump, copy)
    assert not wrong or (finding.kind, finding.tensors) == ("misordered-within-shard", ("norm.weight", "norm.bias"))


@spmd(mesh=TP)
def test_another_layers_weight_and_a_transposed_one_are_named(mesh, shard_dump):
    copy = stamped(shard_dump.parent, built())
    values = load_file(copy)
    values["0.up.weight"] = values["1.up.weight"]
    values["0.down.weight"] = values["0.up.weight"].reshape(32, 48)
    model = built()
    model.load_state_dict(values)
    report = found(parallelize_module(model, mesh, {"*.up": ColwiseParallel()}), mesh, shard_dump, copy)
    named = {one.tensor: one for one in report}
    assert "1.up.weight" in named["0.up.weight"].summary
    assert named["0.down.weight"].kind == "foreign"


@spmd(mesh=TP)
def test_a_copy_in_float32_says_the_same_of_a_model_in_bfloat16_and_in_float16(mesh, shard_dump):
    copy = stamped(shard_dump.parent, built().float())
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        model = built().to(dtype)
        model.load_state_dict(load_file(copy))
        parallelize_module(model, mesh, {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()})
        assert not found(model, mesh, shard_dump, copy)
        mine = model[0].up.weight.full_tensor().chunk(2)[1 - mesh.get_rank()].contiguous()
        model[0].up.weight = nn.Parameter(DTensor.from_local(mine, mesh, [Shard(0)]))
        (finding,) = found(model, mesh, shard_dump, copy)
        assert (finding.kind, finding.tensor) == ("misordered", "0.up.weight")


# Tensors that were made of others


class Fused(nn.Module):
    """What an engine makes of a checkpoint: q, k and v in one weight, with a bias, experts stacked and transposed."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"qkv": nn.Linear(32, 64)}) for _ in range(2))
        for layer in self.layers:
            layer.experts = nn.Parameter(torch.zeros(4, 32, 24))


def apart():
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.ModuleDict() for _ in range(2))
    for layer in layers:
        layer.update({"q": nn.Linear(32, 32), "k": nn.Linear(32, 16), "v": nn.Linear(32, 16)})
        layer["mlp"] = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(32, 24, bias=False)}) for _ in range(4))
    return nn.ModuleDict({"layers": layers}).to(torch.bfloat16)


def fused(values, order="qkv", experts=range(4)):
    """Load as an engine does."""
    model = Fused().to(torch.bfloat16)
    with torch.no_grad():
        for at, layer in enumerate(model.layers):
            for kind in ("weight", "bias"):
                parts = [values[f"layers.{at}.{name}.{kind}"] for name in order]
                getattr(layer["qkv"], kind).copy_(torch.cat(parts))
            layer.experts.copy_(torch.stack([values[f"layers.{at}.mlp.{one}.up.weight"].T for one in experts]))
    return model


@spmd(mesh=TP)
def test_what_an_engine_made_of_a_checkpoints_tensors_is_in_order(mesh, shard_dump):
    copy = stamped(shard_dump.parent, apart())
    model = fused(load_file(copy))
    parallelize_module(model, mesh, {"layers.*.qkv": ColwiseParallel()})
    assert not found(model, mesh, shard_dump, copy)


@spmd(mesh=TP)
def test_experts_out_of_order_and_an_order_that_only_one_rank_has_are_named(mesh, shard_dump):
    copy = stamped(shard_dump.parent, apart())
    model = fused(load_file(copy), experts=(0, 2, 1, 3))
    report = found(model, mesh, shard_dump, copy)
    assert {name for one in report for name in one.tensors} == {f"layers.{at}.experts" for at in range(2)}
    model = fused(load_file(copy), order="qkv" if mesh.get_rank() == 0 else "qvk")
    report = found(model, mesh, shard_dump, copy)
    assert {name for one in report for name in one.tensors} == {
        f"layers.{at}.qkv.{kind}" for at in range(2) for kind in ("weight", "bias")
    }


@spmd(mesh=TP)
def test_a_fused_weight_cut_as_a_whole_where_the_label_says_so_and_held_by_segments_is_named(mesh, shard_dump):
    copy = stamped(shard_dump.parent, apart())
    values = load_file(copy)
    model = fused(values)
    for at, layer in enumerate(model.layers):
        for kind in ("weight", "bias"):
            parts = [values[f"layers.{at}.{name}.{kind}"].chunk(2)[mesh.get_rank()] for name in "qkv"]
            setattr(layer["qkv"], kind, nn.Parameter(DTensor.from_local(torch.cat(parts), mesh, [Shard(0)])))
    report = found(model, mesh, shard_dump, copy)
    assert {(one.kind, name) for one in report for name in one.tensors} == {
        ("misordered", f"layers.{at}.qkv.{kind}") for at in range(2) for kind in ("weight", "bias")
    }


@spmd(mesh=TP)
def test_what_is_in_no_tensor_of_the_model_is_listed_and_what_the_copy_lacks_too(mesh, shard_dump):
    copy = stamped(shard_dump.parent, apart())
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"q": nn.Linear(32, 32)})])}).to(torch.bfloat16)
    model["head"] = nn.Linear(8, 8)
    model.load_state_dict(load_file(copy), strict=False)
    shardviz.capture(model, shard_dump, mesh=mesh, reference=copy)
    report = check_dump(shard_dump)
    assert not report.findings
    why = {one.tensor: one.why for one in report.not_checked}
    assert set(why) == {"", "head.weight", "head.bias"}
    assert "18 tensors of the stamped copy" in why[""]


# DCP folders


@spmd(mesh={"fsdp": 2, "tp": 2})
def test_a_copy_of_a_dcp_folder_is_loaded_by_dcp_and_says_what_was_not(mesh, shard_dump):
    model = sharded(mesh)
    folder = shard_dump.parent
    optimizer = torch.optim.AdamW(model.parameters())
    model[1].up.weight.grad = torch.ones_like(model[1].up.weight)
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
    dcp.save({"app": state}, checkpoint_id=folder / "step-7")
    if mesh.get_rank() == 0:
        assert main(["stamp-checkpoint", str(folder / "step-7"), "-o", str(folder / "stamped")]) == 0
    distributed.barrier()
    (never,) = found(model, mesh, shard_dump, folder / "stamped")
    assert len(never.tensors) == 12
    state["step"] = 0
    dcp.load({"app": state}, checkpoint_id=folder / "stamped")
    assert not found(model, mesh, shard_dump, folder / "stamped")
    with torch.no_grad():
        model[0].norm.weight.to_local().copy_(model[0].norm.weight.to_local().flip(0))
    (finding,) = found(model, mesh, shard_dump, folder / "stamped")
    assert (finding.kind, finding.tensor) == ("misordered-within-shard", "0.norm.weight")
