"""What was not looked at is not passed as right: no tick, no "in order", and found where wrong."""

import contextlib
import io
import shutil

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import shardviz
from shardviz.check.report import Place
from shardviz.check.run import check_dump
from shardviz.cli import main
from shardviz.errors import DumpError, ShardvizError
from shardviz.testing import spmd
from tests.bugs.case import HEAD
from tests.bugs.models import FSDP, TENSOR_PARALLEL
from tests.bugs.running import report_of
from tests.live.probing import run_probe

pytestmark = pytest.mark.bugs


def said_of(folder):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(["check", str(folder)])
    return code, out.getvalue()


@spmd(mesh={"tp": 4})
def test_shards_captured_without_ids_are_not_called_in_order(mesh, shard_dump):
    model = nn.Linear(6, 8, bias=False)
    rank = [0, 2, 1, 3][mesh.get_local_rank("tp")]
    model.weight = nn.Parameter(DTensor.from_local(model.weight.detach().chunk(4)[rank].clone(), mesh, [Shard(0)]))
    shardviz.capture(model, shard_dump, mesh=mesh)
    distributed.barrier()
    _, text = said_of(shard_dump)
    assert "in order" not in text, text
    assert "✓" not in text, text
    assert "not checked" in text, text


@spmd(mesh={"fsdp": 2})
def test_buffers_that_no_checkpoint_has_are_right_in_a_capture(mesh, shard_dump):
    model = nn.Linear(8, 8)
    model.register_buffer("table", torch.randn(4, 8), persistent=False)
    stamps = shardviz.stamp(model)
    fully_shard(model, mesh=mesh)
    shardviz.capture(model, shard_dump, mesh=mesh, stamps=stamps)
    distributed.barrier()
    report = check_dump(shard_dump)
    assert report.findings == ()
    assert report.not_checked == ()


def test_rank_files_of_two_runs_do_not_pass_as_one(tmp_path):
    probe = tmp_path / "mine.py"
    for name, seed in (("one", 1), ("other", 2)):
        probe.write_text(
            HEAD + FSDP + f"\ndef build():\n    torch.manual_seed({seed})\n    return MLP()\n\n\ndel batch\n"
        )
        run_probe(str(probe), "fsdp=2", tmp_path / name)
    for file in (tmp_path / "other").glob("rank_00001*"):
        shutil.copy(file, tmp_path / "one" / file.name)
    try:
        report = check_dump(tmp_path / "one")
    except DumpError:
        return
    assert report.findings != ()


def test_an_axis_in_expect_that_the_run_does_not_have_is_not_passed_by(tmp_path):
    source = HEAD + FSDP + '\nexpect = {"*.weight": "[*/ttp, *]"}\n'
    try:
        said = "\n".join(finding.summary for finding in report_of(source, "fsdp=2", tmp_path).findings)
    except ShardvizError as error:
        said = error.message
    assert "ttp" in said


def test_a_step_that_raises_only_where_it_is_sharded_is_a_finding(tmp_path):
    wrong = "return Sum.apply(x[:, :3] @ x, self.group) + self.down.bias"
    source = HEAD + TENSOR_PARALLEL.replace("return Sum.apply(x, self.group) + self.down.bias", wrong)
    report = report_of(source, "tp=2", tmp_path)
    assert any("raised" in finding.summary for finding in report.findings), report.not_checked


def test_a_weight_of_another_name_is_compared_as_what_it_is_made_of(tmp_path):
    """A module that the unsharded model does not have, around one that it has."""
    source = (
        HEAD
        + FSDP
        + (
            "\ndef parallelize(model, mesh):\n"
            "    model.up = nn.Sequential(model.up, nn.Identity())\n"
            '    fully_shard(model, mesh=mesh["fsdp"])\n'
        )
    )
    report = report_of(source, "fsdp=2", tmp_path)
    assert (report.findings, report.not_checked) == ((), ())
    assert report.compared[Place("step", "grad", "up.weight")] is True


OWN_ROWS = """
BATCH_AXES = ("dp",)
def build(): return nn.Linear(6, 5)
def parallelize(model, mesh): fully_shard(model, mesh=mesh)
def batch(): return torch.randn(8, 6), torch.randn(8, 5)
def loss(model, batch):
    made, due = model(batch[0]), batch[1]
"""


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("return (made - due / due.abs().amax()).square().mean()", "amax in case.py:70 gives each rank the max of"),
        ("return functional.cross_entropy(made @ due.T, torch.arange(len(due)))", "matmul in case.py:70 gets its"),
        ("return (made - due).square().sum()", "Nothing sums it over dp."),
    ],
    ids=["the largest", "negatives", "a sum"],
)
def test_why_a_loss_is_of_a_ranks_own_rows_is_said_in_the_note_with_the_fix(code, says):
    report = report_of(HEAD + OWN_ROWS + f"    {code}\n", "dp=2", with_lines=True)
    assert report.findings == ()
    (note,) = report.not_checked
    assert "Is the loss of the whole batch meant? " in note.why
    assert says in note.why, note.why
    assert " Fix: all_reduce " in note.why or " Fix: gather or reduce " in note.why
