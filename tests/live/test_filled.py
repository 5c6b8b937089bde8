"""Models that are stamped in types too narrow for ids, or are too large for them: as exact as ids, in any dtype."""

import time

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardviz
from shardviz.check.run import check_dump
from shardviz.testing import spmd
from tests.lanes import at_night, nightly

TP = {"tp": 2}


class Block(nn.Module):
    def __init__(self, wide, high):
        super().__init__()
        self.norm = nn.LayerNorm(wide)
        self.up = nn.Linear(wide, high)
        self.down = nn.Linear(high, wide)


def blocks(number, wide, high):
    return nn.Sequential(*[Block(wide, high) for _ in range(number)]).to(torch.bfloat16)


def sharded(model, mesh):
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["fsdp"])
    fully_shard(model, mesh=mesh["fsdp"])
    return model


def found(folder):
    report = check_dump(folder)
    assert not report.not_checked
    return [(one.kind, one.tensors) for one in report.findings]


@nightly
@spmd(mesh={"fsdp": 2, "tp": 2})
def test_thirty_million_bfloat16_parameters_are_in_order_and_two_shards_exchanged_are_named(mesh, shard_dump):
    model = blocks(2, 1024, 7168)
    assert sum(parameter.numel() for parameter in model.parameters()) > 29_000_000
    stamps = shardviz.stamp(model)
    sharded(model, mesh)
    began = time.process_time()
    shardviz.capture(model, shard_dump, mesh=mesh, stamps=stamps)
    assert time.process_time() - began < 60
    assert found(shard_dump) == []
    local = model[1].up.weight.to_local()
    other = [torch.empty_like(local) for _ in range(4)]
    torch.distributed.all_gather(other, local)
    with torch.no_grad():
        local.copy_(other[{0: 3, 3: 0}.get(mesh.get_rank(), mesh.get_rank())])
    shardviz.capture(model, shard_dump, mesh=mesh, stamps=stamps, force=True)
    (finding,) = check_dump(shard_dump).findings
    assert (finding.kind, finding.tensor, finding.ranks) == ("misordered", "1.up.weight", (0, 3))


@spmd(mesh=TP)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("wrong", [True, *at_night([False])])
def test_shards_in_every_narrow_dtype_are_placed(mesh, shard_dump, dtype, wrong):
    model = nn.Linear(24, 64).to(torch.bfloat16)
    model.weight = nn.Parameter(model.weight.detach().to(dtype))
    stamps = shardviz.stamp(model)
    mine = model.weight.detach().chunk(2)[mesh.get_rank() ^ wrong].contiguous()
    model.weight = nn.Parameter(DTensor.from_local(mine, mesh, [Shard(0)]))
    shardviz.capture(model, shard_dump, mesh=mesh, stamps=stamps)
    assert found(shard_dump) == ([("misordered", ("weight",))] if wrong else [])


@spmd(mesh=TP)
@pytest.mark.parametrize("number", [300, *at_night([8, 4096])])
def test_a_norm_that_was_permuted_without_any_rule_is_placed_element_by_element(mesh, shard_dump, number):
    model = nn.ModuleDict({"norm": nn.LayerNorm(number)}).to(torch.bfloat16)
    stamps = shardviz.stamp(model)
    torch.manual_seed(3)
    weight = model["norm"].weight
    mine = weight.detach()[torch.randperm(number)].chunk(2)[mesh.get_rank()].contiguous()
    model["norm"].weight = nn.Parameter(DTensor.from_local(mine, mesh, [Shard(0)]))
    shardviz.capture(model, shard_dump, mesh=mesh, stamps=stamps)
    ((kind, tensors),) = found(shard_dump)
    assert (kind, tensors) == ("misordered", ("norm.weight",))


@spmd(mesh=TP)
def test_another_layers_weight_is_told_from_ones_own_and_from_one_that_was_never_filled(mesh, shard_dump):
    model = blocks(3, 64, 96)
    stamps = shardviz.stamp(model)
    with torch.no_grad():
        model[0].up.weight.copy_(model[1].up.weight)
        nn.init.normal_(model[2].down.weight)
    parallelize_module(model, mesh, {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()})
    shardviz.capture(model, shard_dump, mesh=mesh, stamps=stamps)
    other, drawn = sorted(check_dump(shard_dump).findings, key=lambda one: one.tensor)
    assert (other.kind, other.tensor) == ("foreign", "0.up.weight")
    assert "hold 1.up.weight under this name" in other.summary
    assert (drawn.kind, drawn.tensor) == ("foreign", "2.down.weight")
    assert "none of the elements held is an id" in drawn.summary


@spmd(mesh=TP)
def test_flat_parameters_of_fsdp1_are_in_order(mesh, shard_dump):
    model = blocks(2, 64, 96)
    stamps = shardviz.stamp(model)
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    shardviz.capture(model, shard_dump, mesh=mesh, stamps=stamps)
    assert found(shard_dump) == []


@spmd(mesh={"pp": 2, "fsdp": 2})
@pytest.mark.parametrize("wrong", [True, *at_night([False])])
def test_stages_of_a_pipeline_that_were_stamped_one_by_one_keep_their_fills(mesh, shard_dump, wrong):
    model = nn.Sequential(nn.Linear(24, 48), nn.Linear(48, 24)).to(torch.bfloat16)
    stamps = shardviz.stamp(model)
    if wrong and mesh.get_local_rank("pp") == 1:
        with torch.no_grad():
            model[1].weight.copy_(model[1].weight.flip(0))
    fully_shard(model, mesh=mesh["fsdp"])
    shardviz.capture(model, shard_dump, mesh=mesh, stamps=stamps, stage_axes=("pp",))
    assert found(shard_dump) == ([("misordered", ("pp=1.1.weight",))] if wrong else [])


# What is wrapped or added after stamping


@spmd(mesh={"fsdp": 2})
@pytest.mark.parametrize("dtype", [*at_night([torch.float32]), torch.bfloat16], ids=str)
def test_adapters_that_were_added_after_stamping_are_not_checked_and_what_they_wrap_is(mesh, shard_dump, dtype):
    inner = nn.ModuleDict({"q": nn.Linear(32, 32), "o": nn.Linear(32, 32)}).to(dtype)
    stamps = shardviz.stamp(inner)
    inner["q"] = nn.ModuleDict({"base_layer": inner["q"], "lora_A": nn.Linear(32, 4, bias=False).to(dtype)})
    model = nn.Sequential()  # the names are those that peft gives
    model.base_model = nn.Sequential()
    model.base_model.model = inner
    fully_shard(model, mesh=mesh)
    shardviz.capture(model, shard_dump, mesh=mesh, stamps=stamps)
    report = check_dump(shard_dump)
    assert not report.findings
    why = {one.tensor: one.why for one in report.not_checked}
    assert set(why) == {"base_model.model.q.lora_A.weight"}
    assert all("it was not stamped" in one for one in why.values())
    local = inner["q"]["base_layer"].weight.to_local()
    with torch.no_grad():
        local.copy_(local.flip(0))
    shardviz.capture(model, shard_dump, mesh=mesh, stamps=stamps, force=True)
    (finding,) = check_dump(shard_dump).findings
    assert finding.tensor == "base_model.model.q.base_layer.weight"


@nightly
@spmd(mesh={"fsdp": 2})
def test_a_compiled_bfloat16_model_keeps_clean_names(mesh, shard_dump):
    model = torch.compile(blocks(1, 32, 64))
    stamps = shardviz.stamp(model)
    assert [stamp.name for stamp in stamps.stamps][:2] == ["0.norm.weight", "0.norm.bias"]
    fully_shard(model, mesh=mesh)
    shardviz.capture(model, shard_dump, mesh=mesh, stamps=stamps)
    assert found(shard_dump) == []
