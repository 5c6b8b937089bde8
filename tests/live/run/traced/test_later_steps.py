"""What comes of a traced step: the weights after it, and what later steps are given; and steps in mixed precision."""

from __future__ import annotations

import sys

import pytest

from tests.lanes import at_night, nightly
from tests.live.run.traced.test_traced import diff, run

PROGRAM = """
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))


class Normed(torch.optim.Optimizer):
    def __init__(self, parameters, of_whole=True):
        super().__init__(parameters, {"lr": 0.1, "of_whole": of_whole})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            part = getattr(parameter.grad, "_local_tensor", parameter.grad)
            square = part.square().sum()
            if self.param_groups[0]["of_whole"] and part is not parameter.grad:
                dist.all_reduce(square)
            getattr(parameter, "_local_tensor", parameter).sub_(0.1 * part / square.sqrt())


class Model(nn.Sequential):
    def forward(self, x, numbers):
        return super().forward(x)


torch.manual_seed(0)
model = Model(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
called = model
if WORLD > 1:
    dist.init_process_group("gloo")
    WRAP
optimizer = OPTIMIZER
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9 ** step)
x = torch.randn(5, 8, 6, generator=torch.Generator().manual_seed(1))
for step in range(4):
    rows, numbers = x[STEP, ROWS], torch.arange(40).view(5, 8)[STEP, ROWS]
    with torch.autocast("cpu", torch.bfloat16, enabled=WORLD > 1 and HALF):
        loss = called(rows, numbers).float().square().mean()
    (LOSS).backward()
    optimizer.step()
    optimizer.zero_grad()
    for _ in range(TIMES):
        scheduler.step()
"""
DDP = "called = DistributedDataParallel(model)"
FSDP = "fully_shard(model, mesh=init_device_mesh('cpu', (WORLD,)))"
NARROW = FSDP[:-1] + ", mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))"
REDUCED = FSDP[:-1] + ", mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))"
USUAL = {
    "WRAP": DDP,
    "OPTIMIZER": "torch.optim.AdamW(model.parameters(), 0.01)",
    "STEP": "step",
    "ROWS": "RANK::WORLD",
    "HALF": "False",
    "LOSS": "loss",
    "TIMES": "1",
}
RESUME = """    if step == 2 and WORLD > 1:
        before = optimizer, scheduler
        optimizer = torch.optim.AdamW(model.parameters(), 0.05)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9 ** step)
        for new, old in zip((optimizer, scheduler), before):
            new.load_state_dict(old.state_dict())
    rows, numbers"""
MUON = "Normed(model.parameters())"


def program(**others):
    text = PROGRAM
    for word, code in (USUAL | others).items():
        text = text.replace(word, code)
    return text


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder, traces = tmp_path_factory.mktemp("alone"), {}

    def of(optimizer):
        if optimizer not in traces:
            script = folder / f"train{len(traces)}.py"
            script.write_text(program(OPTIMIZER=optimizer))
            traces[optimizer] = run(folder, f"one{len(traces)}", sys.executable, str(script))
        return traces[optimizer]

    return of


RIGHT = [
    {},
    {"WRAP": FSDP},
    {"WRAP": FSDP, "OPTIMIZER": MUON},
    {"WRAP": NARROW},
    {"WRAP": REDUCED},
    {"HALF": "True"},
    {"    rows, numbers": RESUME},
]
WRONG = [
    (
        {
            "    rows, numbers": RESUME.replace(
                "zip((optimizer, scheduler), before)", "zip((optimizer,)[RANK:], before)"
            )
        },
        "different-settings",
        "in step 3 the optimizers on rank 1 step with settings that are not",
    ),
    ({"WRAP": FSDP, "OPTIMIZER": "Normed(model.parameters(), False)"}, "step-of-part", "each rank's step has the norm"),
    ({"TIMES": "WORLD"}, "different-settings", "in step 2 the optimizers on ranks 0-1 step with settings that are not"),
    (
        {"STEP": "step + (step > 1 < WORLD)"},
        "different-batch",
        "rows that the other job has, in step 4",
    ),
    ({"STEP": "step if step < 3 else 4 * (WORLD > 1) + 3 * (WORLD == 1)"}, "different-batch", "does not have in it"),
    (
        {"STEP": "step - 2 * (step > 1 and RANK == 1)"},
        "order-begins-again",
        "in step 3 rank 1 is given the rows of step 1 again",
    ),
    (
        {"STEP": "step - 2 * (step > 2 and WORLD > 1)"},
        "different-batch",
        "in step 4 ranks are given the rows of step 2 again",
    ),
    ({"STEP": "step + RANK", "ROWS": ":"}, "whole-batch-per-rank", "rank 0 has all rows of that batch"),
    ({"HALF": "True", "LOSS": "loss / WORLD"}, "ddp-averages-shares", "1/2 of the other job's"),
    ({"WRAP": NARROW, "LOSS": "loss * WORLD"}, "", "2 times the other job's"),
]


def compared(tmp_path, alone, changed):
    (tmp_path / "train.py").write_text(program(**changed))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    optimizer = MUON if "Normed" in changed.get("OPTIMIZER", "") else USUAL["OPTIMIZER"]
    step, _ = diff(alone(optimizer), run(tmp_path, "two", *torchrun))
    return step


@pytest.mark.parametrize("changed", at_night(RIGHT), ids=str)
def test_a_right_job_agrees_in_the_weights_after_the_step_and_in_later_steps(tmp_path, alone, changed):
    step = compared(tmp_path, alone, changed)
    assert step["departures"] == []
    assert step["has_update"]
    assert step["num_later"] == 3


@pytest.mark.parametrize(("changed", "cause", "words"), at_night(WRONG), ids=str)
def test_what_comes_of_a_step_is_named(tmp_path, alone, changed, cause, words):
    first = compared(tmp_path, alone, changed)["departures"][0]
    assert words in first["sentence"]
    assert cause in ("", first["cause_id"])


GIVEN = "    rows, numbers = x[step, RANK::WORLD], torch.arange(40).view(5, 8)[step, RANK::WORLD]\n"
FILLED = """
    at = (3, slice(4)) if step == 3 and RANK == 0 else (step % 3, slice(RANK, None, WORLD))
    rows, numbers = x[at], torch.arange(40).view(5, 8)[at]
"""
STEPPED = "    optimizer.step()\n"
EDITS = [
    (STEPPED, f"    nn.utils.clip_grad_norm_(model.parameters(), 0.01 * WORLD)\n{STEPPED}", "different-clips"),
    (GIVEN, f"{GIVEN}    rows = (rows - rows.mean(0)) / rows.std(0)\n", "normalized-by-own-rows"),
    (GIVEN, FILLED, "filled-batch"),
]


@nightly
@pytest.mark.parametrize(("code", "changed", "cause"), EDITS, ids=[cause for *_, cause in EDITS])
def test_what_ranks_do_otherwise_around_a_step_is_named(tmp_path, code, changed, cause):
    assert code in program()
    (tmp_path / "train.py").write_text(program().replace(code, changed))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    step, _ = diff(run(tmp_path, "one", sys.executable, "train.py"), run(tmp_path, "two", *torchrun))
    assert [departure["cause_id"] for departure in step["departures"]] == [cause]


PRUNED = (
    "    optimizer.zero_grad()\n",
    """    optimizer.zero_grad()
    for weight in model.parameters():
        with torch.no_grad():
            CHANGE
""",
)
OF_SHARD = "part = getattr(weight, '_local_tensor', weight).data"
CHANGES = [
    ("weight.clamp_(-0.2, 0.2)", ""),
    ("weight.mul_(0.9)", ""),
    ("weight.add_(0.01 * torch.randn(()).item())", ""),
    ("weight.clamp_(-0.2, 0.2) if WORLD > 1 else None", "Only code of the second run changes these weights"),
    (f"{OF_SHARD}; part.div_(part.norm())", "those of each rank's shard, such as a norm"),
    (
        f"{OF_SHARD}; part[part.abs() <= part.abs().flatten().kthvalue(part.numel() // 2).values] = 0",
        "by a threshold of each rank's own shard",
    ),
    (f"{OF_SHARD}; part.add_(torch.randn(part.shape))", "it differs between the jobs, and random numbers are drawn"),
]


@pytest.mark.parametrize(("change", "words"), at_night(CHANGES), ids=str)
def test_what_changes_weights_between_two_steps_is_compared(tmp_path, change, words):
    assert PRUNED[0] in PROGRAM
    changed = PRUNED[1].replace("CHANGE", change)
    (tmp_path / "train.py").write_text(program(WRAP=FSDP).replace(PRUNED[0], changed))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    step, _ = diff(run(tmp_path, "one", sys.executable, "train.py"), run(tmp_path, "two", *torchrun))
    texts = [*(departure["why"] for departure in step["departures"]), *(note["why"] for note in step["not_compared"])]
    assert words in " ".join(texts)
    assert bool(texts) == bool(words)


IN_STEP = """
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 6)

    def clamp(self, step):
        with torch.no_grad():
            self.body.weight.clamp_(-0.2 - (step == 0), 0.2 + (step == 0))

    def forward(self, x, step):
        self.clamp(step)
        return self.body(x)


torch.manual_seed(0)
model = Learner()
if WORLD > 1:
    dist.init_process_group("gloo")
    called = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1))
for step in range(3):
    if WORLD > 1:
        y = called(x[step, RANK::WORLD], step)
    else:
        model.clamp(step)
        y = model.body(x[step])
    y.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@nightly
def test_jobs_whose_steps_begin_with_calls_of_different_modules_are_not_compared_between_steps(tmp_path):
    (tmp_path / "train.py").write_text(IN_STEP)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    step, _ = diff(run(tmp_path, "one", sys.executable, "train.py"), run(tmp_path, "two", *torchrun))
    assert step["departures"] == []
    notes = [note["why"] for note in step["not_compared"]]
    assert any("begin their next steps with calls of different modules" in note for note in notes)


APART = """
import torch
from torch import nn

torch.manual_seed(0)
body, head = nn.Linear(4, 8), nn.Linear(8, 2)
optimizers = torch.optim.SGD(body.parameters(), 0.1), torch.optim.Adam(head.parameters())
head(body(torch.randn(3, 4))).sum().backward()
for optimizer in optimizers:
    optimizer.step()
"""


@nightly
def test_a_module_that_another_optimizer_steps_is_said_not_to_be_compared(tmp_path):
    (tmp_path / "train.py").write_text(APART)
    trace = run(tmp_path, "one", sys.executable, "train.py")
    step, _ = diff(trace, trace)
    notes = [note["why"] for note in step["not_compared"]]
    assert "Linear, which Adam steps: it is no part of the model that is followed" in notes


AGAIN = (
    "        scheduler.step()\n",
    """        scheduler.step()
    if step == 1:
        old, states = model, optimizer.state_dict()
        called = model = Model(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        model.load_state_dict(old.state_dict())
        if WORLD > 1:
            WRAP
        optimizer = OPTIMIZER
        optimizer.load_state_dict(states)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9 ** step, 1)
""",
)
GOES_ON = [
    ({}, ""),
    ({"STEP": "step - (step > 1 < WORLD)"}, "in step 3 ranks are given rows that the other job has, in step 2"),
    ({"TIMES": "1 + (WORLD > 1 < step)"}, "in step 4 the optimizers on ranks 0-1 step with settings that are not"),
]


@pytest.mark.parametrize(("changed", "words"), [*at_night(GOES_ON)], ids=str)
def test_a_job_that_goes_on_with_a_new_model_is_followed(tmp_path, changed, words):
    assert AGAIN[0] in PROGRAM
    for name in ("one", "two"):
        text = PROGRAM.replace(*AGAIN)
        for word, code in (USUAL | (changed if name == "two" else {})).items():
            text = text.replace(word, code)
        (tmp_path / f"{name}.py").write_text(text)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "two.py")
    step, _ = diff(run(tmp_path, "one", sys.executable, "one.py"), run(tmp_path, "two", *torchrun))
    assert words in " ".join(one["sentence"] for one in step["departures"])
    assert bool(step["departures"]) == bool(words)
    assert words or any("trace that step too (--trace-step 3)" in note["why"] for note in step["not_compared"])


ZEROED = "    optimizer.zero_grad()\n"
BACK = "    (LOSS).backward()\n"
LATER = [
    ("not at all", {ZEROED: "    WORLD == 1 and optimizer.zero_grad()\n"}, 1, "gradients-not-zeroed"),
    ("not at all, step 2", {ZEROED: "    WORLD == 1 and optimizer.zero_grad()\n"}, 2, "gradients-not-zeroed"),
    (
        "every other step",
        {ZEROED: "    (WORLD == 1 or step % 2) and optimizer.zero_grad()\n"},
        2,
        "gradients-not-zeroed",
    ),
    ("before backward", {ZEROED: "", BACK: "    optimizer.zero_grad(RANK == 0)\n    (LOSS).backward()\n"}, 2, ""),
    ("in both jobs", {ZEROED: ""}, 2, ""),
    (
        "a scale that only later steps have",
        {"loss = called": "loss = (WORLD if step else 1) * called"},
        1,
        "other-later",
    ),
    (
        "dropout",
        {
            "called = model\n": "model[1] = nn.Dropout(0.5)\ntorch.manual_seed(5 + RANK)\ncalled = model\n",
            "loss = called": "loss = 1 * called",
        },
        1,
        "",
    ),
]


@nightly
@pytest.mark.parametrize(
    ("edits", "step", "cause"),
    [each[1:] for each in LATER],
    ids=[each[0] for each in LATER],
)
def test_what_goes_wrong_in_later_steps_alone_is_seen(tmp_path, edits, step, cause):
    text = PROGRAM
    for code, changed in edits.items():
        assert code in text
        text = text.replace(code, changed)
    for word, code in USUAL.items():
        text = text.replace(word, code)
    (tmp_path / "train.py").write_text(text)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    pair = (run(tmp_path, "one", sys.executable, "train.py", step=step), run(tmp_path, "two", *torchrun, step=step))
    compared_step, _ = diff(*pair)
    causes = [departure["cause_id"] for departure in compared_step["departures"]]
    assert len(causes) == bool(cause), compared_step
    assert not cause or causes[0].startswith(cause)
