"""A user's own job on real ranks: pipeline stages, narrow dtypes, and what is said where something cannot be."""

from contextlib import suppress

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

import shardviz
from shardviz.check.run import check_dump
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.errors import DumpError, MeshError, NotationError, ShardvizError
from shardviz.layout.notation import write
from shardviz.live.api import check_step
from shardviz.live.capture.passes import NO_IDS
from shardviz.testing import spmd

PP_FSDP = {"pp": 2, "fsdp": 2}


def layers(names):
    return nn.ModuleDict({name: nn.Linear(12, 10) for name in names})


def own_layers(mesh, count=4):
    stage = mesh.get_local_rank("pp")
    return [str(number) for number in range(count)][stage * count // 2 : (stage + 1) * count // 2]


def cut(model, mesh):
    for name in set(model) - set(own_layers(mesh)):
        del model[name]
    return split(model, mesh)


def split(model, mesh):
    for layer in model.children():
        fully_shard(layer, mesh=mesh["fsdp"])
    return model


def clean(folder, *, stamped=True):
    report = check_dump(folder)
    assert not report.findings, report.findings
    assert all("no ids and no reference" in one.why and not stamped for one in report.not_checked), report.not_checked
    files = read_files(folder)
    assert {record.run_id for record in files.ranks.values()} == {files.run.run_id} != {""}
    return dump_of(files)


# Pipeline stages


@spmd(mesh=PP_FSDP)
def test_stages_cut_from_a_model_that_was_stamped_whole_are_no_missing_copies(mesh, shard_dump):
    model = layers("0123")
    stamps = shardviz.stamp(model)
    shardviz.capture(cut(model, mesh), shard_dump, mesh=mesh, stamps=stamps, stage_axes=("pp",))
    seen = clean(shard_dump)
    assert [stamp.name for stamp in seen.files.run.stamps] == [stamp.name for stamp in stamps.stamps]
    assert list(seen.find("stamped", "param", "3.weight").shards) == [2, 3]


@spmd(mesh=PP_FSDP)
def test_stages_that_were_stamped_one_by_one_all_have_their_stamps_in_the_dump(mesh, shard_dump):
    model = layers(own_layers(mesh))
    stamps = shardviz.stamp(model)
    wanted = {"*.weight": "[*/fsdp, *]"}
    shardviz.capture(split(model, mesh), shard_dump, mesh=mesh, stamps=stamps, stage_axes=("pp",), intended=wanted)
    seen = clean(shard_dump)
    firsts = [(stamp.name, stamp.first) for stamp in seen.files.run.stamps]
    assert firsts[:4] == [("0.weight", 1), ("0.bias", 121), ("1.weight", 131), ("1.bias", 251)]
    assert firsts[4:] == [("2.weight", 261), ("2.bias", 381), ("3.weight", 391), ("3.bias", 511)]
    assert {rank: str(shard.held) for rank, shard in seen.find("stamped", "param", "3.weight").shards.items()} == {
        2: "[0:5, 0:12]",
        3: "[5:10, 0:12]",
    }


@spmd(mesh=PP_FSDP)
@pytest.mark.parametrize("stamped", [True, False], ids=["stamped", "values"])
def test_stages_that_use_the_same_names_are_distinguished_by_their_coordinate(mesh, stamped, shard_dump):
    torch.manual_seed(mesh.get_local_rank("pp"))
    model = nn.Sequential(nn.Linear(12, 10), nn.Linear(10, 12 + mesh.get_local_rank("pp")))
    stamps = shardviz.stamp(model) if stamped else None
    shardviz.capture(
        DistributedDataParallel(model, process_group=mesh.get_group("fsdp")),
        shard_dump,
        mesh=mesh,
        stamps=stamps,
        stage_axes=("pp",),
    )
    seen = clean(shard_dump, stamped=stamped)
    names = {tensor.name: list(tensor.shards) for tensor in seen.tensors if "weight" in tensor.name}
    assert names == {f"pp={pp}.{at}.weight": [2 * pp, 2 * pp + 1] for pp in range(2) for at in range(2)}


@spmd(mesh=PP_FSDP)
def test_stages_that_are_alike_and_were_stamped_one_by_one_are_not_taken_for_copies(mesh, shard_dump):
    model = nn.Sequential(nn.Linear(12, 10))
    stamps = shardviz.stamp(model)
    shardviz.capture(split(model, mesh), shard_dump, mesh=mesh, stamps=stamps, stage_axes=("pp",))
    seen = clean(shard_dump)
    assert [(stamp.name, stamp.first) for stamp in seen.files.run.stamps][::2] == [
        ("pp=0.0.weight", 1),
        ("pp=1.0.weight", 131),
    ]


@spmd(mesh=PP_FSDP)
def test_a_bug_in_the_second_stage_is_found_there(mesh, shard_dump):
    model = layers(own_layers(mesh))
    stamps = shardviz.stamp(model)
    split(model, mesh)
    if mesh.get_local_rank("pp") == 1:
        local = model["2"].weight.to_local()
        with torch.no_grad():
            local.copy_(local.flip(0))
    shardviz.capture(model, shard_dump, mesh=mesh, stamps=stamps, stage_axes=("pp",))
    (finding,) = check_dump(shard_dump).findings
    assert (finding.kind, finding.tensor, finding.ranks) == ("misordered-within-shard", "2.weight", (2, 3))


@spmd(mesh=PP_FSDP)
def test_stages_without_their_axis_named_are_refused_with_the_argument_to_give(mesh, shard_dump):
    model = layers(own_layers(mesh))
    stamps = shardviz.stamp(model)
    with pytest.raises(ShardvizError) as caught:
        shardviz.capture(model, shard_dump, mesh=mesh, stamps=stamps)
    assert caught.value.message == "ranks 0 and 2 stamped tensors with different names or shapes"
    assert caught.value.hint.endswith("stage_axes=('pp',)")
    with pytest.raises(MeshError, match="no axis 'ppp'"):
        shardviz.capture(model, shard_dump, mesh=mesh, stamps=stamps, stage_axes=("ppp",))


# Dtypes that are too narrow for ids


def narrow(mesh):
    return nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20)).to(torch.bfloat16)


@spmd(mesh={"fsdp": 3})
def test_a_bfloat16_job_is_checked_as_it_is(mesh, shard_dump):
    model = narrow(mesh)
    stamps = shardviz.stamp(model)
    split(model, mesh)
    shardviz.capture(model, shard_dump, mesh=mesh, stamps=stamps)
    clean(shard_dump)


@spmd(mesh={"fsdp": 3})
def test_a_model_that_is_cast_after_it_was_stamped_is_reported_once_what_to_do_and_gets_no_verdict(mesh, shard_dump):
    model = narrow(mesh).float()
    stamps = shardviz.stamp(model)
    split(model.to(torch.bfloat16), mesh)
    shardviz.capture(model, shard_dump, mesh=mesh, stamps=stamps)
    report = check_dump(shard_dump)
    assert not report.findings
    reasons = {one.tensor: one.why for one in report.not_checked}
    assert set(reasons) == {"", "0.weight", "0.bias", "1.weight", "1.bias"}
    cast = "ids up to 1,850 are not exact in torch.bfloat16, to which it was cast after shardviz.stamp"
    assert reasons["0.bias"] == cast
    assert "cast the model before shardviz.stamp" in reasons[""]


@spmd(mesh={"fsdp": 3})
def test_weights_that_are_cast_up_after_they_were_stamped_are_in_order(mesh, shard_dump):
    model = narrow(mesh)
    stamps = shardviz.stamp(model)
    model = model.float()
    split(model, mesh)
    shardviz.capture(model, shard_dump, mesh=mesh, stamps=stamps)
    clean(shard_dump)


@spmd(mesh={"fsdp": 3})
@pytest.mark.parametrize("casts", [False, True], ids=["stays", "casts"])
def test_build_and_parallelize_of_a_bfloat16_job_are_checked_whole(mesh, casts, shard_dump):
    torch.manual_seed(7)
    before = torch.random.get_rng_state()

    def parallelize(model, mesh):
        split(model.to(torch.bfloat16) if casts else model, mesh)

    shardviz.capture_sharding(lambda: narrow(mesh), parallelize, shard_dump, mesh=mesh)
    report = check_dump(shard_dump)
    assert not report.findings
    assert [one.why for one in report.not_checked] == [NO_IDS] * casts
    seen = dump_of(read_files(shard_dump))
    for tensor in seen.at("stamped"):
        assert {rank: shard.held for rank, shard in tensor.shards.items()} == dict(tensor.claimed.regions())
    assert write(seen.find("stamped", "param", "0.weight").claimed) == "[30/fsdp, 40]"
    assert {tensor.dtype for tensor in seen.at("initial")} == {"bfloat16"}
    assert torch.equal(torch.random.get_rng_state(), before)


@spmd(mesh=PP_FSDP)
def test_stages_of_a_bfloat16_job_are_built_one_by_one(mesh, shard_dump):
    def build():
        return layers(own_layers(mesh)).to(torch.bfloat16)

    def parallelize(model, mesh):
        split(model.to(torch.bfloat16), mesh)

    torch.manual_seed(distributed.get_rank() // 2)
    shardviz.capture_sharding(build, parallelize, shard_dump, mesh=mesh, stage_axes=("pp",))
    assert not check_dump(shard_dump).findings
    held = dump_of(read_files(shard_dump)).find("stamped", "param", "3.weight").shards[3].held
    assert str(held) == "[5:10, 0:12]"


# Where it may not write


@spmd(mesh={"fsdp": 2})
def test_a_layout_that_cannot_be_read_is_refused_before_a_dump_is_spoilt(mesh, shard_dump):
    with pytest.raises(NotationError, match=r"the layout expected for 'weight': layout '\[2/fsdp': expected"):
        shardviz.capture(nn.Linear(2, 2), shard_dump, mesh=mesh, intended={"weight": "[2/fsdp"})
    assert not shard_dump.exists()


@spmd(mesh={"fsdp": 2})
def test_a_folder_that_is_there_is_an_error_on_every_rank_and_none_waits_for_another(mesh, shard_dump):
    shardviz.capture(fully_shard(nn.Linear(2, 2), mesh=mesh), shard_dump, mesh=mesh)
    with pytest.raises(DumpError, match=r"exists\nHint: give force=True to replace it, or another folder$"):
        shardviz.capture(fully_shard(nn.Linear(2, 2), mesh=mesh), shard_dump, mesh=mesh)
    with suppress(DumpError):
        shardviz.capture(fully_shard(nn.Linear(2, 2), mesh=mesh), shard_dump, mesh=mesh, force=True)
    clean(shard_dump, stamped=False)


# The mesh, where it is not given


@spmd(mesh=PP_FSDP)
def test_the_mesh_is_found_from_the_models_tensors(mesh, shard_dump):
    model = layers("01")
    stamps = shardviz.stamp(model)
    shardviz.capture(split(model, mesh), shard_dump, stamps=stamps)
    assert clean(shard_dump).files.mesh.axes == ("pp", "fsdp")


@spmd(mesh=PP_FSDP)
def test_a_model_without_dtensors_shows_no_mesh_and_every_rank_says_so(mesh, shard_dump):
    with pytest.raises(MeshError, match="no mesh was given, and no parameter or buffer is a DTensor"):
        shardviz.capture(layers("01"), shard_dump)
    model = layers("01")
    if mesh.get_rank() > 1:
        split(model, mesh)
    with pytest.raises(MeshError, match="there is no DTensor on ranks 0, 1"):
        shardviz.capture(model, shard_dump)


@spmd(mesh=PP_FSDP)
def test_ranks_on_meshes_of_their_own_have_to_give_one(mesh, shard_dump):
    own = init_device_mesh("cpu", (4,), mesh_dim_names=("all",)) if mesh.get_rank() else mesh
    model = layers("01")
    for layer in model.children():
        layer.weight = nn.Parameter(DTensor.from_local(layer.weight.detach(), own, [Replicate()] * own.ndim))
    with pytest.raises(MeshError, match=r"rank 0 on \(pp=2, fsdp=2\) of ranks 0, 1, 2, 3"):
        shardviz.capture(model, shard_dump)


# The job's own step

DP_FSDP = {"dp": 2, "fsdp": 2}


def trained(mesh, *, reduced=True):
    """Return a model with FSDP2 along fsdp and its gradients, reduced over dp by hand or not, with output and loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 10), nn.Linear(10, 12))
    fully_shard(model, mesh=mesh["fsdp"])
    torch.manual_seed(mesh.get_rank())
    output = model(torch.randn(3, 12))
    loss = output.square().mean()
    loss.backward()
    for parameter in model.parameters() if reduced else ():
        distributed.all_reduce(parameter.grad.to_local(), op=distributed.ReduceOp.AVG, group=mesh.get_group("dp"))
    return model, output, loss


def mean_of(loss):
    whole = loss.detach().clone()
    distributed.all_reduce(whole, op=distributed.ReduceOp.AVG)
    return whole.item()


@spmd(mesh=DP_FSDP)
def test_a_step_whose_copies_agree_is_right_and_says_what_was_not_compared(mesh, shard_dump):
    model, output, loss = trained(mesh)
    step = {"loss": loss, "output": output, "log": {"mean_loss": mean_of(loss), "lr": 1e-3}}
    shardviz.capture(model, shard_dump, mesh=mesh, step=step)
    report = check_dump(shard_dump)
    assert report.findings == ()
    assert [one.why for one in report.not_checked if one.about == "step"] == [
        "the step against an unsharded model's: a captured job has none; copies on its ranks were compared"
    ]
    roles = {(tensor.role, tensor.names[0]) for tensor in dump_of(read_files(shard_dump)).at("step")}
    assert {("scalar", "loss"), ("scalar", "mean_loss"), ("output", "output"), ("grad", "0.weight")} <= roles


@spmd(mesh=DP_FSDP)
def test_gradients_that_nothing_reduced_along_an_axis_are_named_with_it(mesh, shard_dump):
    model, _, _ = trained(mesh, reduced=False)
    shardviz.capture(model, shard_dump, mesh=mesh, step={})
    findings = check_dump(shard_dump).findings
    assert {finding.kind for finding in findings} == {"unreduced-gradient"}
    assert {name for finding in findings for name in finding.tensors} == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert all("differs along dp:" in finding.summary for finding in findings)


@spmd(mesh=DP_FSDP)
def test_a_logged_number_of_each_ranks_own_is_named(mesh, shard_dump):
    model, _, loss = trained(mesh)
    shardviz.capture(model, shard_dump, mesh=mesh, step={"log": {"loss": loss.item(), "mean": mean_of(loss)}})
    (finding,) = check_dump(shard_dump).findings
    assert (finding.kind, finding.tensor) == ("unreduced-scalar", "loss")


@spmd(mesh=DP_FSDP)
def test_an_output_that_is_labeled_as_copies_and_is_not_is_named(mesh, shard_dump):
    model, output, _ = trained(mesh)
    label = DTensor.from_local(output.detach(), mesh, [Replicate(), Replicate()], run_check=False)
    shardviz.capture(model, shard_dump, mesh=mesh, step={"output": label})
    (finding,) = check_dump(shard_dump).findings
    assert (finding.kind, finding.tensor) == ("unreduced-output", "output")


@spmd(mesh=DP_FSDP)
@pytest.mark.parametrize("wrapped", [True, False])
def test_plain_gradients_are_copies_where_their_weights_are(mesh, wrapped, shard_dump):
    torch.manual_seed(0)
    model = nn.Linear(12, 10)
    called = DistributedDataParallel(model) if wrapped else model
    called(torch.full((2, 12), 1.0 + mesh.get_rank())).square().mean().backward()
    shardviz.capture(called, shard_dump, mesh=mesh, step={})
    kinds = {finding.kind for finding in check_dump(shard_dump).findings}
    assert kinds == (set() if wrapped else {"unreduced-gradient"})


@spmd(mesh={"tp": 4})
def test_plain_shards_of_one_number_are_no_copies(mesh, shard_dump):
    model = nn.LayerNorm(12)
    (model(torch.randn(2, 12)) * (1 + mesh.get_rank())).sum().backward()
    shardviz.capture(model, shard_dump, mesh=mesh, step={})
    assert check_dump(shard_dump).findings == ()


@pytest.mark.parametrize(
    ("step", "says"),
    [
        ({"los": 1.0}, "step has 'los'"),
        ({"log": [1.0]}, r'step\["log"\] is a list, not a dictionary'),
        ({"log": {"norms": torch.ones(2)}}, r"the step's log 'norms' is \[2\], not one number"),
        ({"loss": "1.0"}, "the step's loss is str, not one number"),
        ({"output": (1, 2)}, "the step's output is a tuple, not a tensor"),
        (3, "step is a int, not a dictionary"),
    ],
)
def test_what_is_no_step_is_reported_in_a_line(step, says):
    with pytest.raises(ShardvizError, match=says):
        check_step(step)


@spmd(mesh={"fsdp": 2})
def test_a_stamped_model_has_no_step(mesh, shard_dump):
    model = nn.Linear(4, 4)
    stamps = shardviz.stamp(model)
    with pytest.raises(ShardvizError, match="no values left to step with"):
        shardviz.capture(model, shard_dump, mesh=mesh, stamps=stamps, step={})


@spmd(mesh={"fsdp": 2})
def test_a_buffer_that_every_rank_makes_again_after_stamping_is_quiet(mesh, shard_dump):
    model = nn.Linear(8, 8)
    model.register_buffer("table", torch.arange(32.0).view(4, 8), persistent=False)
    stamps = shardviz.stamp(model)
    fully_shard(model, mesh=mesh)
    model.table = torch.arange(32.0).view(4, 8) * 1.5
    shardviz.capture(model, shard_dump, mesh=mesh, stamps=stamps)
    report = check_dump(shard_dump)
    assert report.findings == ()
    assert [one.tensor for one in report.not_checked] == ["table"]
