"""Weights that nobody stamped are placed by their values in a checkpoint, in any dtype, and are left alone."""

import pytest
import torch
from safetensors.torch import save_file
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import shardviz
from shardviz.check.run import check_dump
from shardviz.errors import DumpError, ShardvizError
from shardviz.testing import spmd
from tests.lanes import at_night, nightly

TP = {"tp": 2}


def saved(path, model):
    if distributed.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: value.contiguous() for name, value in model.state_dict().items()}, path)
    distributed.barrier()
    return path


def built(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 48)).to(dtype)


def beside(folder):
    return folder.with_name("checkpoint.safetensors")


@spmd(mesh={"fsdp": 4})
@pytest.mark.parametrize("dtype", [*at_night([torch.float32]), torch.bfloat16], ids=str)
def test_a_sharded_model_is_in_order_and_keeps_its_values(mesh, shard_dump, dtype):
    model = built(dtype)
    reference = saved(beside(shard_dump), model)
    fully_shard(model, mesh=mesh)
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    shardviz.capture(model, shard_dump, mesh=mesh, reference=reference)
    report = check_dump(shard_dump)
    assert not report.findings
    assert not report.not_checked
    assert all(map(torch.equal, before, [parameter.to_local() for parameter in model.parameters()]))


@spmd(mesh=TP)
@pytest.mark.parametrize("dtype", [torch.float32, *at_night([torch.bfloat16])], ids=str)
def test_shards_exchanged_between_ranks_are_misordered(mesh, shard_dump, dtype):
    model = built(dtype)
    reference = saved(beside(shard_dump), model)
    weight = model[0].weight.detach()
    mine = weight.chunk(2)[1 - mesh.get_rank()].contiguous()
    model[0].weight = nn.Parameter(DTensor.from_local(mine, mesh, [Shard(0)]))
    shardviz.capture(model, shard_dump, mesh=mesh, reference=reference)
    (finding,) = check_dump(shard_dump).findings
    assert (finding.kind, finding.tensor, finding.ranks) == ("misordered", "0.weight", (0, 1))


@spmd(mesh=TP)
def test_a_fused_weight_that_a_loader_cut_as_a_whole_is_named_in_the_notation(mesh, shard_dump):
    model = built(torch.bfloat16)
    reference = saved(beside(shard_dump), model)
    segments = model[1].weight.detach().chunk(3)
    mine = torch.cat([segment.chunk(2)[mesh.get_rank()] for segment in segments])
    model[1].weight = nn.Parameter(DTensor.from_local(mine, mesh, [Shard(0)]))
    shardviz.capture(model, shard_dump, mesh=mesh, reference=reference)
    (finding,) = check_dump(shard_dump).findings
    assert (finding.kind, finding.claimed, finding.held) == ("misordered", "[48/tp, 24]", "[48/3/tp, 24]")


@spmd(mesh=TP)
def test_another_layers_weight_is_foreign(mesh, shard_dump):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    reference = saved(beside(shard_dump), model)
    model[0].weight = nn.Parameter(distribute_tensor(model[1].weight.detach(), mesh, [Shard(0)]))
    shardviz.capture(model, shard_dump, mesh=mesh, reference=reference)
    (finding,) = check_dump(shard_dump).findings
    assert finding.kind in ("foreign", "name-collision")
    assert "1.weight" in finding.summary


@spmd(mesh=TP)
def test_a_reference_in_a_wider_dtype_is_cast(mesh, shard_dump):
    reference = saved(beside(shard_dump), built())
    model = built(torch.bfloat16)
    fully_shard(model, mesh=mesh)
    shardviz.capture(model, shard_dump, mesh=mesh, reference=reference)
    assert not check_dump(shard_dump).findings


@spmd(mesh=TP)
def test_constant_weights_and_names_that_the_reference_lacks_are_not_checked(mesh, shard_dump):
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8))
    reference = saved(beside(shard_dump), nn.Sequential(nn.LayerNorm(8)))
    fully_shard(model[0], mesh=mesh)
    shardviz.capture(model, shard_dump, mesh=mesh, reference=reference)
    why = {one.tensor: one.why for one in check_dump(shard_dump).not_checked}
    assert "all of its values are equal" in why["0.weight"]
    assert "checkpoint.safetensors has no tensor of this name" in why["1.weight"]


@spmd(mesh=TP)
def test_stamps_and_a_reference_are_refused_together(mesh, shard_dump):
    model = built()
    stamps = shardviz.stamp(model)
    with pytest.raises(ShardvizError, match="no values left"):
        shardviz.capture(model, shard_dump, mesh=mesh, stamps=stamps, reference="x.safetensors")


# Names


@spmd(mesh=TP)
def test_a_reference_with_other_names_is_read_by_patterns(mesh, shard_dump):
    model = built()
    other = nn.ModuleDict({"h": nn.ModuleDict({"first": model[0], "second": model[1]})})
    reference = saved(beside(shard_dump), other)
    fully_shard(model, mesh=mesh)
    names = {"0.*": "h.first.*", "1.*": "h.second.*"}
    shardviz.capture(model, shard_dump, reference=reference, reference_names=names)
    report = check_dump(shard_dump)
    assert report.findings == report.not_checked == ()
    exchanged = {"0.*": "h.first.*", "1.weight": "h.second.weight", "1.bias": "h.first.bias"}
    shardviz.capture(model, shard_dump, reference=reference, reference_names=exchanged, force=True)
    why = check_dump(shard_dump).not_checked[0].why
    assert "its shape is [24] in" in why
    assert ", [48] in the model" in why
    assert "padding" not in why, "they have nothing in common"


@spmd(mesh=TP)
@pytest.mark.parametrize(("rows", "line"), [(26, "x = pad(x, 26)"), *at_night([(22, "x = slice(x, 0, 22)")])])
def test_a_padded_vocabulary_says_how_the_rest_of_it_is_checked(mesh, shard_dump, rows, line):
    whole = built()
    reference = saved(beside(shard_dump), whole)
    model = nn.Sequential(nn.Linear(32, rows), nn.Linear(24, 48))
    model[1].load_state_dict(whole[1].state_dict())
    with torch.no_grad():
        for own, one in zip(model[0].parameters(), whole[0].parameters(), strict=True):
            own[: min(rows, 24)].copy_(one[: min(rows, 24)])  # what is behind is drawn at random, as libraries do
    fully_shard(model, mesh=mesh)
    shardviz.capture(model, shard_dump, reference=reference)
    report = check_dump(shard_dump)
    assert report.findings == ()
    assert {one.tensor for one in report.not_checked} == {"0.weight", "0.bias"}
    assert all(line in one.why for one in report.not_checked)
    names = {name: line.removeprefix("x = ").replace("x", name, 1) for name in ("0.weight", "0.bias")}
    shardviz.capture(model, shard_dump, reference=reference, reference_names=names, force=True)
    report = check_dump(shard_dump)
    assert report.findings == report.not_checked == ()
    with torch.no_grad():
        model[0].weight.to_local()[:4].add_(1)
    shardviz.capture(model, shard_dump, reference=reference, reference_names=names, force=True)
    assert [finding.tensor for finding in check_dump(shard_dump).findings] == ["0.weight"]


@spmd(mesh=TP)
def test_a_reference_that_has_no_name_of_the_model_is_one_error_with_names_of_both(mesh, shard_dump):
    reference = saved(beside(shard_dump), nn.ModuleDict({"h": nn.Linear(2, 2), "g": nn.Linear(2, 2)}))
    model = built()
    fully_shard(model, mesh=mesh)
    with pytest.raises(ShardvizError, match=r"the model has 0.bias, 0.weight, 1.bias, .* has g.bias, g.weight, h.bias"):
        shardviz.capture(model, shard_dump, reference=reference)


def tied():
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"embed": nn.Embedding(48, 32), "up": nn.Linear(32, 32), "head": nn.Linear(32, 48, bias=False)}
    )
    model["head"].weight = model["embed"].weight
    return model


@spmd(mesh=TP)
@pytest.mark.parametrize("exchanged", [False, True])
def test_a_tied_weight_is_stored_once_and_found_under_its_other_name(mesh, exchanged, shard_dump):
    model = tied()
    stored = tied()
    del stored["head"]
    reference = saved(beside(shard_dump), stored)
    weight = model["embed"].weight.detach()
    mine = weight.chunk(2)[(mesh.get_rank() + exchanged) % 2].contiguous()
    model["embed"].weight = model["head"].weight = nn.Parameter(DTensor.from_local(mine, mesh, [Shard(0)]))
    shardviz.capture(model, shard_dump, mesh=mesh, reference=reference)
    report = check_dump(shard_dump)
    assert {finding.kind for finding in report.findings} == ({"misordered"} if exchanged else set())
    assert report.not_checked == ()


# Wrappers


@spmd(mesh={"dp": 2})
@pytest.mark.parametrize("wrapper", ["fsdp1", *at_night(["ddp", "compile", "compile-of-ddp", "ddp-of-compile"])])
@pytest.mark.parametrize("wrong", [False, True])
def test_wrappers_leave_the_names_of_a_reference(mesh, wrapper, wrong, shard_dump):
    model = built()
    reference = saved(beside(shard_dump), model)
    if wrong:
        with torch.no_grad():
            model[1].weight.normal_()
    wrap = {
        "ddp": DistributedDataParallel,
        "compile": torch.compile,
        "compile-of-ddp": lambda one: torch.compile(DistributedDataParallel(one)),
        "ddp-of-compile": lambda one: DistributedDataParallel(torch.compile(one)),
        "fsdp1": lambda one: FullyShardedDataParallel(one, device_id=torch.device("cpu")),
    }[wrapper]
    shardviz.capture(wrap(model), shard_dump, mesh=mesh, reference=reference)
    report = check_dump(shard_dump)
    assert [one.tensor.removeprefix("module.") for one in report.findings] == ["1.weight"] * wrong
    assert report.not_checked == ()


@nightly
@spmd(mesh=TP)
def test_a_compiled_model_is_stamped_under_clean_names(mesh, shard_dump):
    model = torch.compile(built(), backend="eager")  # the wrapper is the same, without the import of inductor
    stamps = shardviz.stamp(model)
    fully_shard(model, mesh=mesh)
    shardviz.capture(model, shard_dump, mesh=mesh, stamps=stamps)
    report = check_dump(shard_dump)
    assert report.findings == report.not_checked == ()
    assert [one.name for one in stamps.stamps] == ["0.weight", "0.bias", "1.weight", "1.bias"]


# Dims


class Experts(nn.Module):
    """Weights of three dims and of one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(4, 24, 16, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.randn(64, dtype=torch.bfloat16))


@spmd(mesh=TP)
@pytest.mark.parametrize("dim", [1, *at_night([0, 2])])
@pytest.mark.parametrize("exchanged", [True, *at_night([False])])
def test_experts_of_three_dims_and_weights_of_one_are_placed_in_bfloat16(mesh, dim, exchanged, shard_dump):
    model = Experts()
    reference = saved(beside(shard_dump), model)
    for name, cut in (("up", dim), ("scale", 0)):
        whole = getattr(model, name).detach()
        mine = whole.chunk(2, cut)[(mesh.get_rank() + exchanged) % 2].contiguous()
        setattr(model, name, nn.Parameter(DTensor.from_local(mine, mesh, [Shard(cut)])))
    shardviz.capture(model, shard_dump, mesh=mesh, reference=reference)
    report = check_dump(shard_dump)
    assert {(one.kind, name) for one in report.findings for name in one.tensors} == (
        {("misordered", "up"), ("misordered", "scale")} if exchanged else set()
    )
    assert report.not_checked == ()


@spmd(mesh={"dp": 2})
@pytest.mark.parametrize("flipped", [False, True])
def test_a_plain_weight_that_is_whole_and_in_another_order_is_found(mesh, shard_dump, flipped):
    model = built()
    reference = saved(beside(shard_dump), model)
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight.flip(0) if flipped else model[0].weight.clone())
    shardviz.capture(model, shard_dump, mesh=mesh, reference=reference)
    found = [(one.kind, one.tensor) for one in check_dump(shard_dump).findings]
    assert found == ([("misordered-within-shard", "0.weight")] if flipped else [])


@spmd(mesh=TP)
def test_zeros_that_a_loader_left_where_the_checkpoint_has_values_are_found(mesh, shard_dump):
    model = built()
    reference = saved(beside(shard_dump), model)
    fully_shard(model, mesh=mesh)
    with torch.no_grad():
        model[0].weight.to_local().zero_()
    shardviz.capture(model, shard_dump, mesh=mesh, reference=reference)
    (finding,) = check_dump(shard_dump).findings
    assert finding.tensor == "0.weight"
    assert "every element held is zero" in finding.summary


@spmd(mesh=TP)
def test_a_bias_of_which_one_half_is_zero_is_in_order(mesh, shard_dump):
    model = built()
    with torch.no_grad():
        model[0].bias[:12] = 0
    reference = saved(beside(shard_dump), model)
    fully_shard(model, mesh=mesh)
    shardviz.capture(model, shard_dump, mesh=mesh, reference=reference)
    report = check_dump(shard_dump)
    assert (report.findings, report.not_checked) == ((), ())


@spmd(mesh={"fsdp": 2})
@pytest.mark.parametrize("zeros", [True, *at_night([False])])
def test_a_checkpoint_of_another_model_is_one_finding_that_says_so(mesh, zeros, shard_dump):
    reference = saved(beside(shard_dump), built())
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 48))
    if zeros:
        nn.init.zeros_(model[0].bias)
    fully_shard(model, mesh=mesh)
    shardviz.capture(model, shard_dump, mesh=mesh, reference=reference)
    (finding,) = check_dump(shard_dump).findings
    assert (finding.kind, len(finding.members)) == ("foreign", 4)
    assert "none of the elements held is in checkpoint.safetensors" in finding.summary
    assert "loaded from a different checkpoint: its values are not in checkpoint.safetensors" in finding.cause


@spmd(mesh={"fsdp": 2})
def test_a_reference_that_one_rank_cannot_open_is_an_error_on_all(mesh, shard_dump):
    path = saved(beside(shard_dump), built())
    model = built()
    fully_shard(model, mesh=mesh)
    own = path if mesh.get_rank() == 0 else path.with_name("elsewhere.safetensors")
    with pytest.raises(ShardvizError, match=r"elsewhere.safetensors does not exist"):
        shardviz.capture(model, shard_dump, mesh=mesh, reference=own)


@spmd(mesh={"fsdp": 2})
def test_a_file_that_one_rank_cannot_write_is_an_error_on_all(mesh, shard_dump, monkeypatch):
    def refused(folder, record, dense):
        raise DumpError("cannot write it: the disk is full", "choose another folder with -o")

    model = built()
    fully_shard(model, mesh=mesh)
    if mesh.get_rank() == 1:
        monkeypatch.setattr("shardviz.live.dumping.write_rank", refused)
    with pytest.raises(ShardvizError, match=r"the disk is full"):
        shardviz.capture(model, shard_dump, mesh=mesh)
