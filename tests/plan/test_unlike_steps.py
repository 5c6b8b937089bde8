"""Ranks whose steps are not alike: each is planned as it is, and none of it is a step where one cannot be stepped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardviz import probe_files
from shardviz.cli import main
from shardviz.commands.probe import mesh_for
from shardviz.live.plan.planning import PlanJob, plan
from tests.lanes import at_night, nightly

if TYPE_CHECKING:
    from pathlib import Path

    from shardviz.dump.records.files import PlanRecord

HEAD = """
import torch
from torch import nn
AXES, MESH, BATCH_AXES = ("pp", "dp"), (2, 2), ("dp",)
def build(): return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
def parallelize(model, mesh): return model
def batch(): return torch.randn(8, 64)
"""
STEP = """
def step(model, batch, mesh):
    pp, dp = mesh.get_coordinate()
    {}
    loss = model(batch).square().mean()
    loss.backward()
    return loss
"""
FAILS = 'if pp == 1: raise ValueError("second half")'
OTHER = """
def parallelize(model, mesh):
    if mesh.get_coordinate()[0] == 1:
        model.extra = nn.Linear(8, 8)
"""


def planned(code: str, folder: Path, mesh: str | None = None) -> PlanRecord:
    file = folder / "mine.py"
    file.write_text(code)
    probe = probe_files.find(str(file))
    return plan(PlanJob(probe, mesh_for(probe, mesh)))[1]


@nightly
@pytest.mark.parametrize(
    ("mesh", "why"),
    [
        ("1,7", "RuntimeError: _chunk_cat expects non-empty tensor"),
        *at_night([("1,5", "")]),
    ],  # the first one's last rank has nothing
)
def test_ranks_that_uneven_shards_tell_apart_are_stepped_too(mesh: str, why: str) -> None:
    """The plan had a step on the first of them alone, and said of the mesh that the probe has no batch."""
    probe = probe_files.find("tp_fsdp")
    record = plan(PlanJob(probe, mesh_for(probe, mesh)))[1]
    assert len(record.parts) > 1
    assert record.without_step.endswith(why)
    assert all((part.peak is None) == bool(why) for part in record.parts)


@pytest.mark.parametrize(("which", "other"), [(0, ""), (1, OTHER), *at_night([(1, ""), (0, OTHER)])])
def test_where_some_ranks_cannot_be_stepped_no_step_is_planned_and_why_is_said(
    which: int, other: str, tmp_path: Path
) -> None:
    record = planned(HEAD + other + STEP.format(FAILS.replace("pp == 1", f"pp == {which}")), tmp_path)
    assert "ValueError: second half" in record.without_step
    assert all(part.peak is None and not part.saved for part in record.parts)
    assert len(record.parts) == (2 if other else 1)


def test_where_all_ranks_can_be_stepped_a_step_is_planned(tmp_path: Path) -> None:
    record = planned(HEAD + STEP.format("pass"), tmp_path)
    assert (record.without_step, len(record.parts)) == ("", 1)
    assert record.parts[0].peak is not None
    assert record.how == ("4 ranks of 4 asked",)


def test_the_command_says_the_error_of_the_ranks_that_cannot_be_stepped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(HEAD + OTHER + STEP.format(FAILS))
    assert main(["plan", "mine.py"]) == 0
    out = " ".join(capfd.readouterr().out.split())
    assert "planned without activations and collectives: a step run with values raised ValueError: second half" in out
    assert "no batch()" not in out
    assert "activations 0 B" not in out


def test_ranks_that_hold_more_in_a_step_than_the_first_are_planned_apart(tmp_path: Path) -> None:
    record = planned(HEAD + STEP.format("batch = batch.repeat(1 + 999 * pp, 1)"), tmp_path)
    first, last = (part.peak for part in record.parts)
    assert [part.at for part in record.parts] == [{"pp": (0,)}, {"pp": (1,)}]
    assert first is not None
    assert last is not None
    assert last.activations > 900 * first.activations


def test_ranks_that_hold_less_in_a_step_than_the_first_are_named(tmp_path: Path) -> None:
    record = planned(HEAD + STEP.format("batch = batch[:len(batch) - dp]"), tmp_path)
    assert len(record.parts) == 1
    assert record.how[0] == "4 ranks of 4 asked"
    assert record.how[-1].startswith("at a step's fullest moment rank 1 holds ")
    assert record.how[-1].endswith(" less than rank 0, which stands for it")


def test_parts_that_are_uneven_ask_no_more_ranks() -> None:
    probe = probe_files.find("fsdp")
    record = plan(PlanJob(probe, mesh_for(probe, "3")))[1]
    assert record.how[0] == "2 ranks of 3 asked"
    assert record.parts[0].peak is not None


def test_ranks_that_code_cannot_tell_from_the_first_are_asked_for_their_model_alone(tmp_path: Path) -> None:
    step = STEP.replace(
        "pp, dp = mesh.get_coordinate()", f"open(r'{tmp_path}/stepped-%d' % __import__('os').getpid(), 'w').close()"
    )
    record = planned(HEAD + step.format("pass"), tmp_path)
    assert record.how == ("2 ranks of 4 asked",)
    assert record.parts[0].peak is not None
    assert len(list(tmp_path.glob("stepped-*"))) == 1


def test_only_axes_whose_places_are_read_are_stepped_along(tmp_path: Path) -> None:
    step = STEP.replace(
        "pp, dp = mesh.get_coordinate()", f"open(r'{tmp_path}/stepped-%d' % mesh.get_local_rank('pp'), 'a').write('x')"
    )
    record = planned(HEAD + step.format("pass"), tmp_path)
    assert record.how == ("3 ranks of 4 asked",)
    assert [path.read_text() for path in sorted(tmp_path.glob("stepped-*"))] == ["x", "x"]
