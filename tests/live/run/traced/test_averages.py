"""A job that keeps averages of its weights beside the model, beside one process that keeps them, too."""

from __future__ import annotations

import sys

import pytest

from tests.lanes import at_night, nightly
from tests.live.run.traced.test_traced import diff, run

PROGRAM = """
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 6))
called, teacher = model, copy.deepcopy(model)
average = copy.deepcopy(model).requires_grad_(False)
if WORLD > 1:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (WORLD,))
    WRAP


def part(weight):
    return weight.to_local() if isinstance(weight, DTensor) else weight


def whole(weight):
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def toward(mine, weight, share=0.01):
    mine.lerp_(weight.detach(), share)


kept = MAKE


@torch.no_grad()
def update():
    UPDATE


optimizer = torch.optim.AdamW(model.parameters(), 0.01)
x = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(1))
for step in range(3):
    rows = x[step, RANK::WORLD]
    optimizer.zero_grad()
    (called(rows).sin() - teacher(rows).detach().cos()).square().mean().backward()
    if WORLD > 1 and EARLY:
        update()
    optimizer.step()
    if WORLD == 1 or WHEN:
        update()
"""
DDP = "called = DistributedDataParallel(model)"
BOTH = "fully_shard(model, mesh=mesh); fully_shard(average, mesh=mesh)"
ZIPPED = "[toward(mine, weight) for mine, weight in zip(average.parameters(), model.parameters())]"
USUAL = {"WRAP": BOTH, "MAKE": "average", "UPDATE": ZIPPED, "WHEN": "True", "EARLY": "False"}
IN_MODEL = {
    "WRAP": DDP,
    "MAKE": "AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))",
    "DECAY": "0.99",
    "UPDATE": "kept.update_parameters(model)",
}
IN_LIST = {
    "MAKE": "[weight.detach().clone() for weight in model.parameters()]",
    "UPDATE": "[toward(mine, weight) for mine, weight in zip(kept, model.parameters())]",
}
OF_PARTS = {
    "MAKE": "{name: part(weight).detach().clone() for name, weight in model.named_parameters()}",
    "UPDATE": "[toward(kept[name], part(weight)) for name, weight in model.named_parameters()]",
}
OF_WHOLES = {
    "MAKE": "{name: whole(weight).detach().clone() for name, weight in model.named_parameters()}",
    "UPDATE": "[toward(kept[name], whole(weight)) for name, weight in model.named_parameters()]",
}
OWN_ROWS = (
    "[toward(kept[name][RANK * len(part(weight)):][:len(part(weight))], part(weight)) "
    "for name, weight in model.named_parameters()]"
)
OF_OWNERS = {
    "WRAP": DDP,
    "AdamW(model.parameters(), 0.01)": "AdamW(list(model.parameters())[RANK::WORLD], 0.01)",
    "optimizer.zero_grad()": "model.zero_grad()",
    "    optimizer.step()": (
        "    optimizer.step()\n    for at, weight in enumerate(model.parameters() if WORLD > 1 else ()):\n"
        "        dist.broadcast(weight.data, at % WORLD)"
    ),
}
BEFORE_SENT = OF_OWNERS | {
    "    optimizer.step()": OF_OWNERS["    optimizer.step()"].replace(
        "step()\n",
        "step()\n    for mine, weight in zip(kept if WORLD > 1 else (), model.parameters()):\n"
        "        toward(mine, weight)\n",
        1,
    ),
    "MAKE": "list(average.parameters())",
    "UPDATE": "[toward(mine, weight) for mine, weight in zip(kept if WORLD == 1 else (), model.parameters())]",
}
OF_OWNERS_ALONE = OF_OWNERS | {
    "MAKE": "list(average.parameters())",
    "UPDATE": "[toward(mine, weight) for at, (mine, weight) in enumerate(zip(kept, model.parameters())) "
    "if WORLD == 1 or at % WORLD == RANK]",
}
NEVER = {"MAKE": "average", "UPDATE": "pass"}
DRAW = "lambda part: part.reset_parameters() if isinstance(part, nn.Linear) else None"
DRAWN_ALONE = {"WRAP": DDP, "MAKE": f"average if RANK == 0 else average.apply({DRAW})"}
RIGHT = [
    (USUAL, 1),
    ({"WRAP": DDP, "WHEN": "RANK == 0"}, 1),
    (IN_MODEL, 1),
    (IN_MODEL, 2),
    (IN_LIST, 1),
    (OF_PARTS, 1),
    (OF_WHOLES, 1),
    (NEVER, 1),
    (OF_OWNERS, 1),
]

WRONG = [
    ({"WHEN": "RANK == 0"}, 1, "on rank 1 it is another average", "Nothing updates the average, or it takes"),
    ({"WHEN": "RANK == 0"}, 2, "on rank 1 it is another average", "Nothing updates the average."),
    ({"WHEN": "False", "EARLY": "True"}, 1, "it is another average", "or it takes the weights before the step"),
    ({"WHEN": "False", "EARLY": "True"}, 2, "it is another average", "takes the weight as it is before"),
    (OF_WHOLES | {"AGAIN": OWN_ROWS}, 1, "it is another average", "each rank updates only the elements"),
    (IN_MODEL | {"AGAIN": "0.99 ** WORLD"}, 2, "it is another average", "updated 2 times in a step"),
    (BEFORE_SENT, 2, "it is another average", "it comes before they are gathered"),
    (DRAWN_ALONE, 1, "on rank 1 it is another average", "copied before DistributedDataParallel"),
    (IN_MODEL | {"AGAIN": "0.9"}, 2, "it is another average", "keeps 0.9 of what it was"),
]


def program(changed, *, alone=False):
    words = USUAL | changed
    again = words.pop("AGAIN", "")
    if again and not alone:
        words["DECAY" if "DECAY" in words else "UPDATE"] = again
    text = PROGRAM
    for word, code in words.items():
        text = text.replace(word, code)
    return text


def compared(tmp_path, changed, step):
    (tmp_path / "one.py").write_text(program(changed, alone=True))
    (tmp_path / "train.py").write_text(program(changed))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    alone = run(tmp_path, "one", sys.executable, "one.py", step=step)
    compared_step, _ = diff(alone, run(tmp_path, "two", *torchrun, step=step))
    return compared_step


@pytest.mark.parametrize(("changed", "traced"), at_night(RIGHT), ids=str)
def test_a_right_job_has_the_averages_of_one_process(tmp_path, changed, traced):
    step = compared(tmp_path, changed, traced)
    assert step["departures"] == []
    assert [note for note in step["not_compared"] if "average" in note["why"]] == []


@pytest.mark.parametrize(("changed", "traced", "words", "why"), [*at_night(WRONG)], ids=str)
def test_another_average_than_that_of_one_process_is_named(tmp_path, changed, traced, words, why):
    first = compared(tmp_path, changed, traced)["departures"][0]
    assert words in first["sentence"]
    assert first["cause_id"] == "other-average"
    assert why in first["why"]


OWN_TEACHER = {"WRAP": f"{DDP}; teacher = teacher if RANK == 0 else teacher.apply({DRAW})"}
OWN_MEAN = {".square().mean()": ".square().mean().div(1 + rows.mean().abs())"}


@nightly
@pytest.mark.parametrize("traced", [1, 2])
def test_a_teacher_that_each_rank_drew_is_named_where_the_loss_reads_it(tmp_path, traced):
    first = compared(tmp_path, OWN_TEACHER, traced)["departures"][0]
    assert first["cause_id"] == "other-copy-before"
    assert "rank 1 has other numbers than one process" in first["sentence"]


LAYERS = "nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 6))"
OF_A_CHILD = {LAYERS: f"nn.Sequential({LAYERS}, nn.Linear(6, 6))", "model, copy.deepcopy(model)": "model, COPY"}


@nightly
@pytest.mark.parametrize("is_own", [True, False])
def test_a_teacher_that_is_a_copy_of_a_child_of_the_model_is_named_if_each_rank_drew_it(tmp_path, is_own):
    changed = (OWN_TEACHER if is_own else {"WRAP": DDP}) | OF_A_CHILD | {"COPY": "copy.deepcopy(model[0])"}
    causes = [departure["cause_id"] for departure in compared(tmp_path, changed, 1)["departures"]]
    assert causes[:1] == ["other-copy-before"] * is_own


@nightly
@pytest.mark.parametrize("traced", [1, 2])
@pytest.mark.parametrize("when", ["True", "RANK == 0"])
def test_a_copy_of_which_one_rank_takes_care_is_not_blamed_for_a_loss_of_own_rows(tmp_path, when, traced):
    step = compared(tmp_path, {"WRAP": DDP, "WHEN": when} | OWN_MEAN, traced)
    assert "other-copy-before" not in {each["cause_id"] for each in step["departures"]}
    assert step["departures"]


@nightly
def test_whole_averages_that_their_owners_alone_update_are_not_compared(tmp_path):
    step = compared(tmp_path, OF_OWNERS_ALONE, 2)
    assert step["departures"] == []
    assert "update" in "".join(note["why"] for note in step["not_compared"])
