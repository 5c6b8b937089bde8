"""A step that reads values, which a plan has none of: planned where they do not matter, refused where they do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardviz.cli import main
from tests.lanes import at_night

if TYPE_CHECKING:
    from pathlib import Path

READS = """
import torch
from torch import nn
AXES = BATCH_AXES = ("dp",)
MESH = (2,)
def build(): return nn.Linear(64, 64)
def parallelize(model, mesh): pass
def batch(): return torch.ones(32, 64)
"""

SAME = "it does the same with 0 (integers 0), 1 (integers 100), inf (integers 1), -1 (integers 2)"

READING = {
    "to print it": ("print(loss.item(), bool(loss > 3), loss.tolist())", "", SAME),
    "in a text": ("print(f'{loss:.3f}', '%.2f' % loss)", "", SAME),
    "to compare it": ("print(torch.equal(loss, x), torch.allclose(loss, loss))", "", SAME),
    "to divide by it": (
        "loss = loss / (x > 0).sum().item() + 1 / x.sum().item()",
        "",
        "it does the same with 1 (integers 100), inf (integers 1), -1 (integers 2); with 0 (integers 0) a step run "
        "without values raised ZeroDivisionError: float division by zero (mine.py, line 10:",
    ),
    "to end where it is infinite": (
        "assert loss.item() < 9e9",
        "",
        "1 (integers 100), -1 (integers 2); with inf (integers 1) a step run without values raised AssertionError",
    ),
    "to end always": ("assert loss.item() != loss.item()", "the step reads a value, and a plan has none (mine.py", ""),
    "to go another way": (
        "loss = loss + model(x).sum() if loss > 3 else loss",
        "the step reads a value, and a plan has none (mine.py, line 10: loss = loss + model(x).sum() if loss > 3",
        "",
    ),
    "to go another way in a range": (
        "loss = loss + model(x).sum() if 0.001 < loss < 100 else loss",
        "the step reads a value, and a plan has none (mine.py",
        "",
    ),
    "to go another way below 0": (
        "loss = model(x).sum() if loss < 0 else loss",
        "the step reads a value, and a plan",
        "",
    ),
    "to count": (
        "loss = loss + model(x).sum() if int((x > 0).sum()) > 4 else loss",
        "the step reads a value, and a plan has none (mine.py",
        "",
    ),
    "to wait for it": (
        "while x.max().item() > 10: x = x / 2",
        "the step reads a value, and a plan has none (mine.py",
        "",
    ),
    "as a size": (
        "loss = loss + model(x[:int(loss)]).sum()",
        "the step reads a value, and a plan has none (mine.py, line 10: loss = loss + model(x[:int(loss)]).sum())",
        "",
    ),
    "by numpy": (
        "loss.detach().numpy()",
        "the step reads values by numpy(), and a plan has none (mine.py, line 10: loss.detach().numpy())",
        "",
    ),
    "by dlpack": (
        "torch.from_dlpack(loss.detach())",
        "the step reads values by dlpack, and a plan has none (mine.py, line 10: torch.from_dlpack(loss.detach()))",
        "",
    ),
    "to select": (
        "loss = loss + x[x > loss].sum()",
        "the step reads a value, and a plan has none (mine.py, line 10: loss = loss + x[x > loss].sum())",
        "",
    ),
}


BY_DAY = ("to print it", "to divide by it", "to go another way", "to count", "as a size")


@pytest.mark.parametrize("case", [*BY_DAY, *at_night(case for case in READING if case not in BY_DAY)])
def test_a_value_that_is_read_does_not_matter_or_ends_the_step(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, ends, goes_on = READING[case]
    step = f"def step(model, x, mesh):\n    loss = model(x).sum()\n    {code}\n    loss.backward()\n    return loss"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(READS.lstrip() + step)
    assert main(["plan", "mine.py"]) == 0
    text = " ".join(capfd.readouterr().out.split())
    assert ends in text
    assert goes_on in text
    assert ("planned without activations and collectives" in text) == bool(ends)
    assert ("activations are those at" in text) != bool(ends)
    assert "planned with this rank's own values" not in text


CUSTOM = """
@torch.library.custom_op("mine::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor: return x * 2
def loss(model, x): READ return model(x).sum() + doubled(x).sum()
"""


@pytest.mark.parametrize(
    ("read", "said"),
    [
        ("", "planned with this rank's own values: a step run without values raised"),
        ("len(x.nonzero());", "the step reads a value, and a plan has none (mine.py"),
    ],
)
def test_a_kernel_that_needs_values_gets_them_and_nobody_else(
    read: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(READS + CUSTOM.replace("READ", read))
    assert main(["plan", "mine.py"]) == 0
    assert said in " ".join(capfd.readouterr().out.split())


@pytest.mark.parametrize("call", ["tolist", "numpy"])
def test_a_model_that_was_built_with_values_hands_none_out(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    build = (
        "def build():\n    model = nn.Linear(64, 64)\n    assert float(model.weight.abs().sum()) > 0\n    return model"
    )
    loss = f"def loss(model, x):\n    x.{call}()\n    return model(x).sum()\n"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(READS.replace("def build(): return nn.Linear(64, 64)", build) + loss)
    assert main(["plan", "mine.py"]) == 0
    text = " ".join(capfd.readouterr().out.split())
    assert "so the model is built with its values" in text
    assert f"the step reads values by {call}(), and a plan has none (mine.py, line 13: x.{call}())" in text
