"""Jobs of context parallelism whose ranks have tokens of the head and of the tail, or every so many of them."""

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
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
CP = min(WORLD, 2)
at, group = RANK % CP, None
if WORLD > 1:
    dist.init_process_group("gloo")
    groups = [dist.new_group(list(range(first, first + CP))) for first in range(0, WORLD, CP)]
    group = groups[RANK // CP]


def positions(at):
    ORDER


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(CP)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)[:, torch.cat([positions(at) for at in range(CP)]).argsort()]

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=group)
        return grad[:, positions(at)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x, mask):
        q, kv = self.q(x), self.kv(x)
        k, v = (Gather.apply(kv) if WORLD > 1 else kv).chunk(2, -1)
        scores = (q @ k.transpose(1, 2) / 4).masked_fill(~mask, -1e4)
        return x + self.out(scores.softmax(-1) @ v)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(40, 16), nn.Embedding(16, 16)
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(16, 40)

    def forward(self, ids, where, mask):
        x = self.embed(ids) + self.place(where)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(FLAT)


torch.manual_seed(0)
model = Model()
called = DistributedDataParallel(model) if WORLD > 1 else model
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
generator = torch.Generator().manual_seed(1)
for step in range(3):
    ids = torch.randint(0, 40, (ROWS, 17), generator=generator)
    rows, own = slice(RANK // CP, None, WORLD // CP), positions(at)
    mask = torch.ones(16, 16).tril().bool()[own]
    inputs, labels = ids[rows, :-1][:, own], ids[rows, 1:][:, own]
    loss = F.cross_entropy(called(inputs, WHERE, mask).flatten(0, -2), labels.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
HEAD_AND_TAIL = "return torch.cat([torch.arange(16).chunk(2 * CP)[part] for part in (at, 2 * CP - 1 - at)])"
EACH_SECOND = "return torch.arange(16)[at::CP]"
USUAL = {"ORDER": HEAD_AND_TAIL, "FLAT": "x", "ROWS": "4", "WHERE": "own"}
FLAT = {"FLAT": "x.flatten(0, 1)"}
LOCAL_POSITIONS = {"WHERE": "own if WORLD == 1 else torch.arange(len(own))"}
RANK_ORDER = {"[:, torch.cat([positions(at) for at in range(CP)]).argsort()]": ""}
ROWS_OF_PAIRS = {"slice(RANK // CP, None, WORLD // CP)": "range(4)[RANK // CP * 2:][:8 // WORLD]"}


def compared(tmp_path, changed, ranks):
    text = PROGRAM
    for word, code in (USUAL | changed).items():
        text = text.replace(word, code)
    (tmp_path / "train.py").write_text(text)
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "train.py",
    )
    alone = run(tmp_path, "one", sys.executable, "train.py")
    return diff(alone, run(tmp_path, "two", *torchrun))[0]


@pytest.mark.parametrize(
    ("changed", "ranks"),
    at_night([({}, 2), (FLAT, 2), ({"ORDER": EACH_SECOND}, 2), ({"ROWS": "1"}, 2), (ROWS_OF_PAIRS, 4)]),
    ids=str,
)
def test_a_right_job_may_give_ranks_any_tokens(tmp_path, changed, ranks):
    step = compared(tmp_path, changed, ranks)
    assert step["departures"] == []
    assert "the step, module by module" not in str(step["not_compared"])


@nightly
@pytest.mark.parametrize("order", [HEAD_AND_TAIL, EACH_SECOND])
@pytest.mark.parametrize(("changed", "module"), [(LOCAL_POSITIONS, "place"), (RANK_ORDER, "blocks.0")])
def test_the_first_wrong_module_is_found_for_any_tokens(tmp_path, order, changed, module):
    step = compared(tmp_path, {"ORDER": order} | changed, 2)
    assert step["departures"][0]["module"] == module
