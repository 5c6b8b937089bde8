"""`shardviz stamp-checkpoint FILE.py:build`: a copy of a checkpoint that does not exist yet."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from shardviz.cli import main
from shardviz.live.capture.stamp import values_of
from shardviz.stamping.fill import Fill

MODEL = """
import torch
from torch import nn

def make():
    model = nn.ModuleDict({"embed": nn.Embedding(40, 8), "norm": nn.BatchNorm1d(8)})
    model["head"] = nn.Linear(8, 40, bias=False)
    model["head"].weight = model["embed"].weight
    return model.to(torch.bfloat16)

def large():
    return nn.Linear(1 << 20, 1 << 20)

def reads_values():
    model = nn.Linear(4, 4)
    assert model.weight.sum().item() == model.weight.sum().item()
    return model

def none():
    pass
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path / "model.py"


def test_a_model_is_built_on_meta_and_loads_its_copy(file, tmp_path, capsys):
    assert main(["stamp-checkpoint", f"{file}:make", "-o", str(tmp_path / "stamped")]) == 0
    values = load_file(tmp_path / "stamped" / "model.safetensors")
    assert torch.equal(values["embed.weight"], values_of(Fill("embed.weight", (40, 8), "bfloat16")))
    assert torch.equal(values["embed.weight"], values["head.weight"])
    assert values["norm.num_batches_tracked"] == 1
    assert "equal in the original, and so in the copy: head.weight as embed.weight" in capsys.readouterr().out


def test_a_model_that_reads_values_while_it_is_built_is_built_with_values(file, tmp_path):
    assert main(["stamp-checkpoint", f"{file}:reads_values", "-o", str(tmp_path / "s.safetensors")]) == 0
    assert np.shape(load_file(tmp_path / "s.safetensors")["weight"]) == (4, 4)


def test_a_probe_is_a_model_too(tmp_path):
    assert main(["stamp-checkpoint", "tp_fsdp", "-o", str(tmp_path / "s.safetensors")]) == 0
    assert "up.weight" in load_file(tmp_path / "s.safetensors")


def test_a_terabyte_is_refused_before_it_is_made(file, tmp_path, capsys):
    assert main(["stamp-checkpoint", f"{file}:large", "-o", str(tmp_path / "s.safetensors")]) == 2
    assert "takes 4 TiB, and" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("model.py", "has no build()\nHint: name the function that returns the model: "),
        ("model.py:none", "none() returned NoneType, not a module\nHint: return the model"),
        ("model.py:nope", "has no nope()"),
        ("models.py:make", "does not exist\nHint: "),
        ("tp_fsbp", "unknown probe 'tp_fsbp', and no checkpoint is there\nHint: did you mean tp_fsdp?"),
        ("broken.py", "raised ZeroDivisionError: division by zero\nHint: "),
        ("raises.py", "build() raised ValueError: no\nHint: "),
    ],
)
def test_what_is_no_model_is_one_line_and_a_hint(file, tmp_path, capsys, source, told):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "raises.py").write_text("def build():\n    raise ValueError('no')\n")
    where = str(tmp_path / source) if ".py" in source else source
    assert main(["stamp-checkpoint", where, "-o", str(tmp_path / "s.safetensors")]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "s.safetensors").exists()


def test_only_weights_that_a_file_can_hold_are_written(tmp_path, capsys):
    (tmp_path / "m.py").write_text(
        "import torch\nfrom torch import nn\n\ndef build():\n    model = nn.Linear(2, 2)\n"
        "    model.register_buffer('c', torch.zeros(2, dtype=torch.complex64))\n    return model\n"
    )
    assert main(["stamp-checkpoint", str(tmp_path / "m.py"), "-o", str(tmp_path / "s.safetensors")]) == 2
    assert "a safetensors file cannot hold complex64" in capsys.readouterr().err
