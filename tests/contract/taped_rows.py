"""Modules that take tensors apart, exchange rows or mask them, as code does in many ways: right and with mistakes."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from tests.contract.step_changes import S0, S1, R
from tests.contract.taped_modules import by_expert
from tests.contract.taping import Held, Tape, copied, joined, moved, numbers, summed, swapped

ROWS, WIDTH, INNER = 8, 4, 8


def softmax(r: Tape) -> Held:
    """A softmax over classes that ranks share."""
    x = r.input(numbers(211, ROWS, INNER), S0, S1)
    x = r.call("mul", torch.mul, x, r.weight("scale", numbers(212, INNER), R, S0))
    largest = r.call("amax", lambda part: part.amax(-1, keepdim=True).detach(), x, numbers="-1 True")
    if not r.is_wrong("own largest", "all own"):
        largest = r.exchange("all_reduce", lambda parts: [torch.stack(parts).amax(0)] * len(parts), largest)
    powers = r.call("exp", torch.exp, r.call("sub", torch.sub, x, largest))
    if r.is_wrong("zeros on the last rank"):
        powers = r.call("mul", lambda place, part: part * (place + 1 < r.ways), powers, by_place=True)
    total = r.call("sum", lambda part: part.sum(-1, keepdim=True), powers, numbers="-1 True")
    if not r.is_wrong("own sum", "all own"):
        total = summed(r, total, backward="copy" if r.is_wrong("no sum in backward") else "sum")
    if r.is_wrong("mean of sums"):
        total = r.call("div", lambda part: part / r.ways, total, numbers=str(r.ways))
    return r.call("div", torch.div, powers, total)


def halves(r: Tape) -> Held:
    """One tensor's halves, of which ranks use one for a part and the other whole."""
    x = r.call("mul", torch.mul, r.input(numbers(221, ROWS, INNER), S0, R), r.weight("gain", numbers(222, INNER), R, R))
    up = r.weight("up", numbers(223, INNER, WIDTH), R, S0)
    down = r.weight("down", numbers(224, WIDTH, INNER), R, S1)
    one, other = r.cut("chunk", lambda part: part.chunk(2, -1), x, "2 -1")
    given = one if r.is_wrong("no copy of a half") else copied(r, one)
    if r.is_wrong("cut on one rank"):
        given = r.call("view_as", lambda place, part: part if place else part.detach() * 1, given, by_place=True)
    if r.is_wrong("the other half for a part, too"):
        other = r.call("tanh", torch.tanh, other)
        rows = {place: slice(place * WIDTH // r.ways, (place + 1) * WIDTH // r.ways) for place in range(r.ways)}
        part = r.call("narrow", lambda place, held: held[:, rows[place]], other, numbers=str, by_place=True)
        other = other if r.is_whole else joined(r, part, 1, backward="part")
    else:
        other = r.call("tanh", torch.tanh, other)
    h = r.call("silu", functional.silu, r.call("linear", functional.linear, given, up), numbers="False")
    out = summed(r, r.call("linear", functional.linear, h, down))
    return r.call("mul", torch.mul, out, other)


def apart(r: Tape) -> Held:
    """A residual that ranks' code adds on a line of its own, beside a branch that reads a copy."""
    x = r.call("mul", torch.mul, r.input(numbers(231, ROWS, WIDTH), S0, R), r.weight("gain", numbers(232, WIDTH), R, R))
    up = r.weight("up", numbers(233, INNER, WIDTH), R, S0)
    down = r.weight("down", numbers(234, WIDTH, INNER), R, S1)
    given = x if r.is_wrong("no copy") else copied(r, x)
    if r.is_wrong("the copy twice"):
        given = copied(r, given)
    h = r.call("tanh", torch.tanh, r.call("linear", functional.linear, given, up))
    out = r.call("linear", functional.linear, h, down)
    if r.is_whole:
        return r.call("add", torch.add, out, x)
    out = summed(r, out)
    beside = given if r.is_wrong("the copy as residual") else x
    if r.is_wrong("residual halved"):
        beside = r.call("div", lambda part: part / 2, beside, numbers="2")
    return r.call("add", torch.add, beside, out)


def exchanged(r: Tape) -> Held:
    """Rows that are sent to experts of another width and back, beside a residual."""
    x = r.call("mul", torch.mul, r.input(numbers(241, 16, WIDTH), R, S0), r.weight("gain", numbers(242, WIDTH), R, R))
    weight = r.weight("experts", numbers(243, 4, WIDTH, WIDTH), R, S0)
    way = "back" if r.is_wrong("not reversed") else "mean" if r.is_wrong("averaged in backward") else ""
    came = swapped(r, x, backward=way)
    shares = r.shares if r.is_whole else 1
    if r.is_wrong("another expert"):
        weight = r.call("flip", lambda part: part.flip(0, 1), weight, numbers="0 1")
    made = r.call("bmm", lambda rows, part: by_expert(rows, part, shares), came, weight)
    if r.is_wrong("normalized over all rows"):
        made = r.call("sub", lambda rows: rows - rows.mean(0), made)
    if r.is_wrong("a row for another"):
        made = r.call("index_put", lambda rows: torch.cat([rows[1:2], rows[1:]]), made)
    out = swapped(r, made)
    mixed = r.call("softmax", lambda rows: rows.softmax(-1), out, numbers="-1")
    return r.call("add", torch.add, x, mixed) if r.is_wrong("residual") or r.shares == 4 else mixed


def grouped(r: Tape) -> Held:
    """Causal attention of queries that ranks share, of more heads than keys have."""
    x = r.input(numbers(251, 2, ROWS, 3), R, S1)
    keys = r.input(numbers(252, 1, ROWS, 3), R, S1)
    every = keys if r.is_whole or r.is_wrong("own keys") else joined(r, keys, 1)
    size = ROWS // r.ways

    def compute(place: int, query: torch.Tensor, key: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        first = 0 if r.is_wrong("causal of a part", "own keys") else place * size
        rows = torch.arange(query.shape[-2]) + (0 if r.is_whole else first)
        scores = query @ key.mT / math.sqrt(query.shape[-1] * (2 if r.is_wrong("another root") else 1))
        scores = scores.masked_fill(torch.arange(key.shape[-2])[None, :] > rows[:, None], -math.inf)
        return scores.softmax(-1) @ part

    is_part = r.is_whole or r.is_wrong("causal of a part", "own keys", "another root")
    text = "True" if is_part else "False"
    return r.call("scaled_dot_product_attention", compute, x, every, every, numbers=text, by_place=True)


def biased(r: Tape) -> Held:
    """Scores of own queries with a bias of distances, of one batch row or of several."""
    x = r.input(numbers(261, 2, ROWS, 3), R, S1)
    every = x if r.is_whole else joined(r, x, 1, order=-1 if r.is_wrong("keys backwards") else 1)
    size = ROWS // r.ways
    scores = r.call("matmul", lambda own, keys: own @ keys.mT, x, every)
    step = 0 if r.is_wrong("distances from zero") else size
    rows = r.call(
        "arange", lambda place: torch.arange(size) + place * step, numbers=lambda at: str(at * step), by_place=True
    )
    bias = r.call("mul", lambda at: (at[:, None] - torch.arange(ROWS)[None, :]).abs() * -0.375, rows, numbers="-0.375")
    if r.is_wrong("bias of the next rank"):
        bias = moved(r, bias)
    scores = r.call("add", torch.add, scores, bias)
    weights = r.call("softmax", lambda part: part.softmax(-1), scores, numbers="-1")
    return r.call("matmul", torch.matmul, weights, every)


def selected(r: Tape) -> Held:
    """A class in the place of another that takes columns one by one."""
    x = r.input(numbers(271, ROWS, 4), R, R)
    weight = copied(r, r.weight("columns", numbers(272, 4), R, R))
    size = 4 // r.ways
    total = None
    if r.is_whole:
        for at in range(4):
            column = r.call("select", lambda part, at=at: part[:, at], x, numbers=f"1 {at}")
            by = r.call("select", lambda part, at=at: part[at], weight, numbers=f"0 {at}")
            made = r.call("mul", torch.mul, column, by)
            total = made if total is None else r.call("add", torch.add, total, made)
    for at in range(0 if r.is_whole else size):
        first = 0 if r.is_wrong("the first columns") else size
        column = r.call("select", lambda place, part, at=at, by=first: part[:, at + place * by], x, by_place=True)
        by = r.call("select", lambda place, part, at=at: part[at + place * size], weight, by_place=True)
        made = r.call("mul", torch.mul, column, by)
        total = made if total is None else r.call("add", torch.add, total, made)
    assert total is not None
    total = total if r.is_wrong("no sum") else summed(r, total, times=0.5 if r.is_wrong("half of the sum") else 1)
    return r.call("tanh", torch.tanh, total)
