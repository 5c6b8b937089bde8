"""Faults put in around other libraries' loaders, under `shardviz run`: each is named, on the tensor where it was done.

The scripts are those of demos/frameworks, unedited; `faulty.py` harms one weight when the library has loaded it.
"""

import shutil
import sys
from pathlib import Path

import pytest

from shardviz.check.run import check_dump
from tests.frameworks.test_jobs import DEMOS, TORCHRUN, started

FAULTY = Path(__file__).with_name("faulty.py")
QUERY = "model.layers.1.self_attn.q_proj.weight"
EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"
KINDS = {
    "exchanged": "misordered",
    "dealt": "misordered",
    "unstrided": "misordered",
    "strides": "misordered-within-shard",
    "skipped": "foreign",
}
HELD = {
    ("transformers_tp.py", "unstrided"): "[4, 256/tp, 64]",
    ("transformers_ep.py", "dealt"): "[4/2/ep, 64, 64]",
    ("transformers_fsdp2.py tp", "unstrided"): "[64/fsdp/tp, 64]",
}
ROWS = {
    "transformers_tp.py": ("transformers", ((QUERY, "exchanged"), (EXPERTS, "unstrided"), (EXPERTS, "skipped"))),
    "transformers_ep.py": (
        "transformers", ((EXPERTS, "exchanged"), (EXPERTS, "dealt"), (EXPERTS, "strides"), (QUERY, "skipped")),
    ),
    "transformers_fsdp2.py": ("transformers", ((QUERY, "exchanged"), (QUERY, "strides"), (QUERY, "skipped"))),
    "transformers_fsdp2.py tp": ("transformers", ((QUERY, "unstrided"),)),
    "trainer.py": ("accelerate", ((QUERY, "skipped"),)),
    "trainer.py fsdp2": ("accelerate", ((QUERY, "exchanged"), (QUERY, "strides"), (QUERY, "skipped"))),
    "accelerate_fsdp2.py": ("accelerate", ((QUERY, "strides"),)),
    "lightning_2d.py": (
        "lightning", (("model.0.weight", "exchanged"), ("model.2.weight", "strides"), ("model.0.weight", "skipped")),
    ),
    "peft_lora.py": ("torch", ((f"base_model.model.{QUERY.replace('_proj', '_proj.base_layer')}", "strides"),)),
}  # fmt: skip
"""What each job is run with, and the faults that it can have: copies under DDP cannot change places."""
CASES = [(row, library, fault, tensor) for row, (library, faults) in ROWS.items() for tensor, fault in faults]


def run_faulty(folder, row, library, fault, tensor):
    """Run a demo with a fault in it, on four ranks where it has two axes."""
    name, *words = row.split()
    shutil.copy(DEMOS / name, folder)
    how = (*TORCHRUN[:-1], "4") if "tp" in words else TORCHRUN
    job = (sys.executable, *how, str(FAULTY), fault, library, tensor, name, *words)
    return started(folder, [sys.executable, "-m", "shardviz", "run", "-o", "job.shardviz", "--", *job])


@pytest.mark.parametrize(("row", "library", "fault", "tensor"), CASES)
def test_a_fault_in_a_loader_is_named(tmp_path, row, library, fault, tensor):
    needed = {"torch": "peft"}.get(library, library)
    pytest.importorskip(needed, reason=f"needs {needed}: pip install -e '.[frameworks]' {needed}")
    ran = run_faulty(tmp_path, row, library, fault, tensor)
    assert ran.returncode == 1, ran.stderr
    (finding,) = check_dump(tmp_path / "job.shardviz").findings
    assert finding.kind == KINDS[fault]
    assert tensor.replace(".base_layer", "").endswith(finding.tensor)
    if (row, fault) in HELD:
        assert finding.held == HELD[row, fault]
