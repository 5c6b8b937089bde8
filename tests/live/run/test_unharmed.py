"""Errors of shardviz's own stay shardviz's: in a job's process, none goes further than a line on stderr."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardviz.cli import main
from shardviz.errors import DumpError
from shardviz.live.run.hooks import observing
from shardviz.live.run.hooks.arming import arm, disarm
from shardviz.live.run.meeting import watch_steps
from shardviz.live.run.observer import Observer
from shardviz.live.run.options import Options, session_beside
from shardviz.live.run.references import sources
from shardviz.live.run.watching import Watch
from shardviz.live.world.group import kept_random_states


def test_a_visit_that_raises_leaves_the_call_as_it_was(capsys):
    def visit(module):
        raise KeyError("a visit of shardviz")

    arm(visit)
    try:
        result = nn.Identity()(torch.ones(2))
    finally:
        disarm(visit)
    assert result.tolist() == [1, 1]
    assert "the hook on Module.__call__ failed: KeyError: 'a visit of shardviz'" in capsys.readouterr().err


def test_an_optimizer_steps_beside_hooks_of_others(tmp_path):
    called = []
    watch_steps(Observer(Options(str(tmp_path / "d"), str(tmp_path))))
    handle = register_optimizer_step_pre_hook(lambda *_: called.append(1))
    try:
        weight = nn.Parameter(torch.ones(1))
        weight.grad = torch.ones(1)
        for _ in range(2):
            torch.optim.SGD([weight], lr=1.0).step()
    finally:
        handle.remove()
    assert (weight.item(), called) == (-1.0, [1, 1])


@pytest.mark.parametrize("rank", ["", "zero"])
def test_a_report_needs_no_rank_and_no_stderr(monkeypatch, rank):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "stderr", None)
    observing.report(f"a line with RANK={rank!r}")
    assert observing.rank_of_environment() == 0


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DumpError, match="cannot write beside") as refused:
        session_beside(tmp_path / "file" / "below" / "dump.shardviz")
    assert refused.value.hint == "give another folder with -o"
    with pytest.raises(DumpError, match="cannot write beside"):
        Watch(tmp_path / "file" / "dump.shardviz")


@pytest.mark.parametrize("patience", ["nan", "inf", "-1", "0"])
def test_ranks_never_wait_for_ever(capsys, patience):
    assert main(["run", "--patience", patience, "--", "true"]) == 2
    assert f"'{patience}' is not a valid timeout" in capsys.readouterr().err


def test_a_model_that_does_not_fit_into_memory_is_not_loaded_whole(monkeypatch, capsys):
    model = nn.Linear(8, 8)
    monkeypatch.setattr("shardviz.machine.free_memory", lambda: 2 * 72 * 4)
    assert sources._has_memory(model, Path("fits"))
    monkeypatch.setattr("shardviz.machine.free_memory", lambda: 2 * 72 * 4 - 1)
    assert not sources._has_memory(model, Path("too-large"))
    said = capsys.readouterr().err
    assert "too-large is not loaded whole" in said
    assert "takes 288 bytes, and 575 bytes of memory are free" in said
    assert "fits" not in said


def test_random_states_are_as_if_nothing_was_drawn():
    before = torch.get_rng_state()
    with kept_random_states():
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
