"""Two unedited jobs under `shardviz run --trace`, one of them a single process: where they part is named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.contract import recording
from tests.lanes import at_night, nightly
from tests.live.run.jobs import environment, skip_what_torch_lacks

SCRIPT = Path(__file__).with_name("train.py")


@dataclass(frozen=True)
class Job:
    """A job beside one of a single process.

    Attributes:
        mesh: Its mesh.
        way: How it is sharded.
        does: What it does, right or wrong.
        alone: What the job of one process does.
        place: The first thing that is wrong, as `diff` names it; empty where the job is right.
        words: Words that name the cause.
    """

    mesh: str
    way: str
    does: str = ""
    alone: str = ""
    place: str = ""
    words: tuple[str, ...] = ()

    @property
    def num_ranks(self):
        number = 1
        for axis in self.mesh.split(","):
            number *= int(axis.split("=")[1])
        return number

    def __str__(self):
        return " ".join(filter(None, (self.mesh, self.way, self.does)))


FAULTS = [
    Job("dp=2,tp=2", "hand", "unsummed", place="layers.1.mlp", words=("nothing sums the terms", "down.bias")),
    Job("dp=2,tp=2", "hand", "bias", place="layers.1.mlp", words=("layers.1.mlp.down.bias", "2 times")),
    Job("dp=2,tp=2", "hand", "heads", place="layers.1.attn", words=("after layers.1.attn.qkv",)),
    Job("dp=2,tp=2", "hand", "detached", place="layers.1.mlp", words=("layers.1.mlp cuts the graph",)),
    Job("dp=2,tp=2", "hand", "scaled", place="layers.1.mlp.up.weight", words=("2 times",)),
    Job("dp=4", "ddp", "unreduced", place="layers.1.norm2.weight", words=("wraps this parameter over",)),
    Job("dp=4", "ddp", "by_rank", place="layers.1.norm2.weight", words=("scaled by 1 on rank 0, 2 on rank 1",)),
    Job("dp=2", "ddp", "closure+unreduced", "closure", "layers.1.norm2.weight", ("wraps this parameter over",)),
    Job("dp=2", "ddp", "outside", "outside", "Scale.log_scale", ("wraps this parameter over",)),
    Job("dp=2", "ddp", "unfrozen", place="layers.1.norm2.weight", words=("it was unfrozen later",)),
    Job("dp=2", "ddp", "unequal", "unequal", "loss", ("mean of means",)),
    Job("dp=2", "ddp", "unequal+places", "unequal+places", "loss", ("mean of means", "Each rank divides")),
    Job("dp=2", "ddp", "unequal+in_model+parts", "unequal+in_model+parts", "loss", ("Each micro-batch divides",)),
    Job("dp=2", "ddp", "own_scale", place="loss", words=("2 on rank 0, 4 on rank 1", "not the shares")),
    Job("tp=2", "hand", "drop_seeds", "drop_seeds", "layers.0.drop", ("seeded differently",)),
    Job("dp=2", "fsdp", "parts+undivided_parts", "", "the model itself", ("2 times", "micro-batches")),
    Job("dp=2", "ddp", "other_seed", place="embed.weight", words=("already before the step", "seed")),
    Job("dp=2", "ddp", "other_rows", place="", words=("rank 0", "rows that the other job's batch doesn't have")),
    Job("pp=2", "pp", "stage", place="layers.1.mlp.down", words=("2 times",)),
    Job("pp=2", "pp", "overlap", place="layers.1", words=("Two stages run layers.1",)),
    Job("tp=2", "hand", "unsummed+bfloat16", "bfloat16", "layers.1.mlp", ("nothing sums the terms",)),
]
RIGHT = [
    Job("dp=2,tp=2", "hand"),
    Job("tp=4", "hand"),
    Job("dp=4", "ddp"),
    Job("dp=2,tp=2", "fsdp"),
    Job("replicate=2,shard=2", "fsdp"),
    Job("dp=2", "fsdp", "parts"),
    Job("dp=2", "ddp", "in_model+parts", "in_model+parts"),
    Job("dp=2", "ddp", "interleaved"),
    Job("dp=2", "ddp", "weighted", "weighted"),
    Job("dp=2", "ddp", "closure", "closure"),
    Job("dp=2", "ddp", "outside+reduced", "outside"),
    Job("dp=2,tp=2", "fsdp", "checkpointed"),
    Job("dp=2,tp=2", "hand", "bfloat16", "bfloat16"),
    Job("pp=2", "pp"),
    Job("dp=2", "fsdp", "bfloat16+parts", "bfloat16"),
]


TWO_RIGHT = [
    (Job("tp=2", "hand"), Job("dp=2,tp=2", "hand")),
    (Job("dp=2", "fsdp"), Job("tp=2", "hand")),
    (Job("dp=2", "ddp", "interleaved"), Job("dp=4", "ddp", "interleaved")),
    (Job("dp=2", "fsdp", "parts"), Job("dp=4", "ddp")),
    (Job("dp=2,tp=2", "hand"), Job("pp=2", "pp")),
    (Job("dp=2", "fsdp", "bfloat16"), Job("tp=2", "hand", "bfloat16")),
]
TWO_APART = [
    (
        Job("tp=2", "hand"),
        Job("dp=2,tp=2", "hand", "unsummed", place="layers.1.mlp", words=("the second run", "nothing sums the terms")),
    ),
    (
        Job("dp=2,tp=2", "hand", "unsummed", place="layers.1.mlp", words=("the first run", "nothing sums the terms")),
        Job("dp=2", "fsdp"),
    ),
    (
        Job("dp=4", "ddp", "unreduced", place="layers.1.norm2.weight", words=("the first run", "wraps this parameter")),
        Job("dp=2", "fsdp"),
    ),
    (Job("dp=2", "ddp"), Job("dp=2", "fsdp", "other_seed", place="embed.weight", words=("already before the step",))),
]


def run(folder, name, *job, step=1, lines=""):
    options = ("--trace", *lines.split(), "--trace-step", str(step), "-o", str(folder / name))
    command = (sys.executable, "-m", "shardviz", "run", *options, "--", *job)
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=240, check=False
    )
    skip_what_torch_lacks(done.stderr)
    assert "traced a step into" in done.stderr, done.stderr
    return folder / name


def diff(one, other):
    """Return the differences of two jobs' steps and what was not compared, as `shardviz diff` prints them."""
    command = (sys.executable, "-m", "shardviz", "diff", "--format", "json", str(one), str(other))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, 1), done.stderr
    recording.add_diff(one, other)
    return json.loads(done.stdout)["step"], done


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the dump of the job of one process, by what it does."""
    folder, made = tmp_path_factory.mktemp("alone"), {}

    def of(does):
        if does not in made:
            made[does] = run(folder, f"one-{len(made)}", sys.executable, str(SCRIPT), "", "one", does)
        return made[does]

    return of


def step_of(alone, folder, job):
    step, _ = diff(alone(job.alone), run_on_ranks(folder, "many", job))
    return step


def check_fault(alone, folder, job):
    first = step_of(alone, folder, job)["departures"][0]
    said = f"{first['sentence']} {first['why']}"
    assert (first["module"] or job.place) == job.place, said
    assert all(word in said for word in job.words), said


@nightly  # tests/check/step/test_jobs.py judges traces every day
def test_the_first_wrong_module_of_a_job_is_named(alone, tmp_path):
    check_fault(alone, tmp_path, Job("tp=2", "hand", "unsummed", "", "layers.1.mlp", ("nothing sums the terms",)))


@nightly
@pytest.mark.parametrize("job", FAULTS, ids=str)
def test_faults_are_found_at_their_place(alone, tmp_path, job):
    check_fault(alone, tmp_path, job)


@nightly
@pytest.mark.parametrize("job", RIGHT, ids=str)
def test_right_jobs_agree(alone, tmp_path, job):
    step, done = diff(alone(job.alone), run_on_ranks(tmp_path, "many", job))
    assert json.loads(done.stdout)["not_compared"] == []  # so that --strict ends with 0
    assert step["departures"] == []
    assert step["num_compared"] > 40
    assert step["not_compared"] == []


@nightly
@pytest.mark.parametrize("does", ["compiled", "compiled_whole", "compiled_whole+by_rank"])
def test_a_compiled_job_is_compared_by_its_gradients(alone, tmp_path, does):
    step = step_of(alone, tmp_path, Job("dp=2", "ddp", does))
    assert ["TORCH_COMPILE_DISABLE=1" in one["why"] for one in step["not_compared"]] == [True]
    said = [f"{one['module']}: {one['sentence']} {one['why']}" for one in step["departures"]]
    if "by_rank" not in does:
        assert said == []
        return
    assert len(said) == 1
    assert said[0].startswith("layers.1.norm2.weight: ")
    assert "scaled by 1 on rank 0, 2 on rank 1" in said[0]
    assert "the other ranks, which are right" in said[0]
    assert "wraps this parameter" not in said[0]


def run_on_ranks(folder, name, job, step=1):
    ranks = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(job.num_ranks))
    return run(folder, name, *ranks, str(SCRIPT), job.mesh, job.way, job.does, step=step)


@pytest.mark.parametrize("does", at_night(["autocast", "autocast+other_rows"]))
def test_rounding_in_the_step_before_the_traced_one_moves_weights_apart_by_little(tmp_path, does):
    one = run(tmp_path, "one", sys.executable, str(SCRIPT), "", "one", "autocast", step=2)
    step, _ = diff(one, run_on_ranks(tmp_path, "many", Job("dp=2", "ddp", does), step=2))
    if does == "autocast":
        assert step["departures"] == []
        assert any("rounding decides where an optimizer moves" in each["why"] for each in step["not_compared"])
    else:
        assert "before the traced one moved" in step["departures"][0]["why"]


@nightly
@pytest.mark.parametrize(
    ("does", "words"), [("unreduced", "before the traced one moved"), ("other_seed", "with different seeds")]
)
def test_a_step_before_the_traced_one_is_told_from_other_weights(tmp_path, does, words):
    one = run(tmp_path, "one", sys.executable, str(SCRIPT), "", "one", "", step=2)
    step, _ = diff(one, run_on_ranks(tmp_path, "many", Job("dp=2", "ddp", does), step=2))
    assert "already before the step" in step["departures"][0]["sentence"]
    assert words in step["departures"][0]["why"]


@nightly
@pytest.mark.parametrize("pair", TWO_RIGHT, ids=lambda pair: f"{pair[0]} beside {pair[1]}")
def test_right_jobs_on_several_ranks_agree(tmp_path, pair):
    step, done = diff(*(run_on_ranks(tmp_path, name, job) for name, job in zip(("one", "other"), pair, strict=True)))
    assert step["departures"] == []
    assert step["num_compared"] > 40
    assert step["not_compared"] == []
    assert done.returncode == 0, done.stdout


@nightly
@pytest.mark.parametrize("pair", TWO_APART, ids=lambda pair: f"{pair[0]} beside {pair[1]}")
def test_what_one_of_two_jobs_on_several_ranks_does_wrong_is_named(tmp_path, pair):
    step, _ = diff(*(run_on_ranks(tmp_path, name, job) for name, job in zip(("one", "other"), pair, strict=True)))
    first, wrong = step["departures"][0], next(job for job in pair if job.place)
    said = f"{first['sentence']} {first['why']}"
    assert first["module"] == wrong.place, said
    assert all(word in said for word in wrong.words), said
    assert first["kind"] != "sharded" or "Which of the two is right they do not show" in said


@nightly
def test_dropout_of_two_jobs_is_not_a_fault(alone, tmp_path):
    step = step_of(alone, tmp_path, Job("tp=2", "hand", "drop", "drop_seeds"))
    assert step["departures"] == [] or "seeded" not in step["departures"][0]["why"]


@nightly
def test_two_jobs_of_one_process_are_compared(alone, tmp_path):
    other = run(tmp_path, "other", sys.executable, str(SCRIPT), "", "one", "scaled")
    step, _ = diff(alone(""), other)
    assert [one["module"] for one in step["departures"]] == ["layers.1.mlp.up.weight"]
    same = shutil.copytree(alone(""), tmp_path / "same")
    step, done = diff(alone(""), same)
    assert step["departures"] == []
    assert done.returncode == 0


BROKEN_OFF = """
import sys
import torch
from torch import nn

def fail(*_):
    raise RuntimeError("out of memory")


class Model(nn.Sequential):
    def forward(self, x, numbers):
        return super().forward(x)


torch.manual_seed(0)
model = Model(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if "forward" in sys.argv:
    model[1].register_forward_pre_hook(fail)
model(torch.randn(8, 8), torch.arange(8)).square().mean().backward()
if "reduction" in sys.argv:
    model[0].weight.grad *= 2
    raise RuntimeError("a reduction failed")
optimizer.step()
"""


@nightly
@pytest.mark.parametrize("place", ["forward", "reduction"])
def test_what_a_job_did_not_come_to_before_it_raised_is_not_judged(place, tmp_path):
    (tmp_path / "train.py").write_text(BROKEN_OFF)
    one, other = (run(tmp_path, name, sys.executable, "train.py", *does) for name, does in (("a", ()), ("b", [place])))
    step, _ = diff(one, other)
    assert step["departures"] == []
    assert "gradients of weights: the job raised RuntimeError before an optimizer stepped" in str(step["not_compared"])


@nightly
def test_a_picture_of_steps_that_begin_with_other_weights_is_refused_with_their_names(tmp_path):
    (tmp_path / "train.py").write_text(BROKEN_OFF)
    (tmp_path / "seeded.py").write_text(BROKEN_OFF.replace("seed(0)", "seed(1)"))
    one, other = (run(tmp_path, name, sys.executable, f"{name}.py") for name in ("train", "seeded"))
    command = (sys.executable, "-m", "shardviz", "diff", str(one), str(other), "-o", str(tmp_path / "x.html"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "these differ from the start: " in done.stderr
    assert "weights differ already before the step" in done.stderr


WATCHED = """
import sys
import torch
from torch import distributed as dist, nn
from torch.distributed.fsdp import fully_shard
import shardviz

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
shardviz.watch(model, sys.argv[1], trace="all")
rows, at, size = torch.randn(8, 8), 0, 1
if sys.argv[1] != "one":
    dist.init_process_group("gloo")
    at, size = dist.get_rank(), dist.get_world_size()
    fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(rows.chunk(size)[at]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if size > 1:
    dist.barrier()
    dist.destroy_process_group()
"""


@nightly
def test_a_line_in_a_script_follows_a_step_too(tmp_path):
    (tmp_path / "job.py").write_text(WATCHED)
    ranks = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "job.py", "two")
    for words in (("job.py", "one"), ranks):
        command = (sys.executable, *words)
        subprocess.run(command, cwd=tmp_path, env=environment(), check=True, capture_output=True, timeout=240)
    step, _ = diff(tmp_path / "one", tmp_path / "two")
    assert (step["departures"], step["not_compared"]) == ([], [])
    assert step["num_compared"] == 22
