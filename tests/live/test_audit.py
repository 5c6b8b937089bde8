"""The audit of the installed torch: what it reports is really so, and what is right is not reported."""

import re
import subprocess
import sys

import pytest

from shardviz.layout.layout import Layout
from shardviz.layout.mesh import Mesh
from shardviz.layout.placements import Replicate, Shard
from shardviz.live.audit.cases import Case, all_cases, is_permuted
from shardviz.live.audit.repro import repro
from shardviz.live.audit.sweep import audit

MESH = Mesh(("fsdp", "tp"), (2, 2))


@pytest.fixture(scope="module")
def swept():
    return audit(MESH, 2)


def test_every_case_is_tried_and_smaller_ones_come_first(swept):
    cases = all_cases(MESH, 2)
    assert (swept.num_cases, swept.not_tried) == (len(cases), 0)
    for operation in {case.operation for case in cases}:
        weights = [case.weight for case in cases if case.operation == operation]
        assert weights == sorted(weights)


def test_torch_gathers_uneven_nested_shards_wrongly_over_a_flattened_mesh(swept):
    """Live in torch 2.13: collectives over both axes are merged into one, as if the shards were one even split."""
    wrong = [one.case for one in swept.disagreements if one.case.flattened]
    nested = (Shard(0), Shard(0))
    assert Case("redistribute", MESH, (2,), nested, (Replicate(), Replicate()), flattened=True) in wrong


def test_a_mesh_in_its_usual_order_gives_no_disagreement_without_flattening(swept):
    assert not [one for one in swept.disagreements if not is_permuted(one.case.mesh) and not one.case.flattened]


def test_a_repro_runs_by_itself_and_shows_what_the_audit_saw(swept, tmp_path):
    one = next(one for one in swept.disagreements if one.case.flattened)
    script = tmp_path / "repro.py"
    script.write_text(repro(one.case, script.name))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    for rank, got in one.got.items():
        assert re.search(rf"rank {rank}: wanted \[[^]]*\], got {re.escape(str(got))}", done.stdout)
    assert "AssertionError" in done.stderr


def test_a_repro_of_a_case_that_is_right_passes(tmp_path):
    case = Case("checkpoint", MESH, (3,), (Shard(0), Shard(0)), (Replicate(), Shard(0)))
    script = tmp_path / "repro.py"
    script.write_text(repro(case, script.name))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("case", all_cases(MESH, 3)[::17], ids=str)
def test_every_repro_is_python_that_says_what_is_wanted(case):
    text = repro(case, "repro.py")
    compile(text, "repro.py", "exec")
    wanted = {rank: case.wanted_ids(rank) for rank in sorted(MESH.ranks)}
    assert f"WANTED = {wanted}" in text
    assert "MASTER_PORT" not in text, "two repros that run at the same time must not share a port"


def test_gathering_wants_the_whole_tensor_everywhere():
    case = Case("gather", MESH, (5,), (Shard(0), Shard(0)), (Shard(0), Shard(0)))
    assert case.wanted_layout == Layout.replicated(MESH, (5,))
