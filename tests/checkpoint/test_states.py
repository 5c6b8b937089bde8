"""What an optimizer's states, and the sizes of files, show of a checkpoint by itself; and what right ones do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from msgspec import structs

from shardviz.checkpoint.open import open_checkpoint
from shardviz.checkpoint.optimizer import check_states

pytestmark = pytest.mark.filterwarnings("ignore")


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
