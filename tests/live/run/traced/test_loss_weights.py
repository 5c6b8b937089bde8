"""Jobs whose outputs are right, and whose loss weighs rows otherwise or compares them with other labels."""

from __future__ import annotations

import sys

import pytest

from tests.lanes import at_night
from tests.live.run.traced.test_traced import diff, run

PROGRAM = """
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
if WORLD > 1:
    dist.init_process_group("gloo")


def mean_of_all(numbers):
    mean = numbers.mean()
    if WORLD > 1:
        dist.all_reduce(mean, dist.ReduceOp.AVG)
    return mean


def sum_of_all(numbers):
    total = numbers.sum()
    if WORLD > 1:
        dist.all_reduce(total)
    return total


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.head = nn.Embedding(40, 16), nn.Linear(16, 32), nn.Linear(32, 40)

    def forward(self, ids):
        return self.head(torch.tanh(self.up(self.embed(ids))))


torch.manual_seed(0)
model = Model()
called = DistributedDataParallel(model) if WORLD > 1 else model
optimizer = torch.optim.SGD(model.parameters(), 0.1)
generator = torch.Generator().manual_seed(1)
for ids in torch.randint(0, 40, (3, 20, 9), generator=generator):
    rewards = torch.randn(20, generator=generator)
    inputs, labels = ids[:, :-1], ids[:, 1:]
    optimizer.zero_grad()
    STEP
    optimizer.step()
"""

PER_ROW = """
    rows = slice(RANK, None, WORLD)
    losses = F.cross_entropy(called(inputs[rows]).transpose(1, 2), labels[rows], reduction="none").mean(1)
    own = rewards[rows]
    (WEIGHTS * losses).mean().backward()
"""
NORMALIZED = "((own - mean_of_all(own)) / mean_of_all((own - mean_of_all(own)) ** 2).sqrt())"
NORMALIZED_ALONE = "((own - own.mean()) / own.std(correction=0))"
CENTERED, CENTERED_ALONE = "(own - mean_of_all(own))", "(own - own.mean())"
SHARED = "(own.exp() * 20 / sum_of_all(own.exp()))"
SHARED_ALONE = "own.softmax(0) * len(own)"
RANKED_ALONE = "(1 + own.argsort().argsort()) / len(own)"

MICRO_BATCHES = """
    rows = range(20)[RANK::WORLD]
    parts = [(inputs[list(part)], labels[list(part)]) for part in (rows[:4], rows[4:8], rows[8:])]
    for own, due in parts:
        called.require_backward_grad_sync = own is parts[-1][0]
        loss = F.cross_entropy(called(own).flatten(0, 1), due.flatten())
        (loss * WEIGHT).backward()
"""
BY_ROWS, ALL_ALIKE = "len(own) / len(rows)", "1 / len(parts)"

TARGETS = """
    rows = range(20)[RANK::WORLD]
    parts = [list(rows[at::5]) for at in range(5)]
    queue = [labels[part] for part in parts]
    for part in parts:
        called.require_backward_grad_sync = part is parts[-1]
        outputs = called(inputs[part])
        (F.cross_entropy(outputs.flatten(0, 1), queue.pop(POP).flatten()) / 5).backward()
"""

TOKENS = """
    at = slice(RANK * 8 // WORLD, (RANK + 1) * 8 // WORLD)
    own, due = inputs[:, at], LABELS
    loss = F.cross_entropy(called(own).flatten(0, 1), due.flatten(), reduction="sum", ignore_index=-100)
    (loss * WORLD / sum_of_all((due >= 0).float())).backward()
"""
CUT = "labels[:, at]"
SHIFTED_AFTER_CUT = "F.pad(ids[:, :-1][:, at], (0, 1), value=-100)[:, 1:] if WORLD > 1 else labels"
ROLLED_AFTER_CUT = "ids[:, :-1][:, at].roll(-1, 1) if WORLD > 1 else labels"
SHIFTED_TWICE = "labels[:, at].roll(-1, 1) if WORLD > 1 else labels"
NOT_SHIFTED = "ids[:, :-1][:, at] if WORLD > 1 else labels"
OTHER_ROWS = "labels[torch.arange(20).roll(RANK)][:, at]"

RIGHT = [
    PER_ROW.replace("WEIGHTS", NORMALIZED),
    PER_ROW.replace("WEIGHTS", SHARED),
    PER_ROW.replace("WEIGHTS", "own.sigmoid()"),
    MICRO_BATCHES.replace("WEIGHT", BY_ROWS),
    TARGETS.replace("POP", "0"),
    TOKENS.replace("LABELS", CUT),
    TOKENS.replace("LABELS", CUT).replace("(0, 1), due.flatten()", "(0, 1), due.flatten(), label_smoothing=0.1"),
]
WRONG = [
    (PER_ROW.replace("WEIGHTS", NORMALIZED_ALONE), "rows-times-own-numbers", "less their mean"),
    (PER_ROW.replace("WEIGHTS", CENTERED_ALONE), "rows-times-own-numbers", "less their mean"),
    (PER_ROW.replace("WEIGHTS", SHARED_ALONE), "mean-of-means", "counts in its own part"),
    (PER_ROW.replace("WEIGHTS", RANKED_ALONE), "rows-times-own-numbers", "from its own rows"),
    (MICRO_BATCHES.replace("WEIGHT", ALL_ALIKE), "mean-of-means", "Each micro-batch divides by"),
    (TARGETS.replace("POP", "-1 if WORLD > 1 else 0"), "rows-with-other-labels", "a list is read from its end"),
    (TOKENS.replace("LABELS", SHIFTED_AFTER_CUT), "rows-with-other-labels", "shifted after they were cut"),
    (TOKENS.replace("LABELS", ROLLED_AFTER_CUT), "rows-with-other-labels", "shifted after they were cut"),
    (TOKENS.replace("LABELS", SHIFTED_TWICE), "rows-with-other-labels", "the next row's label"),
    (TOKENS.replace("LABELS", NOT_SHIFTED), "rows-with-other-labels", "the previous row's label"),
    (TOKENS.replace("LABELS", OTHER_ROWS), "rows-with-other-labels", "cut or ordered in different ways"),
]


def compared(tmp_path, step):
    (tmp_path / "train.py").write_text(PROGRAM.replace("    STEP\n", step))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    alone = run(tmp_path, "one", sys.executable, "train.py")
    return diff(alone, run(tmp_path, "two", *torchrun))[0]["departures"]


@pytest.mark.parametrize("step", at_night([(step,) for step in RIGHT]))
def test_losses_that_are_one_process_s_are_right(tmp_path, step):
    assert compared(tmp_path, step) == []


@pytest.mark.parametrize(("step", "cause", "why"), at_night(WRONG))
def test_a_loss_that_weighs_or_labels_rows_otherwise_is_named(tmp_path, step, cause, why):
    first = compared(tmp_path, step)[0]
    assert (first["cause_id"], why in first["why"]) == (cause, True), first
