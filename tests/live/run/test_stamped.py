"""`shardviz run --reference COPY`: what loads a stamped copy is judged, and its values are never saved."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardviz.cli import main
from shardviz.live.run.references.sources import has_tensors, looks_stamped
from tests.lanes import at_night, nightly
from tests.live.run.jobs import FORKED, ON_META, STEP, TORCHRUN, save_weights
from tests.live.run.jobs import run as run_job

SAVE = "torch.save({'lost': torch.ones(3)}, f'saved-{rank}.pt')\n"
TRAIN_AND_SAVE = "train(model)\n" + SAVE

LOADERS = {
    "load_file": "whole = load_file('stamped.safetensors')\nset_model_state_dict(model, whole, options=full)\n",
    "safe_open": "with safe_open('stamped.safetensors', framework='pt') as file:\n    by_hand(file.get_tensor)\n",
    "torch.load": "whole = torch.load('stamped.pt')\nset_model_state_dict(model, whole['model'], options=full)\n",
    "dcp": "values = model.state_dict()\ndcp.load(values, checkpoint_id='stamped')\nmodel.load_state_dict(values)\n",
}


@pytest.fixture
def weights(tmp_path):
    """Write a checkpoint and stamped copies of it in three formats."""
    weights = save_weights(tmp_path)
    stamp(tmp_path / "weights.safetensors", tmp_path / "stamped.safetensors")
    stamp(tmp_path / "dcp", tmp_path / "stamped")
    torch.save({"model": load_file(tmp_path / "stamped.safetensors")}, tmp_path / "stamped.pt")
    return weights


def stamp(source, copy):
    assert main(["stamp-checkpoint", str(source), "-o", str(copy)]) == 0


def run(folder, body, *options, command=TORCHRUN, words=()):
    reference = ("--reference", f"{folder}/stamped.safetensors")
    return run_job(folder, body, *reference, *options, command=command, words=words)


def findings(ran):
    return {(one.kind, one.tensor) for finding in ran.report().findings for one in finding.each}


@nightly
@pytest.mark.parametrize("loader", LOADERS)
def test_a_right_loader_is_in_order_and_nothing_is_saved(tmp_path, weights, loader):
    ran = run(tmp_path, ON_META + LOADERS[loader] + TRAIN_AND_SAVE, "--steps", "1")
    assert ran.code == 0, ran.err
    assert "all 6 tensors are in order" in ran.out
    assert "the reference is a stamped copy" in ran.err
    assert not list(tmp_path.glob("saved-*"))
    assert not list(tmp_path.glob(".job*"))


WRONG = {
    "renamed": (
        "whole = load_file('stamped.safetensors')\n"
        "whole['3.weight'], whole['3.bias'] = whole['3.bias'], whole['3.weight']\n"
        "set_model_state_dict(model, whole, options=full)\n",
        {"3.weight", "3.bias"},
    ),
    "permuted": (
        "whole = load_file('stamped.safetensors')\n"
        "whole['0.weight'] = whole['0.weight'].view(2, 16, 16).transpose(0, 1).reshape(32, 16)\n"
        "set_model_state_dict(model, whole, options=full)\n",
        {"0.weight"},
    ),
    "wrong slices": (
        "whole = load_file('stamped.safetensors')\n"
        "by_hand(lambda name: whole[name] if name != '2.weight' else torch.cat(whole[name].chunk(2)[::-1]))\n",
        {"2.weight"},
    ),
    "one rank's load skipped": (
        "whole = load_file('stamped.safetensors')\nby_hand(whole.get, skipped=1)\n",
        {"0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"},
    ),
    "a pickle's keys exchanged": (
        "whole = torch.load('stamped.pt')['model']\nwhole['0.bias'] = whole['0.bias'].flip(0)\n"
        "set_model_state_dict(model, whole, options=full)\n",
        {"0.bias"},
    ),
    "loaded and not set": (
        "values = {name: torch.empty_like(value) for name, value in model.state_dict().items()}\n"
        "dcp.load(values, checkpoint_id='stamped')\n",
        {"0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"},
    ),
}


@pytest.mark.parametrize("bug", ["renamed", *at_night([name for name in WRONG if name != "renamed"])])
def test_what_a_wrong_loader_does_is_named(tmp_path, weights, bug):
    body, tensors = WRONG[bug]
    ran = run(tmp_path, ON_META + body + STEP + SAVE, "--steps", "1", command=FORKED)
    assert ran.code == 1, ran.err + ran.out
    assert {tensor for _, tensor in findings(ran)} == tensors
    assert ran.report().not_checked == ()
    assert "the job was ended before torch.save to saved-0.pt" in ran.err
    assert not list(tmp_path.glob("saved-*"))


SAVES = {
    "torch.save": "torch.save(model.state_dict(), f'saved-{rank}')",
    "safetensors": "save_file({'w': torch.ones(2)}, f'saved-{rank}')",
    "dcp": "dcp.save(model.state_dict(), checkpoint_id='saved-0')",
    "in a finally": "try:\n    train(model)\nfinally:\n    torch.save(model.state_dict(), f'saved-{rank}')",
}


@nightly
@pytest.mark.parametrize("save", SAVES)
def test_a_converter_is_captured_and_ended_before_it_saves(tmp_path, weights, save):
    ran = run(tmp_path, ON_META + LOADERS["load_file"] + SAVES[save] + "\n", "--steps", "1")
    assert ran.code == 0, ran.err + ran.out
    assert "all 6 tensors are in order" in ran.out
    assert "shardviz: the job was ended before " in ran.err
    assert not list(tmp_path.glob("saved*"))


@nightly
def test_what_is_saved_before_the_load_is_the_jobs_own(tmp_path, weights):
    first = "torch.save({'kept': torch.ones(2)}, f'kept-{rank}.pt')\nsave_file({'w': torch.ones(2)}, f'kept-{rank}')\n"
    first += "torch.distributed.barrier()\n"  # once a rank has loaded, no rank may save: values may come by broadcast
    ran = run(tmp_path, ON_META + first + LOADERS["load_file"] + TRAIN_AND_SAVE, "--steps", "1")
    assert ran.code == 0, ran.err + ran.out
    assert "all 6 tensors are in order" in ran.out
    assert torch.load(tmp_path / "kept-1.pt")["kept"].tolist() == [1, 1]
    assert load_file(tmp_path / "kept-0")["w"].tolist() == [1, 1]
    assert not list(tmp_path.glob("saved-*"))


@nightly
def test_a_rank_that_saves_alone_ends_the_job(tmp_path, weights):
    alone = "if rank == 0:\n    torch.save(model.state_dict(), 'saved')\ndist.barrier()\n"
    ran = run(tmp_path, ON_META + LOADERS["load_file"] + alone, "--steps", "1", "--patience", "3")
    assert ran.code == 2, ran.err + ran.out
    assert "rank 1 did not call it within 3 s" in ran.err
    assert "the job was ended before torch.save to saved" in ran.err
    assert not (tmp_path / "saved").exists()


@nightly
def test_a_job_that_loads_nothing_is_not_in_order(tmp_path, weights):
    by_itself = "for one in model.parameters(): nn.init.normal_(one.to_local())\n"
    ran = run(tmp_path, ON_META + by_itself + TRAIN_AND_SAVE, "--steps", "1")
    assert ran.code == 1, ran.err + ran.out
    assert {tensor for _, tensor in findings(ran)} == {"0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"}


@nightly
def test_two_models_of_the_same_names_each_have_their_own_checkpoint(tmp_path, weights):
    save_file({name: value + 1 for name, value in weights.items()}, tmp_path / "whole.safetensors")
    stamp(tmp_path / "whole.safetensors", tmp_path / "student.safetensors")
    two = """
student = build()
fully_shard(student, mesh=mesh)
set_model_state_dict(model, load_file("stamped.safetensors"), options=full)
set_model_state_dict(student, load_file("student.safetensors" if "right" in sys.argv else "stamped.safetensors"),
                     options=full)
if "right" not in sys.argv:
    load_file("student.safetensors")  # and never set
    exchange(student[0].weight)
with torch.no_grad():
    model(torch.randn(2, 16))
train(student)
"""
    ran = run(tmp_path, ON_META + two, "--steps", "1", words=["right"])
    assert ran.code == 0, ran.err + ran.out
    assert ran.report(2).findings == ()
    ran = run(tmp_path, ON_META + two, "--steps", "1", "--force", words=["wrong"])
    assert ran.code == 1, ran.err + ran.out
    assert ran.report(1).findings == ()
    assert [one.tensor for one in ran.report(2).findings] == ["0.weight"]


def test_a_pickle_is_stamped_if_it_has_values_of_the_copy(tmp_path):
    torch.manual_seed(0)
    save_file({"up": torch.randn(40, 25), "down": torch.randn(25, 40)}, tmp_path / "weights.safetensors")
    stamp(tmp_path / "weights.safetensors", tmp_path / "stamped.safetensors")
    values = load_file(tmp_path / "stamped.safetensors")

    def looks(tensor):
        return looks_stamped({"model": [tensor]}, str(tmp_path / "stamped.safetensors"))

    assert looks(values["up"])
    assert looks(values["down"].bfloat16())
    assert looks(values["up"].double())
    assert not looks(torch.randn(40, 25).pow(2))  # exponents that occur as evenly as a fill's
    assert not looks(torch.randn(1000).pow(2))


class Refusing:
    def __getattr__(self, name):
        raise RuntimeError(name)


def test_what_is_saved_may_have_itself_in_it_or_answer_nothing():
    around = {"step": 3}
    around["self"] = [around]
    assert not has_tensors(around)
    around["more"] = [torch.ones(1)]
    assert has_tensors(around)
    assert has_tensors([Refusing()])
