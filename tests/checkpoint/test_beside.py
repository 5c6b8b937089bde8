"""A job's dump beside a checkpoint, by command."""

from __future__ import annotations

from shardviz.cli import main
from shardviz.layout.mesh import parse_mesh
from tests.dumps import make_dump


def test_view_prints_what_diff_does(saved, capsys):
    assert main(["view", "--print", str(saved / "job.shardviz"), str(saved / "moved")]) == 0
    assert "permuted  0.weight" in capsys.readouterr().out


def test_a_dump_of_ids_and_a_plan_are_refused_in_a_line(tmp_path, capsys, saved):
    stamped = make_dump(tmp_path / "s.shardviz", parse_mesh("fsdp=2,tp=2"), {"0.weight": "[24/tp, 16]"})
    assert main(["diff", str(stamped), str(saved / "dcp")]) == 2
    err = capsys.readouterr().err
    assert "has no values to compare: its weights were stamped, and ids are not weights" in err
    assert "Hint: capture the job without stamps" in err
