"""What a job loads before it shards: files that it opened, and that its model does not hold as they have it."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from shardviz.check.run import check_dump
from shardviz.check.verdicts import nothing_checked
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.explain.placement.content import KeyOfAWrapper
from shardviz.live.run.references.sources import Opened
from shardviz.live.run.taking import take
from shardviz.live.run.watching import Watch
from shardviz.testing import spmd
from tests.lanes import at_night, nightly


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)


def build(seed, rows=16):
    torch.manual_seed(seed)
    return nn.Sequential(Layer(), Layer(), nn.Linear(16, rows))


def captured(folder, mesh, change, files=("weights.safetensors",), rows=16):
    """Shard a model whose state dict was changed by what is in some files, as a job does, and return the report."""
    folder.mkdir(exist_ok=True)
    for seed, file in enumerate(files, 1):
        if mesh.get_rank() == 0 and not (folder / file).exists():
            save_file(build(seed).state_dict(), folder / file)
    torch.distributed.barrier()
    seen = Watch(folder / "job.shardviz").session
    model = build(0, rows)
    loaded = [load_file(folder / file) for file in files]
    seen.sources += [Opened(folder / file) for file in files]
    model.load_state_dict(model.state_dict() | change(*loaded))
    seen.remember(model)
    fully_shard(model, mesh=mesh)
    note = take(seen, model, folder / "job.shardviz")
    assert note.kind == "captured", note.text
    torch.distributed.barrier()
    return check_dump(folder / "job.shardviz")


def notes_of(report):
    return [one.why for one in report.not_checked if not one.tensor]


def marks_of(report):
    """Return the tensors that differ from an opened file, each with what is said of it."""
    return {
        one.tensor: one.why.partition(", and ")[2]
        for one in report.not_checked
        if one.tensor and one.why.startswith("whether this is meant: the job opened weights.safetensors")
    }


RIGHT = {
    "all of it": lambda whole: whole,
    "a head that it does not have": lambda whole: {name: whole[name] for name in whole if name != "2.weight"},
}
"""Loads that are right; the last one where the file lacks what was not loaded."""


@nightly
@spmd(mesh={"fsdp": 2})
@pytest.mark.parametrize("load", ["all of it", *at_night(["a head that it does not have"])])
def test_a_right_load_before_sharding_has_no_note(mesh, tmp_path, load):
    if load.startswith("a head") and mesh.get_rank() == 0:
        whole = build(1).state_dict()
        save_file({name: whole[name] for name in whole if name != "2.weight"}, tmp_path / "weights.safetensors")
    report = captured(tmp_path, mesh, RIGHT[load])
    assert not report.findings
    assert not notes_of(report)
    assert not marks_of(report)


def noisy(value):
    return value + value.std() / 50 * torch.linspace(-1, 1, value.numel()).sin().reshape(value.shape)


@spmd(mesh={"fsdp": 2})
def test_a_load_that_left_out_some_tensors_marks_them_whatever_values_they_have(mesh, tmp_path):
    def fresh(whole):
        return {name: whole[name] for name in whole if not name.startswith("1.")}

    def near(whole):  # as with the seed that the weights of the file began with
        return whole | {name: noisy(whole[name]) for name in whole if name.startswith("1.w")}

    drawn, trained = captured(tmp_path / "a", mesh, fresh), captured(tmp_path / "b", mesh, near)
    assert not drawn.findings  # a layer may be drawn again on purpose
    assert not trained.findings
    assert set(marks_of(drawn)) == {"1.wq.weight", "1.wq.bias", "1.wk.weight", "1.wk.bias"}
    assert set(marks_of(trained)) == set(marks_of(drawn))
    (why,) = set(marks_of(drawn).values())
    assert why.startswith("these values are not in it: they were not loaded, or were drawn again; 6 tensors of")
    (why,) = set(marks_of(trained).values())
    assert why.startswith("these values are near the file's but not equal (off by ")
    assert not notes_of(drawn)


@spmd(mesh={"fsdp": 2})
def test_a_load_that_changed_nothing_marks_every_tensor_unless_a_second_model_has_the_file(mesh, tmp_path):
    report = captured(tmp_path / "alone", mesh, lambda whole: {})
    assert not report.findings
    assert "no tensor of the model is as there, and it has 14 of 14 by name" in marks_of(report)["0.wq.weight"]
    assert nothing_checked(dump_of(read_files(tmp_path / "alone" / "job.shardviz")), report) == ""
    teacher = build(1)
    assert not marks_of(captured(tmp_path / "beside", mesh, lambda whole: {}))
    del teacher


@spmd(mesh={"fsdp": 2})
def test_what_was_done_to_a_tensor_before_sharding_is_said_beside_its_mark(mesh, tmp_path):
    def change(whole):
        rows = whole["1.wk.weight"].clone()
        rows[3] = 0.25
        return whole | {
            "0.wq.weight": whole["0.wq.weight"] * 0.5,
            "0.wk.weight": whole["0.wk.weight"].view(4, 4, 16).transpose(0, 1).reshape(16, 16),
            "1.wq.weight": whole["1.wq.weight"].roll(1, 0),
            "1.wk.weight": rows,
            "2.weight": whole["2.weight"].bfloat16().float(),
        }

    report = captured(tmp_path, mesh, change)
    assert not report.findings
    order = "dim 0 is in the order of view(1, 4, 4, 1).transpose(1, 2): its indices come as 0 4 8 12 1 5 9 13 ..."
    assert {name: why.partition(";")[0].partition(": 16 shards")[0] for name, why in marks_of(report).items()} == {
        "0.wq.weight": "each element is 0.5 times what it has there: a scale was applied, or left out",
        "0.wk.weight": f"these are its elements in another order: {order}",
        "1.wq.weight": "these are its elements in another order: dim 0 is rolled by 1",
        "1.wk.weight": "16 of these 256 elements are not as there",
    }
    (note,) = notes_of(report)
    assert "whether 1 tensor of weights.safetensors was to be rounded: the model holds what bfloat16 can hold" in note


@spmd(mesh={"fsdp": 2})
def test_weights_of_another_kind_are_a_finding_though_they_were_there_before_sharding(mesh, tmp_path):
    report = captured(
        tmp_path,
        mesh,
        lambda whole: whole | {"0.wq.weight": whole["0.wk.weight"], "0.wk.weight": whole["0.wq.weight"]},
    )
    found = {one.tensor: one for finding in report.findings for one in finding.each}
    assert {name: (one.kind, one.held) for name, one in found.items()} == {
        "0.wq.weight": ("foreign", "the elements of 0.wk.weight"),
        "0.wk.weight": ("foreign", "the elements of 0.wq.weight"),
    }


@spmd(mesh={"fsdp": 2})
@pytest.mark.parametrize("has_more", [False, True])
def test_another_layer_is_a_finding_unless_the_file_has_more_layers_than_the_model(mesh, tmp_path, has_more):
    if has_more and mesh.get_rank() == 0:
        whole = build(1).state_dict()
        more = {name.replace("1.", "7.", 1): value + 1 for name, value in whole.items() if name.startswith("1.")}
        save_file(whole | more, tmp_path / "weights.safetensors")
    report = captured(
        tmp_path,
        mesh,
        lambda whole: {name: whole[name] for name in build(0).state_dict()} | {"1.wk.weight": whole["0.wk.weight"]},
    )
    found = [(one.tensor, one.held) for finding in report.findings for one in finding.each]
    if has_more:
        assert marks_of(report)["1.wk.weight"].startswith("it has these values as 0.wk.weight; ")
    assert found == ([] if has_more else [("1.wk.weight", "the elements of 0.wk.weight")])


@nightly
@spmd(mesh={"fsdp": 2})
def test_a_vocabulary_that_was_padded_is_compared_as_before_sharding(mesh, tmp_path):
    def padded(whole):
        more = {"2.weight": torch.zeros(2, 16), "2.bias": torch.zeros(2)}
        return whole | {name: torch.cat([whole[name], zeros]) for name, zeros in more.items()}

    report = captured(tmp_path, mesh, padded, rows=18)
    assert not report.findings
    assert not notes_of(report)
    assert "2.weight" not in report.why_not_checked


@nightly
@spmd(mesh={"fsdp": 2})
def test_two_checkpoints_that_are_mixed_both_ways_are_noted_and_one_over_the_other_is_not(mesh, tmp_path):
    files = ("old.safetensors", "new.safetensors")
    mixed = captured(tmp_path, mesh, lambda old, new: new | {"1.wk.weight": old["1.wk.weight"]}, files)
    assert not mixed.findings
    (note,) = notes_of(mixed)
    assert "whether new.safetensors and old.safetensors are mixed on purpose" in note
    assert "1.wk.weight of the second" in note


@nightly
@spmd(mesh={"fsdp": 2})
def test_a_file_loaded_over_part_of_another_has_no_note(mesh, tmp_path):
    if mesh.get_rank() == 0:
        save_file({"2.weight": build(2).state_dict()["2.weight"]}, tmp_path / "head.safetensors")
    over = captured(tmp_path, mesh, lambda base, head: base | head, ("base.safetensors", "head.safetensors"))
    assert not over.findings
    assert not notes_of(over)


@spmd(mesh={"fsdp": 2})
@pytest.mark.parametrize("dtype", [torch.bfloat16, *at_night([torch.float16])])
def test_weights_that_were_rounded_on_their_way_to_meta_are_placed_and_noted(mesh, tmp_path, dtype):
    whole = build(1).state_dict()
    if mesh.get_rank() == 0:
        save_file(whole, tmp_path / "weights.safetensors")
    torch.distributed.barrier()
    seen = Watch(tmp_path / "job.shardviz").session
    with torch.device("meta"):
        model = build(0)
    seen.remember(model)
    seen.sources.append(Opened(tmp_path / "weights.safetensors"))
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, one in model.named_parameters():
            rank = 1 - mesh.get_rank() if name == "0.wk.weight" else mesh.get_rank()
            one.to_local().copy_(whole[name].chunk(2)[rank].to(dtype).float())
    note = take(seen, model, tmp_path / "job.shardviz")
    assert note.kind == "captured", note.text
    torch.distributed.barrier()
    report = check_dump(tmp_path / "job.shardviz")
    assert [(finding.kind, finding.tensors) for finding in report.findings] == [("misordered", ("0.wk.weight",))]
    (note,) = notes_of(report)
    assert "tensors of weights.safetensors were to be rounded" in note
    assert str(dtype).removeprefix("torch.") in note
    assert not {"0.wq.weight", "2.weight"} & set(report.why_not_checked)


class Wrapped(nn.Module):
    """LoRA as people write it: the layer that it is put around is `base`."""

    def __init__(self, base):
        super().__init__()
        self.base, self.a, self.b = base, nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)


@nightly
@spmd(mesh={"fsdp": 2})
@pytest.mark.parametrize("mixed", [False, True])
def test_a_wrapped_layer_with_anothers_weight_is_named_and_its_own_is_right(mesh, tmp_path, mixed):
    whole = build(1).state_dict()
    if mesh.get_rank() == 0:
        save_file(whole, tmp_path / "weights.safetensors")
    torch.distributed.barrier()
    seen = Watch(tmp_path / "job.shardviz").session
    model = build(0)
    seen.sources.append(Opened(tmp_path / "weights.safetensors"))
    model.load_state_dict(whole | ({"0.wq.weight": whole["0.wk.weight"]} if mixed else {}))
    model[0].wq = Wrapped(model[0].wq)
    seen.remember(model)
    fully_shard(model, mesh=mesh)
    note = take(seen, model, tmp_path / "job.shardviz")
    assert note.kind == "captured", note.text
    torch.distributed.barrier()
    report = check_dump(tmp_path / "job.shardviz")
    found = [(one.tensor, one.held) for finding in report.findings for one in finding.each]
    assert found == ([("0.wq.base.weight", "the elements of 0.wk.weight")] if mixed else [])
    assert not notes_of(report)


def changed_on_meta(folder, mesh, change):
    """Copy a file into a model that was sharded on the meta device, each weight changed, and return the report."""
    whole = {name: value.bfloat16() for name, value in build(1).state_dict().items()}
    if mesh.get_rank() == 0:
        save_file(whole, folder / "weights.safetensors")
    torch.distributed.barrier()
    seen = Watch(folder / "job.shardviz").session
    with torch.device("meta"):
        model = build(0)
    seen.remember(model)
    seen.sources.append(Opened(folder / "weights.safetensors"))
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, one in model.named_parameters():
            part = whole[name].chunk(2)[mesh.get_rank()]
            one.to_local().copy_(change(part) if name == "0.wk.weight" else part)
    note = take(seen, model, folder / "job.shardviz")
    assert note.kind == "captured", note.text
    torch.distributed.barrier()
    return check_dump(folder / "job.shardviz")


RULES = {
    "scaled": (lambda part: part.float() * 81.3, "each element is 81.3 times what it has there"),
    "negative": (lambda part: -part, "each element is -1 times what it has there"),
    "one more": (lambda part: part.float() + 1, "each element is what it has there + 1"),
    "other type": (lambda part: part.view(torch.float16), "which are bfloat16, were read as float16"),
    "drawn": (
        lambda part: torch.rand_like(part) + torch.distributed.get_rank(),
        "no rank holds any of the values that it has there",
    ),
}


@spmd(mesh={"fsdp": 2})
@pytest.mark.parametrize("rule", ["scaled", *at_night([one for one in RULES if one != "scaled"])])
def test_a_rule_that_all_elements_follow_is_said_and_nothing_is_said_to_be_in_order(mesh, tmp_path, rule):
    change, text = RULES[rule]
    report = changed_on_meta(tmp_path, mesh, change)
    assert not report.findings
    assert text in " ".join(report.why_not_checked["0.wk.weight"])
    assert "0.wq.weight" not in report.why_not_checked


@nightly
@spmd(mesh={"fsdp": 2})
def test_a_scale_on_one_rank_alone_is_a_finding(mesh, tmp_path):
    report = changed_on_meta(tmp_path, mesh, lambda part: part * (3 if mesh.get_rank() else 1))
    assert [(one.kind, one.tensor, one.ranks) for one in report.findings] == [("foreign", "0.wk.weight", (1,))]


@nightly
@spmd(mesh={"fsdp": 2})
def test_norms_that_are_near_one_do_not_hide_a_load_that_changed_nothing(mesh, tmp_path):
    def norms(whole):
        torch.manual_seed(5)
        return {name: 1 + torch.randn(16) / 10 for name in whole if "norm.weight" in name}

    if mesh.get_rank() == 0:
        whole = build(1).state_dict()
        torch.manual_seed(9)
        noisy = {name: value + torch.randn(16) / 10 for name, value in whole.items() if "norm.weight" in name}
        save_file(whole | noisy, tmp_path / "weights.safetensors")
    report = captured(tmp_path, mesh, norms)
    assert "no tensor of the model is as there" in marks_of(report)["0.norm.weight"]


@spmd(mesh={"fsdp": 2})
def test_weights_that_a_job_scales_after_sharding_are_blamed_on_no_file(mesh, tmp_path):
    seen = Watch(tmp_path / "job.shardviz").session
    model = build(0)
    seen.remember(model)
    fully_shard(model, mesh=mesh)
    with torch.no_grad():
        model[0].wk.weight.mul_(81.3)
    note = take(seen, model, tmp_path / "job.shardviz")
    assert note.kind == "captured", note.text
    torch.distributed.barrier()
    report = check_dump(tmp_path / "job.shardviz")
    assert not report.findings
    (why,) = report.why_not_checked["0.wk.weight"]
    assert "its values were written after it was sharded" in why
    assert "opened" not in why


@spmd(mesh={"fsdp": 2})
@pytest.mark.parametrize("prefix", ["model.", *at_night([""])])
def test_keys_that_a_load_skipped_for_their_prefix_are_a_finding(mesh, tmp_path, prefix):
    if mesh.get_rank() == 0:
        save_file(build(1).state_dict(), tmp_path / "weights.safetensors")
    torch.distributed.barrier()
    seen = Watch(tmp_path / "job.shardviz").session
    model = build(0)
    seen.sources.append(Opened(tmp_path / "weights.safetensors"))
    weights = load_file(tmp_path / "weights.safetensors")
    with torch.no_grad():
        model[2].weight.copy_(noisy(weights["2.weight"]))  # near what it is given, as with an equal seed
    given = {f"{prefix}{name}" if name == "2.weight" else name: value for name, value in weights.items()}
    if not prefix:  # keys that are skipped, too, and no weight is missing for them
        given |= {f"average.{name}": value for name, value in weights.items()}
    seen.skipped_keys(model, given, model.load_state_dict(given, strict=False))
    seen.remember(model)
    fully_shard(model, mesh=mesh)
    assert take(seen, model, tmp_path / "job.shardviz").kind == "captured"
    torch.distributed.barrier()
    report = check_dump(tmp_path / "job.shardviz")
    assert [(one.kind, one.tensor) for one in report.findings] == ([("foreign", "2.weight")] if prefix else [])
    for finding in report.findings:
        assert finding.explanation == KeyOfAWrapper("model.", is_longer=True, is_prefix=True)
        assert "removeprefix('model.')" in finding.fix


@spmd(mesh={"fsdp": 2})
@pytest.mark.parametrize("wrapper", ["_checkpoint_wrapped_module.", *at_night([""])])
def test_keys_that_a_load_skipped_for_a_wrappers_words_are_a_finding(mesh, tmp_path, wrapper):
    given = {name.replace("0.", f"0.{wrapper}", 1): value for name, value in build(1).state_dict().items()}
    skipped = [name for name in given if wrapper and wrapper in name and "norm" not in name]  # norms begin alike
    given.pop("2.weight")  # a head that is trained from scratch
    if mesh.get_rank() == 0:
        torch.save({"model": given}, tmp_path / "weights.pt")
    torch.distributed.barrier()
    seen = Watch(tmp_path / "job.shardviz").session
    model = build(0)
    seen.sources.append(Opened(tmp_path / "weights.pt"))
    seen.skipped_keys(model, given, model.load_state_dict(given, strict=False))
    seen.remember(model)
    fully_shard(model, mesh=mesh)
    assert take(seen, model, tmp_path / "job.shardviz").kind == "captured"
    torch.distributed.barrier()
    findings = check_dump(tmp_path / "job.shardviz").findings
    assert sorted(name for finding in findings for name in finding.tensors) == sorted(
        name.replace(wrapper, "") for name in skipped
    )
    assert {finding.explanation.id for finding in findings} == ({"key-of-a-wrapper"} if wrapper else set())
