"""What the source of a forward says of buffers: which it reads before it writes them, and where it writes them."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from shardviz.live.run.read_buffers import ReadBuffers, uses_of


def update(buffer, values):
    buffer.copy_(values)


class Uses(nn.Module):
    def forward(self, x):
        scores = x @ self.queue.clone().T
        self.scratch[: len(x)] = x
        scores = scores + self.scratch[: len(x)].sum()
        self.count += len(x)
        size = self.logged.shape[0]
        self.logged[:size].copy_(x[:size])
        mean = x.mean(0) if self.training else self.mean
        if not self.training:
            scores = scores + self.target
        else:
            self.mean.lerp_(mean, 0.1)
        bank = self.bank
        near = torch.mm(x, bank.T)
        bank[0] = near[0]
        update(self.given, x)
        torch.add(x, 1, out=self.out)
        return self.keep(scores)

    def keep(self, scores):
        at = int(self.at)
        self.queue[at : at + 1] = scores
        self.at.fill_(at + 1)
        self.target[0] = 1
        return scores


class OfTorch(nn.BatchNorm1d):
    pass


def line(text):
    lines, first = inspect.getsourcelines(Uses)
    return f"test_buffer_uses.py:{first + next(at for at, each in enumerate(lines) if text in each)}"


def test_what_is_read_before_it_is_written_is_carried():
    uses = uses_of(Uses)
    assert {name for name, (is_read, _) in uses.items() if is_read} == {"queue", "at", "bank"}


def test_the_first_line_that_writes_a_buffer_is_named():
    lines = {name: place for name, (_, place) in uses_of(Uses).items() if place}
    assert lines["queue"] == line("self.queue[at")
    assert lines["at"] == line("self.at.fill_")
    assert lines["bank"] == line("bank[0] =")
    assert lines["out"] == line("out=self.out")
    assert "given" not in lines


def test_nothing_is_said_of_torchs_own_modules():
    assert not uses_of(OfTorch)


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(3))

    def forward(self, x):
        y = x + self.state
        self.state.copy_(x)
        return y


class Writes(Reads):
    def forward(self, x):
        self.state.copy_(x)
        return x * self.state


@pytest.mark.parametrize("names", [("reads", "writes"), ("writes", "reads")])
def test_a_buffer_is_used_as_the_class_of_its_own_module_uses_it(names):
    model = nn.Sequential()
    for name in names:
        model.add_module(name, {"reads": Reads, "writes": Writes}[name]())
    buffers = ReadBuffers(model, 100)
    model(torch.ones(3))
    buffers.note_written()
    assert buffers.carried == ["reads.state"]
    assert len({*buffers.written.values()}) == 2
