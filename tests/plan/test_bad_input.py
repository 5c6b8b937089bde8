"""What cannot be planned is refused in one line with a hint, before anything is written."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardviz.cli import main
from tests.lanes import at_night, nightly
from tests.live.worlds import PATIENCE, wait_until

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
    "what is no module": (
        "def parallelize(model, mesh): return [model]",
        (),
        2,
        "error: parallelize() returned list\nHint: return the model, or None",
    ),
    "a second process group": (
        "def parallelize(model, mesh): torch.distributed.init_process_group('gloo')",
        (),
        2,
        "Hint: the ranks are there before parallelize() is called: leave out init_process_group",
    ),
    "a batch without rows": ("", ("--batch", "0,8"), 2, "--batch '0,8' has 0 elements: expected 1 to 1,152,921"),
    "a batch that is too large": ("", ("--batch", f"{10**20},8"), 2, "has 800,000,000,000,000,000,000 elements"),
    "less than no GPUs": ("", ("--gpus", "-3"), 2, "--gpus: '-3' is not a number of GPUs: expected 1 to 1,048,576"),
    "no GPUs": ("", ("--gpus", "0"), 2, "--gpus: '0' is not a number of GPUs: expected 1 to 1,048,576"),
    "too many GPUs": ("", ("--gpus", "9" * 30), 2, "is not a number of GPUs: expected 1 to 1,048,576"),
    "nodes without GPUs": ("", ("--node", "0"), 2, "--node: '0' is not a number of GPUs: expected 1 to 1,048,576"),
    "no memory": ("", ("--gpus", "2", "--memory", "0GB"), 2, "--memory 0GB: no mesh fits in 0 bytes"),
    "no number of bytes": ("", ("--gpus", "2", "--memory", ""), 2, "--memory '' is not a number of bytes with its"),
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


NO_STEP = {
    "a loss that is None": (
        "def loss(model, x): model(x)",
        (),
        "loss() returned None: return the loss, a tensor of one number",
    ),
    "a loss of many numbers": (
        "def loss(model, x): return model(x)",
        (),
        "loss() returned a tensor of shape (2, 8): ret",
    ),
    "a batch that is None": (
        "def batch(): return None",
        (),
        "batch() returned None: return a tensor, or a tuple or dict",
    ),
    "stages without numbers": (
        "def stages(model, mesh): return [model]",
        (),
        "stages() returned list: return this rank's stages, as a dict of modules by their numbers",
    ),
    "a loss on a GPU": (
        "def loss(model, x): return model(x).cuda().sum()",
        (),
        "AssertionError: Torch not compiled with CUDA enabled (mine.py, line 10: def loss(model, x): return "
        "model(x).cuda().sum()): a plan has no GPU",
    ),
    "fewer rows than ranks": ("", ("--batch", "1,8"), "the batch has 1 row for 2 ranks: return at least 2 rows"),
    "numbers that are not those of weights": ("", ("--batch", "4,8:int64"), "addmm() of torch.float32 and torch.int64"),
}
BY_DAY = (
    "a loss that is None",
    "a batch that is None",
    "stages without numbers",
    "numbers that are not those of weights",
)
"""One of each function that a probe may have."""


@pytest.mark.parametrize("case", [*BY_DAY, *at_night(case for case in NO_STEP if case not in BY_DAY)])
def test_a_step_that_cannot_be_made_says_what_to_return_and_the_rest_is_planned(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    added, options, expected = NO_STEP[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(HEAD + added)
    assert main(["plan", "mine.py", *options]) == 0
    text = " ".join(capfd.readouterr().out.split())
    assert "planned without activations and collectives: " in text
    assert expected in text
    assert "parameters 288 B" in text


@pytest.mark.parametrize("backward", [True, *at_night([False])])
def test_a_step_without_a_backward_is_planned_and_noted(
    backward: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    call = "loss.backward()" if backward else ""
    code = f"def step(model, x, mesh):\n    loss = model(x).sum()\n    {call}\n    return loss"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(HEAD + code)
    assert main(["plan", "mine.py"]) == 0
    text = capfd.readouterr().out
    assert ("the step leaves no gradients" not in text) == ("gradients  " in text) == backward


@nightly
def test_what_a_probe_prints_is_not_among_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    printing = "print('one')\ndef parallelize(model, mesh): print('two')\n"
    (tmp_path / "mine.py").write_text(HEAD + printing)
    assert main(["plan", "mine.py"]) == 0
    said = capfd.readouterr()
    assert said.out.startswith("plan of mine.py")
    assert {"one", "two"} < set(said.err.splitlines())


@pytest.mark.parametrize("returned", ["", "return loss.detach()"])
def test_real_ranks_say_that_a_step_has_to_return_the_loss(
    returned: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code = f"def step(model, x, mesh):\n    loss = model(x).square().mean()\n    loss.backward()\n    {returned}"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(HEAD + code)
    status = main(["probe", "mine.py", "--mesh", "1"])
    text = " ".join(capfd.readouterr().err.split())
    assert (
        ("step() returned None Hint: return the loss, a tensor of one number" in text) == (status > 1) == (not returned)
    )


TWO = """
class Two:
    def __init__(self, model): self.parts = [torch.optim.SGD([one]) for one in model.parameters()]
    def step(self): [one.step() for one in self.parts]
"""
REFUSED = {
    "stages() returned list Hint: return this rank's stages": "def stages(model, mesh): return [model]",
    "optimizer() returned Two, which has no state Hint: return one": TWO
    + "def optimizer(model, mesh): return Two(model)",
    "optimizer() has stepped the SGD that it returned, and shardviz steps it Hint: return it without a step": (
        "def optimizer(model, mesh):\n    made = torch.optim.SGD(model.parameters())\n    made.step()\n    return made"
    ),
    "": "def stages(model, mesh): return {0: model}\n"
    "def optimizer(model, mesh): return torch.optim.SGD(model.parameters())",
}


@pytest.mark.parametrize("expected", REFUSED)
def test_real_ranks_say_what_stages_and_an_optimizer_are(
    expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(HEAD + REFUSED[expected])
    status = main(["probe", "mine.py", "--mesh", "1"])
    text = " ".join(capfd.readouterr().err.split())
    assert expected in text
    assert (status > 1) == bool(expected)
    assert "Traceback" not in text


@nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, *at_night([signal.SIGINT, signal.SIGHUP])])
def test_a_plan_that_is_ended_ends_the_ranks_that_it_asks(number: signal.Signals, tmp_path: Path) -> None:
    waiting = (
        "import pathlib, time\ndef parallelize(model, mesh):\n    pathlib.Path('begun').touch()\n    time.sleep(60)"
    )
    (tmp_path / "mine.py").write_text(HEAD + waiting)
    plan = subprocess.Popen(
        [sys.executable, "-m", "shardviz", "plan", "mine.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    wait_until((tmp_path / "begun").exists)
    plan.send_signal(number)
    out, _ = plan.communicate(timeout=PATIENCE)  # as long as a rank runs, it has the other end of stdout
    assert plan.returncode == (130 if number == signal.SIGINT else 128 + number)
    assert not out
    assert not list(tmp_path.glob("*.shardviz*"))


@pytest.mark.parametrize("options", [[], ["--gpus", "4"]])
def test_a_probe_that_is_not_there_is_named_before_torch_is_imported(options: list[str], tmp_path: Path) -> None:
    args = ["plan", "nothere.py", *options]
    code = f"import sys; from shardviz.cli import main; print(main({args!r}), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"
    assert f"cannot read probe {tmp_path / 'nothere.py'}: No such file or directory" in " ".join(done.stderr.split())
