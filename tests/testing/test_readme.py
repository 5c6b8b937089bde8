"""The test that the README shows: it passes, under pytest-xdist too, and fails readably when a placement is changed."""

import re

import pytest

from tests.lanes import nightly
from tests.testing.sessions import ROOT, run, run_alone

(SHOWN,) = re.findall(r"```python test_mine.py\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
TEST = "test_weights_are_split_over_fsdp"


def test_the_readmes_test_passes_and_is_short(tmp_path):
    assert len([line for line in SHOWN.splitlines() if line]) <= 12
    assert run(tmp_path, SHOWN).ends == {TEST: "PASSED"}


@nightly
def test_it_runs_in_a_process_of_its_own_under_xdist(tmp_path):
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    seen = run_alone(tmp_path, SHOWN, "-n1")
    assert re.search(rf"PASSED .*{TEST}", seen.text), seen.text


def test_it_fails_readably_when_one_placement_is_changed(tmp_path):
    told = run(tmp_path, SHOWN.replace('"[*/fsdp, *]"', '"[*, */fsdp]"')).section(TEST)
    assert '>       assert_layout(model, {"weight": "[*, */fsdp]", "bias": "[*/fsdp]"})\n' in told
    lines = [line.removeprefix("E").strip() for line in told.splitlines() if line.startswith("E")]
    first = "shardviz.testing.ShardAssertionError: weight: 4 of 4 ranks claim float32[8/fsdp, 16], not the intended "
    assert lines[:5] == [
        f"{first}[*, */fsdp]",
        "ranks     0-3",
        "claimed   float32[8/fsdp, 16]",
        "held      float32[8/fsdp, 16]",
        "intended  [*, */fsdp]",
    ]
    assert lines[-2] == "fix       place it by (Shard(1),), or expect [8/fsdp, 16]"
    assert "ranks 1-3: the same" in told
