"""What cannot be planned is refused in one line with a hint, before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardviz.cli import main

HEAD = """
import sys
import torch
from torch import nn
AXES = BATCH_AXES = ("dp",)
MESH = (2,)
def build(): return nn.Linear(8, 8)
def parallelize(model, mesh): pass
def batch(): return torch.zeros(4, 8)
"""

CASES = {
    "a module that is not there": (
        "import nowhere_to_be_found",
        (),
        2,
        "importing mine.py raised ModuleNotFoundError: No module named 'nowhere_to_be_found' (mine.py, line 10: import",
    ),
    "a name that is not there": ("print(meshes)", (), 2, "importing mine.py raised NameError: name 'meshes' is not"),
    "a file that ends Python": ("sys.exit(4)", (), 2, "mine.py raised SystemExit: 4 (mine.py, line 10: sys.exit(4)"),
    "code that ends Python": (
        "def parallelize(model, mesh): sys.exit(3)",
        (),
        3,
        "SystemExit: 3 (mine.py, line 10: def parallelize(model, mesh): sys.exit(3))",
    ),
    "what fails by all means": ("def build(): return open('no.pt')", (), 2, "error: build() raised FileNotFoundError"),
    "FSDP1 without a device": (
        "from torch.distributed.fsdp import FullyShardedDataParallel\n"
        "def parallelize(model, mesh): return FullyShardedDataParallel(model, device_mesh=mesh)",
        (),
        2,
        "Hint: a plan has no GPU: give FullyShardedDataParallel device_id=torch.device(mesh.device_type)",
    ),
    "an element type of a batch": ("", ("--batch", "4,8:int65"), 2, "torch has no element type 'int65'"),
    "an element type of a state": ("", ("--state", "fp32"), 2, "torch has no element type 'fp32'"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_plan_that_cannot_be_made_is_one_line_and_a_hint(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    added, options, code, expected = CASES[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(HEAD + added)
    assert main(["plan", "mine.py", *options]) == code
    said = capfd.readouterr().err
    assert expected in said
    assert "Hint: " in said
    assert "Traceback" not in said
    assert not list(Path().glob("*.shardviz"))
