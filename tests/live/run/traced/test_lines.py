"""Jobs under `shardviz run --trace lines=MODULE`: `diff` names the first wrong line, inside the model or around it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from shardviz.cli import main
from tests.lanes import at_night, nightly, recorded
from tests.live.run.jobs import RANKS, environment, skip_what_torch_lacks

SCRIPT = """
import os, sys
import torch
from torch import nn, distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank, size, does = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), sys.argv[1]

def mean_of(values):
    mean = values.mean()
    if size > 1 and does != "whiten":
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return mean

class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        hidden = self.up(x).tanh()
        if does == "mixer" and size > 1:
            hidden = hidden - hidden.mean(0)
        return self.down(hidden)

def loss_of(output, weights):
    return (output.square().mean(1) * weights).mean()

if size > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), Mixer())
whole = model
if size > 1:
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows, rewards = torch.randn(8, 16).chunk(size)[rank], torch.randn(8).chunk(size)[rank]
for step in range(2):
    centered = rewards - mean_of(rewards)
    loss = loss_of(model(rows), centered)
    if does == "times":
        loss = loss * size
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save(whole.state_dict(), f"{does}-{rank}.pt")
if size > 1:
    dist.destroy_process_group()
"""
COMPILED = SCRIPT.replace("def loss_of", '@torch.compile(backend="eager")\ndef loss_of')
"""The same where each rank compiles its loss, for which it imports dynamo: four seconds more of the processor."""


def run(folder, name, *job, traced=("--trace", "lines=1")):
    watched = (sys.executable, "-m", "shardviz", "run", *traced, "-o", name, "--") if traced else ()
    command = (*watched, *job)
    env = environment() | ({} if traced else {"TORCH_COMPILE_DISABLE": "1"})
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False)
    skip_what_torch_lacks(done.stderr)
    assert done.returncode == 0, done.stderr
    assert "hook" not in done.stderr, done.stderr
    return folder / name


def first_difference(capsys, one, other):
    assert main(["diff", "--format", "json", str(one), str(other)]) in (0, 1)
    return next(iter(json.loads(capsys.readouterr().out)["step"]["departures"]), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("lines")
    (path / "train.py").write_text(SCRIPT)
    run(path, "one", sys.executable, "train.py", "right")
    return path


def line_of(text):
    return f"train.py:{SCRIPT.splitlines().index(text) + 1}"


@pytest.mark.parametrize(
    ("does", "text"),
    [
        ("whiten", "    mean = values.mean()"),
        pytest.param("mixer", "            hidden = hidden - hidden.mean(0)", marks=nightly),
    ],
)
def test_a_line_around_the_model_is_named_and_one_in_a_module(capsys, folder, does, text):
    first = first_difference(capsys, folder / "one", run(folder, does, *RANKS, "train.py", does))
    assert line_of(text) in first["sentence"], first


FSDP2 = "from torch.distributed.fsdp import fully_shard\n    [fully_shard(unit) for unit in (model[1], model)]"
FSDP1 = """from torch.distributed.fsdp import FullyShardedDataParallel
    wrap = lambda unit: FullyShardedDataParallel(unit, use_orig_params=True, device_id=torch.device("cpu"))
    model[1] = wrap(model[1])
    model = wrap(model)"""


@pytest.mark.parametrize("units", [FSDP2, *at_night([FSDP1])], ids=["fsdp2", "fsdp1"])
def test_a_line_of_a_module_that_is_a_unit_of_fsdp_is_named(capsys, tmp_path, folder, units):
    (tmp_path / "train.py").write_text(SCRIPT.replace("model = DistributedDataParallel(model)", units))
    first = first_difference(capsys, folder / "one", run(tmp_path, "mixer", *RANKS, "train.py", "mixer"))
    assert "`hidden = hidden - hidden.mean(0)`" in first["sentence"], first
    assert first_difference(capsys, folder / "one", run(tmp_path, "two", *RANKS, "train.py", "right")) is None


@recorded
def test_a_line_that_multiplies_a_loss_whose_gradients_are_averaged_is_named(capsys, folder):
    first = first_difference(capsys, folder / "one", run(folder, "times", *RANKS, "train.py", "times"))
    assert f"{line_of('        loss = loss * size')} `loss = loss * size` is the first wrong line" in first["sentence"]
    assert first["cause_id"] == "scaled-term-line", first


@nightly
def test_a_line_around_the_model_is_named_beside_a_compiled_loss(capsys, tmp_path):
    (tmp_path / "train.py").write_text(COMPILED)
    one = run(tmp_path, "one", sys.executable, "train.py", "right")
    first = first_difference(capsys, one, run(tmp_path, "whiten", *RANKS, "train.py", "whiten"))
    assert line_of("    mean = values.mean()") in first["sentence"], first
    assert first_difference(capsys, one, run(tmp_path, "two", *RANKS, "train.py", "right")) is None


@nightly
def test_a_right_job_agrees_and_computes_what_it_computes_without(capsys, folder):
    assert first_difference(capsys, folder / "one", run(folder, "two", *RANKS, "train.py", "right")) is None
    watched = torch.load(folder / "right-1.pt", weights_only=True)
    run(folder, "plain", *RANKS, "train.py", "right", traced=())
    plain = torch.load(folder / "right-1.pt", weights_only=True)
    assert all(torch.equal(watched[name], plain[name]) for name in plain)


@nightly
def test_without_lines_the_run_that_shows_them_is_named(capsys, folder):
    one = run(folder, "one_again", sys.executable, "train.py", "right", traced=("--trace",))
    two = run(folder, "mixer_again", *RANKS, "train.py", "mixer", traced=("--trace",))
    first = first_difference(capsys, one, two)
    assert first["look"] == "to see the line, run both jobs again with --trace lines=1"


@nightly
def test_halves_of_pairs_that_are_on_different_ranks_are_named(capsys, tmp_path):
    halves = "    chosen, rejected = model(rows).mean(1).chunk(2)"
    loss = f"{halves}\n    loss = -nn.functional.logsigmoid(chosen - rejected).mean()\n"
    pairs = SCRIPT.replace("    loss = loss_of(model(rows), centered)\n", loss)
    (tmp_path / "pairs.py").write_text(pairs)
    together = "torch.cat([half.chunk(size)[rank] for half in torch.randn(8, 16).chunk(2)])"
    (tmp_path / "right.py").write_text(pairs.replace("torch.randn(8, 16).chunk(size)[rank]", together))
    one = run(tmp_path, "one", sys.executable, "pairs.py", "right")
    first = first_difference(capsys, one, run(tmp_path, "pairs", *RANKS, "pairs.py", "right"))
    assert f"pairs.py:{pairs.splitlines().index(halves) + 1}" in first["sentence"], first
    assert first["cause_id"] == "segments-of-part", first
    assert first_difference(capsys, one, run(tmp_path, "together", *RANKS, "right.py", "right")) is None


@nightly
def test_lines_of_rows_that_a_sampler_deals_out_are_compared(capsys, tmp_path):
    labels = """    words = sorted(set("bacdbeda" if does == "right" else "bacdbeda"[rank::size]))
    labels = torch.tensor([words.index(letter) for letter in "bacdbeda"[rank::size]])
    loss = nn.functional.cross_entropy(model(rows), labels)
"""
    dealt = SCRIPT.replace(".chunk(size)[rank]", "[rank::size]")
    (tmp_path / "train.py").write_text(dealt)
    (tmp_path / "labels.py").write_text(dealt.replace("    loss = loss_of(model(rows), centered)\n", labels))
    one = run(tmp_path, "one", sys.executable, "train.py", "right")
    first = first_difference(capsys, one, run(tmp_path, "mixer", *RANKS, "train.py", "mixer"))
    assert line_of("            hidden = hidden - hidden.mean(0)") in first["sentence"], first
    assert first_difference(capsys, one, run(tmp_path, "two", *RANKS, "train.py", "right")) is None
    one = run(tmp_path, "one_labels", sys.executable, "labels.py", "right")
    first = first_difference(capsys, one, run(tmp_path, "labels", *RANKS, "labels.py", "labels"))
    assert first["cause_id"] == "other-labels", first
    assert first_difference(capsys, one, run(tmp_path, "two_labels", *RANKS, "labels.py", "right")) is None


@nightly
def test_a_line_of_what_a_module_keeps_for_the_loss_is_named(capsys, tmp_path):
    mean = """
from torch.distributed.nn.functional import all_reduce

def own_mean(hidden):
    mean = hidden.mean(0)
    return all_reduce(mean) / size if size > 1 and does != "kept" else mean

class Mixer("""
    keeps = "        self.kept = own_mean(hidden).square().sum()\n        return self.down(hidden)"
    text = SCRIPT.replace("\nclass Mixer(", mean).replace("        return self.down(hidden)", keeps)
    text = text.replace("centered)\n    if", "centered) + whole[1].kept\n    if")
    (tmp_path / "train.py").write_text(text)
    one = run(tmp_path, "one", sys.executable, "train.py", "right")
    first = first_difference(capsys, one, run(tmp_path, "kept", *RANKS, "train.py", "kept"))
    assert "`mean = hidden.mean(0)`" in first["sentence"], first
    assert first["cause_id"] == "unaveraged-line", first
    assert first_difference(capsys, one, run(tmp_path, "two", *RANKS, "train.py", "right")) is None
