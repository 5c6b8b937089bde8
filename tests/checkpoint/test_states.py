"""What an optimizer's states, and the sizes of files, show of a checkpoint by itself; and what right ones do not."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from msgspec import structs
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from shardviz.checkpoint.findings import check_checkpoint
from shardviz.checkpoint.open import open_checkpoint
from shardviz.checkpoint.optimizer import check_states

pytestmark = pytest.mark.filterwarnings("ignore")


def found(folder):
    return check_checkpoint(open_checkpoint(folder)).findings


def written(folder, key, change, is_in=lambda file: True):
    """Change the states of a kind, in some files."""
    for name, tensor in open_checkpoint(folder).tensors.items():
        for chunk in tensor.chunks if name.endswith(f".{key}") else ():
            if is_in(chunk.place.file):
                start = tensor.stored(chunk).start
                values = np.memmap(folder / chunk.place.file, "<f4", "r+", start, chunk.sizes or (1,))
                values[...] = change(values)
    return folder


def test_steps_of_another_save_are_named_with_their_file(copied):
    folder = written(copied("dcp"), "step", lambda step: step - 1, "__2_0.distcp".__eq__)
    (finding,) = found(folder)
    assert (finding.kind, finding.severity) == ("wrong-value", "warning")
    assert "optimizer steps in __2_0.distcp are 1, and all of those in " in finding.summary
    assert finding.summary.endswith("are 2")


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_moments_that_are_nan_are_found(copied, key):
    folder = written(copied("dcp"), key, lambda values: values * np.float32("nan"))
    (finding,) = found(folder)
    assert (finding.kind, finding.severity) == ("wrong-value", "error")
    assert "values that were looked at are nan or infinite" in finding.summary


def test_steps_that_were_set_back_to_zero_are_found(copied):
    folder = written(copied("dcp"), "step", lambda step: step * 0)
    (finding,) = found(folder)
    assert "has taken 0 steps of this parameter, and its squares are not zero" in finding.summary
    assert not found(written(folder, "exp_avg_sq", lambda squares: squares * 0)), "nothing was stepped yet"


def test_squares_that_are_all_zero_after_several_steps_are_found(copied):
    folder = written(copied("dcp"), "exp_avg_sq", lambda squares: squares * 0)
    (finding,) = found(folder)
    assert finding.severity == "warning"
    assert finding.summary.endswith("parameters are zero, after up to 2 steps")
    assert not found(written(folder, "step", lambda step: step - 1)), "torch steps once to make states"


def test_states_that_torch_made_to_be_saved_before_any_step_are_quiet(tmp_path):
    model = torch.nn.Linear(4, 4)
    state = get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()))
    dcp.save({"model": model.state_dict(), "optim": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    report = check_checkpoint(open_checkpoint(tmp_path / "dcp"))
    assert not report.findings
    assert not [one.why for one in report.not_checked if "zero" in one.why]


def saved_alone(folder, groups, size=8):
    names = ["up", "down"]
    states = {name: {"exp_avg": torch.ones(size), "step": torch.tensor(3.0)} for name in names}
    optim = {"state": states, "param_groups": [{"lr": 0.1, "params": group} for group in groups]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = {name: torch.ones(size) for name in names}
        dcp.save({"model": model, "optim": optim}, checkpoint_id=folder, no_dist=True)
    return folder


def test_a_group_that_was_lost_is_found(tmp_path):
    (finding,) = found(saved_alone(tmp_path / "lost", [["up"]]))
    assert finding.summary.startswith("1 parameter has optimizer state, and no group names them: down;")
    assert not found(saved_alone(tmp_path / "whole", [["up"], ["down"]]))


def test_states_in_lists_are_read(tmp_path):
    state = {"exp_avg": torch.arange(4.0), "step": torch.tensor(1.0)}
    states = [{"state": {0: state}, "param_groups": [{"lr": 0.1, "params": [0]}]}]
    torch.save(
        {"model": {"up": torch.ones(4)}, "optimizer_states": states, "betas": [0.9, 0.95]}, tmp_path / "job.ckpt"
    )
    checkpoint = open_checkpoint(tmp_path / "job.ckpt")
    assert {*checkpoint.tensors} == {
        "model.up",
        "optimizer_states.0.state.0.exp_avg",
        "optimizer_states.0.state.0.step",
    }
    assert checkpoint.values["optimizer_states.0.param_groups.0.lr"] == 0.1
    assert checkpoint.values["betas"] == [0.9, 0.95]


def test_a_step_whose_first_part_is_empty_is_not_read(copied):
    checkpoint = open_checkpoint(copied("dcp"))
    steps = {name: one for name, one in checkpoint.tensors.items() if name.endswith(".step")}
    (name, step), *_ = steps.items()
    (whole,) = step.chunks
    place = structs.replace(whole.place, archive=False, size=0)
    empty = structs.replace(whole, offsets=(0,), sizes=(0,), place=place)
    parted = structs.replace(step, shape=(1,), chunks=(empty, structs.replace(whole, offsets=(0,), sizes=(1,))))
    tensors = {**checkpoint.tensors, name: parted}
    assert not list(check_states(replace(checkpoint, tensors=tensors)))
