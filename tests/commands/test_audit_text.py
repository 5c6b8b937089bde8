"""`shardviz audit`: how what a sweep found is printed. The sweep itself is tested on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardviz.cli import main
from shardviz.commands.audit import as_text, mesh_of
from shardviz.layout.mesh import parse_mesh
from shardviz.layout.placements import Replicate, Shard
from shardviz.live.audit.cases import Case, repro
from shardviz.live.audit.sweep import Audit, Disagreement

MESH = parse_mesh("tp=2")
GATHER = Case("gather", MESH, (2,), (Shard(0),), (Shard(0),))
MOVE = Case("redistribute", MESH, (2,), (Shard(0),), (Replicate(),))
FOUND = Audit(90, 7, [Disagreement(GATHER, 4, {0: [2, 1]}), Disagreement(MOVE, 3, {1: "RuntimeError: no"})])

SUMMARY = """
1. gather [2] on (tp=2): (Shard(0),)
   4 cases of this class; the smallest:
   rank 0: wanted [1, 2], got [2, 1]
{}
2. redistribute [2] on (tp=2): (Shard(0),) -> (Replicate(),)
   3 cases of this class; the smallest:
   rank 1: wanted [1, 2], got RuntimeError: no
{}"""


def test_each_class_is_reported_once_and_the_first_repro_follows_ready_to_be_copied() -> None:
    head, _, text = as_text(FOUND).partition("\n")
    assert head.endswith(": 90 cases tried, 7 wrong")
    said, _, script = text.partition("\n# 1 alone, in plain torch:\n")
    assert said == SUMMARY.format("", "")
    script, _, rest = script.partition("\n\n# 1 more: ")
    assert rest == "-o DIR writes them to files"
    assert script == repro(GATHER, "01_gather.py").rstrip()
    compile(script, "01_gather.py", "exec")


def test_repros_that_were_written_are_named_and_not_printed() -> None:
    _, _, text = as_text(FOUND, Path("repros")).partition("\n")
    assert text == SUMMARY.format(
        "   to see it: python repros/01_gather.py\n", "   to see it: python repros/02_redistribute.py"
    )


def test_a_torch_without_disagreements_is_one_line() -> None:
    assert "\n" not in as_text(Audit(90, 0, []))


@pytest.mark.parametrize("text", ["2,2", "2x2", "fsdp=2,tp=2"])
def test_a_mesh_is_read_as_every_verb_reads_it(text: str) -> None:
    assert str(mesh_of(text)) == "(fsdp=2, tp=2)"


def test_a_folder_that_cannot_be_written_to_is_named_before_the_sweep(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("shardviz.live.audit.sweep.audit", lambda *_, **__: pytest.fail("it swept"))
    (tmp_path / "file").touch()
    assert main(["audit", "-o", str(tmp_path / "file/repros")]) == 2
    assert capsys.readouterr().err == (
        f"shardviz: error: cannot write to {tmp_path}/file/repros: Not a directory\n"
        "Hint: choose another folder with -o\n"
    )
