"""Probes on real gloo ranks: what is captured is what is there."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardviz.cli import main
from shardviz.errors import ProbeError, RankError
from shardviz.layout.notation import parse, write
from shardviz.live.probe import load_probe
from tests.lanes import at_night, nightly
from tests.live.probing import run_probe
from tests.live.worlds import PATIENCE, wait_until

PROBES = Path(__file__).parents[2] / "probes"


@nightly
def test_hybrid_shard_cuts_a_10x10_weight_into_four_shards_of_25(tmp_path):
    (weight,) = run_probe("hsdp_fsdp1", "2,4", tmp_path / "dump").at("stamped")
    assert write(weight.claimed, equal=True) == "[flat(10, 10)/shard] =replicate"
    assert [str(weight.shards[rank].held) for rank in range(8)] == ["[0:25]", "[25:50]", "[50:75]", "[75:100]"] * 2


def test_left_to_right_labels_say_fsdp_first_where_the_data_is_tp_first(tmp_path):
    model = run_probe("bugs/left_to_right_2d", "2,4", tmp_path / "dump")
    (weight,) = model.at("stamped")
    assert write(weight.claimed) == "[12/fsdp/tp, 12]"
    held = parse("[12/tp/fsdp, 12]").layout(model.files.mesh)
    assert {rank: shard.held for rank, shard in weight.shards.items()} == dict(held.regions())
    assert model.files.ranks[0].not_checked == (
        ("weight", "full_tensor was not run: rank 3's shard is [2, 12], and its placements claim [0, 12]"),
    )


def test_probes_import_torch_by_its_public_names():
    private = re.compile(r"(from|import) (shardviz\.live|torch.*[. ]_)")
    lines = [line for path in PROBES.rglob("*.py") for line in path.read_text(encoding="utf-8").splitlines()]
    assert {line for line in lines if private.match(line)} == {
        "from shardviz.live.compat.meshes import flatten_mesh  # mesh._flatten(): torch has no public name for it",
        "from torch.distributed.tensor.placement_types import _StridedShard  # torch has no public name for it",
    }


def test_a_model_in_bfloat16_only_is_stamped_a_digit_a_pass(tmp_path):
    probe = tmp_path / "narrow.py"
    probe.write_text(
        "import torch\n"
        "from torch import nn\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "def build():\n"
        "    return nn.Linear(40, 30)\n"
        "def parallelize(model, mesh):\n"
        "    fully_shard(model.to(torch.bfloat16), mesh=mesh)\n"
    )
    model = run_probe(str(probe), "fsdp=4", tmp_path / "dump")
    for tensor in model.at("stamped"):
        assert tensor.dtype == "bfloat16"
        assert {rank: shard.held for rank, shard in tensor.shards.items()} == dict(tensor.claimed.regions())


def test_ties_and_missing_gradients_are_noted(tmp_path):
    probe = tmp_path / "tied.py"
    probe.write_text(
        "from torch import nn\n"
        "def build():\n"
        "    model = nn.ModuleDict({'embed': nn.Embedding(4, 2), 'head': nn.Linear(2, 4, bias=False)})\n"
        "    model['head'].weight = model['embed'].weight\n"
        "    return model\n"
        "def parallelize(model, mesh): ...\n"
    )
    model = run_probe(str(probe), "dp=2", tmp_path / "dump")
    assert [stamp.tied_to for stamp in model.files.run.stamps] == ["", "embed.weight"]
    assert model.files.ranks[1].tied == (("embed.weight", "head.weight"),)
    assert model.tensors[0].first.body.grad == "none"


STEPPED = """
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
def build(): return nn.Linear(4, 4)
def parallelize(model, mesh): fully_shard(model, mesh=mesh)
def batch(): return torch.randn(8, 4)
"""


def test_an_error_on_one_rank_within_the_step_is_that_ranks_and_is_not_waited_for(tmp_path):
    probe = tmp_path / "mine.py"
    probe.write_text(
        STEPPED
        + "BATCH_AXES = ('fsdp',)\n"
        + "def loss(model, rows):\n"
        + "    if distributed.get_rank() == 1 and len(rows) < 8: raise ValueError('my own bug on rank 1')\n"
        + "    return model(rows).square().mean()\n"
    )
    with pytest.raises(RankError, match=r"rank 1 \(fsdp=1\) raised ValueError: my own bug on rank 1") as raised:
        run_probe(str(probe), "fsdp=2", tmp_path / "dump", alone=True)
    frames = re.findall(r'File "(.*)", line', raised.value.traceback_text)
    assert [Path(file).name for file in frames] == ["mine.py"]


def test_a_batch_that_no_axis_splits_leaves_reductions_unchecked_and_says_so(tmp_path):
    probe = tmp_path / "mine.py"
    probe.write_text(STEPPED)
    model = run_probe(str(probe), "fsdp=2", tmp_path / "dump")
    assert model.files.ranks[0].not_checked == (
        (
            "",
            "reductions over fsdp: every rank saw the same batch; in the probe, BATCH_AXES = ('fsdp',) splits its rows",
        ),
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, *at_night([signal.SIGHUP])])
def test_a_probe_that_is_terminated_leaves_nothing_half_written(tmp_path, number):
    folder, reached = tmp_path / "work", tmp_path / "reached"
    folder.mkdir()
    probe = folder / "mine.py"
    stays = f"def parallelize(model, mesh): open({str(reached)!r}, 'w').close() or __import__('time').sleep(600)\n"
    probe.write_text(STEPPED + stays)
    command = [sys.executable, "-m", "shardviz", "probe", str(probe), "--mesh", "fsdp=2", "-o", str(folder / "dump")]
    command += ["--timeout", "600"]  # on a busy machine ranks' own limit may come before the signal
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        wait_until(reached.exists)
        assert list(folder.glob(".dump.*.tmp"))
        running.send_signal(number)
        assert running.wait(PATIENCE) == 128 + number
    assert [path.name for path in folder.iterdir() if path.name != "__pycache__"] == ["mine.py"]


EXPECTED = "the layout expected for 'weight'"
UNREADABLE = [
    ('{"weight": "[*/fsdp, *"}', f"{EXPECTED}: layout '[*/fsdp, *': expected ',' or ']' at column 11"),
    ('{"weight": ("fsdp", None)}', f"{EXPECTED} is a tuple, not text\nHint: write a layout as text"),
    ('"[*/fsdp, *]"', "expect is a str, not a dictionary of layouts by name\n"),
]


@pytest.mark.parametrize(("expect", "said"), UNREADABLE)
def test_an_expectation_that_is_none_is_the_probes_mistake_and_leaves_no_dump(expect, said, tmp_path, capsys):
    probe = tmp_path / "mine.py"
    probe.write_text(f"{STEPPED}AXES = ('fsdp',)\nexpect = {expect}\n")
    assert main(["probe", str(probe), "--mesh", "2", "-o", str(tmp_path / "dump")]) == 2
    assert f"shardviz: error: {said}" in capsys.readouterr().err
    assert not (tmp_path / "dump").exists()


def test_a_file_that_names_no_axes_is_reported_how_its_mesh_is_called(tmp_path, capsys):
    probe = tmp_path / "mine.py"
    probe.write_text(STEPPED)
    assert main(["probe", str(probe), "--mesh", "2", "-o", str(tmp_path / "dump")]) == 0
    said = "the mesh axes are called dim0: to name them, define AXES in mine.py, or write --mesh NAME=2\n"
    assert said in capsys.readouterr().err


def test_a_hook_under_another_name_is_not_passed_over_in_silence(tmp_path, capsys):
    probe = tmp_path / "mine.py"
    probe.write_text(f"{STEPPED.replace('batch()', 'bacth()')}AXES = ('fsdp',)\n")
    assert main(["probe", str(probe), "--mesh", "2", "-o", str(tmp_path / "dump")]) == 0
    assert "nothing uses bacth in mine.py: did you mean batch?\n" in capsys.readouterr().err


def test_a_default_folder_is_replaced_by_the_next_run_and_by_nothing_else(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("from torch import nn\ndef build(): return nn.Linear(2, 2)\ndef parallelize(*_): ...\n")
    assert main(["probe", "mine.py", "--mesh", "fsdp=2"]) == 0
    before = Path("mine-2.shardviz/run.json").stat().st_ino
    assert main(["probe", "mine.py", "--mesh", "fsdp=2"]) == 0
    assert Path("mine-2.shardviz/run.json").stat().st_ino != before
    capsys.readouterr()
    for other in (["mine.py", "--mesh", "dp=2"], ["mine.py", "--mesh", "fsdp=2", "-o", "mine-2.shardviz"]):
        assert main(["probe", *other]) == 2
        assert "mine-2.shardviz exists: probe mine.py wrote it on mesh (fsdp=2)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "call"),
    [
        ("build(config)", "build()"),
        ("parallelize(model)", "parallelize(model, mesh)"),
        ("batch(size)", "batch()"),
        ("build(config=None)", ""),
        ("parallelize(*parts)", ""),
    ],
)
def test_a_function_that_cannot_be_called_as_a_probes_is_named_before_it_is(tmp_path, function, call):
    functions = {"build": "build()", "parallelize": "parallelize(model, mesh)"} | {function.partition("(")[0]: function}
    path = tmp_path / "mine.py"
    path.write_text("".join(f"def {signature}: ...\n" for signature in functions.values()))
    if not call:
        assert load_probe(path).build() is None
        return
    with pytest.raises(ProbeError) as caught:
        load_probe(path)
    assert f"{function} cannot be called as {call}: " in caught.value.message
    assert caught.value.hint == f"define {call}"
