"""A job's dump beside a checkpoint, by command."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardviz.cli import main
from shardviz.layout.mesh import parse_mesh
from tests.checkpoint.jobs import Held, job
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


@pytest.mark.parametrize("extra", ["optim.state.up.step", "optim.state.up.max_exp_avg_sq", "gate"])
def test_a_job_that_resumed_is_its_checkpoint_whose_steps_are_in_no_dump(tmp_path, capsys, extra):
    """Weights and moments are equal; a state or a weight that the job lacks is a difference, and a step isn't."""
    names = [weight + state for weight in ("up", "down") for state in ("", ".exp_avg", ".exp_avg_sq")]
    whole = {name: np.random.default_rng(seed).normal(size=(4, 6)) for seed, name in enumerate(names)}
    held = {name: Held(one, "[4/tp, 6]", role="optim" if "." in name else "param") for name, one in whole.items()}
    dump = job(tmp_path / "job.shardviz", "tp=2", held)
    saved = {("optim.state." if "." in name else "") + name: one for name, one in whole.items()}
    more = np.asarray(3.0) if extra.endswith("step") else np.ones((4, 6))
    save_file({**saved, extra: more}, tmp_path / "saved.safetensors")
    code = main(["diff", str(dump), str(tmp_path / "saved.safetensors")])
    out = " ".join(capsys.readouterr().out.split())
    note = "not compared: 1 number that the optimizer keeps, which a job's dump doesn't have: optim.state.up.step"
    assert (code, note in out, "added" in out) == ((0, True, False) if extra.endswith("step") else (1, False, True))
