"""The jobs of demos/frameworks under `shardviz run`: right ones are all in order, and a live bug is named.

Runs where the libraries are installed; they are no dependency.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardviz.check.run import check_dump
from tests.live.run.jobs import without_aborts

DEMOS = Path(__file__).parents[2] / "demos" / "frameworks"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


def run(folder, name, *words, command=TORCHRUN):
    shutil.copy(DEMOS / name, folder)
    job = (sys.executable, *command, name, *words)
    return started(folder, [sys.executable, "-m", "shardviz", "run", "-o", "job.shardviz", "--", *job])


def started(folder, command):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return without_aborts(
        lambda: subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False
        ),
        folder,
    )


def test_a_mixtral_under_transformers_own_plan_is_in_order(tmp_path):
    pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[frameworks]'")
    ran = run(tmp_path, "transformers_tp.py")
    assert ran.returncode == 0, ran.stderr
    assert "all 23 tensors are in order" in ran.stdout


def test_a_plan_that_labels_fused_experts_as_one_dim_is_named(tmp_path):
    pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[frameworks]'")
    ran = run(tmp_path, "transformers_tp.py", "wrong")
    assert ran.returncode == 1, ran.stderr
    (finding,) = check_dump(tmp_path / "job.shardviz").findings
    assert (finding.kind, finding.claimed, finding.held) == ("misordered", "[4, 256/tp, 64]", "[4, 256/2/tp, 64]")


def test_copies_under_the_trainer_are_in_order(tmp_path):
    pytest.importorskip("accelerate", reason="needs accelerate: pip install -e '.[frameworks]'")
    ran = run(tmp_path, "trainer.py")
    assert ran.returncode == 0, ran.stderr
    assert "all 23 tensors are in order" in ran.stdout


def test_lightnings_model_parallel_strategy_is_in_order(tmp_path):
    pytest.importorskip("lightning", reason="needs lightning: pip install lightning")
    ran = run(tmp_path, "lightning_2d.py", command=())
    assert ran.returncode == 0, ran.stderr
    assert "float32[32/tensor_parallel/data_parallel, 16]" in ran.stdout
    assert "all 4 tensors are in order" in ran.stdout


CALLBACKS = {
    "trainer.py": ("=tokens)", "=tokens, callbacks=[shardviz.TrainerCallback('one.shardviz')])"),
    "lightning_2d.py": ("max_steps=2,", "max_steps=2, callbacks=[shardviz.LightningCallback('one.shardviz')],"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "library"), [("trainer.py", "accelerate"), ("lightning_2d.py", "lightning")])
def test_one_line_with_a_callback_writes_the_same(tmp_path, name, library):
    pytest.importorskip(library, reason=f"needs {library}: pip install {library}")
    before, after = CALLBACKS[name]
    script = (DEMOS / name).read_text()
    assert before in script
    (tmp_path / name).write_text("import shardviz\n" + script.replace(before, after))
    how = TORCHRUN if name == "trainer.py" else ()
    job = [sys.executable, *how, name]
    done = started(tmp_path, job)
    assert done.returncode == 0, done.stderr
    report = check_dump(tmp_path / "one.shardviz")
    assert not report.findings
    assert not report.not_checked
