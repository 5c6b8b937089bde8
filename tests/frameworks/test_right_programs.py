"""Right programs of many kinds under `shardviz run`: no finding, and of what is not checked a true reason."""

import sys
from pathlib import Path

import pytest

from shardviz.check.run import check_dump
from tests.frameworks.test_jobs import TORCHRUN, started

PROGRAMS = Path(__file__).with_name("programs.py")
ALIKE = "all of its values are equal, as in a new LayerNorm, so any order of its elements looks right"
REASONS = {
    "checkpointed_and_tied": {ALIKE},
    "mixed_precision": {ALIKE},
    "frozen_layers": {ALIKE},
    "offloaded": {ALIKE},
    "split_by_columns": {ALIKE},
    "sent_by_rank_0": {ALIKE},
    "rotary_scaled_afterwards": {ALIKE, "every rank computed it again after it was sharded, with equal results"},
    "compiled": {ALIKE},
    "lora_on_tensor_parallel": set(),  # adapters are whole copies, which are compared
    "quantized_base": {ALIKE, "it is a torchao.Int8Tensor, which keeps them in qdata, scale, zero_point"},
    "teacher_and_student": {ALIKE},
    "sent_to_all_before": {ALIKE},
}
"""What is said of the tensors that are not checked: norms of ones, above all."""
NEEDS = {"lora_on_tensor_parallel": "peft", "quantized_base": "torchao"}


@pytest.mark.parametrize("name", REASONS)
def test_a_right_program_raises_no_alarm(tmp_path, name):
    for needed in ("transformers", NEEDS.get(name, "transformers")):
        pytest.importorskip(needed, reason=f"needs {needed}: pip install {needed}")
    job = (sys.executable, *TORCHRUN, str(PROGRAMS), name)
    ran = started(tmp_path, [sys.executable, "-m", "shardviz", "run", "-o", "job.shardviz", "--", *job])
    assert ran.returncode == 0, ran.stderr
    report = check_dump(tmp_path / "job.shardviz")
    assert not report.findings
    assert {_reason(one.why) for one in report.not_checked} == REASONS[name]


def _reason(why):
    return why.removeprefix("where ").removeprefix("its elements are: ").removeprefix("its elements: ")
