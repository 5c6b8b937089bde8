"""Modules whose weights ranks share, as tensor-parallel and expert-parallel code has them, right and with mistakes."""

from __future__ import annotations

import torch
from torch.nn import functional

from tests.contract.step_changes import S0, S1, R
from tests.contract.taping import Held, Tape, copied, moved, numbers, summed, swapped

ROWS, WIDTH, INNER = 8, 4, 8
SUM = "Partial()"


def mlp(r: Tape) -> Held:
    """Two products, the first by columns and the second by rows, and a residual."""
    x = r.call("mul", torch.mul, r.input(numbers(1, ROWS, WIDTH), S0, R), r.weight("gain", numbers(9, WIDTH), R, R))
    up = r.weight("up", numbers(2, INNER, WIDTH), R, S0)
    down = r.weight("down", numbers(3, WIDTH, INNER), R, S1)
    bias = r.weight("bias", numbers(4, WIDTH), R, R)
    given = x if r.is_wrong("no backward of the input") else copied(r, x)
    h = r.call("linear", functional.linear, given, up)
    if r.is_wrong("a part in another order"):
        h = r.call("flip", lambda part: part.flip(1), h, numbers="1")
    if r.is_wrong("another rank's part"):
        h = moved(r, h)
    h = r.call("silu", functional.silu, h, numbers="False")
    if r.is_wrong("scaled on the way"):
        h = r.call("mul", lambda part: part * 2, h, numbers="2.0")
    if r.is_wrong("the largest of a part"):
        h = r.call("div", lambda part: part / part.abs().max(), h)
    out = r.call("linear", functional.linear, h, down)
    if r.is_wrong("bias before the sum"):
        out = r.call("add", torch.add, out, bias)
    if r.is_wrong("nonlinear before the sum"):
        out = r.call("tanh", torch.tanh, out)
    if r.is_wrong("sum of another axis") and "dp" in r.mesh.axes:
        out = summed(r, out, axis="dp")
    elif not r.is_wrong("no sum"):
        backward = "sum" if r.is_wrong("backward sums again") else "none" if r.is_wrong("no backward") else "copy"
        out = summed(r, out, backward=backward, times=1 / r.ways if r.is_wrong("average") else 1)
    if r.is_wrong("sum twice"):
        out = summed(r, out)
    if not r.is_wrong("bias before the sum"):
        out = r.call("add", torch.add, out, bias)
    return r.call("add", torch.add, x, out)


def residual_in_sum(r: Tape) -> Held:
    """A product by rows whose residual is added on one side of the sum."""
    x = r.input(numbers(5, ROWS, INNER), S0, S1)
    whole = r.input(numbers(6, ROWS, WIDTH), S0, R)
    down = r.weight("down", numbers(7, WIDTH, INNER), R, S1)
    scale = r.weight("scale", numbers(8, WIDTH), R, R)
    out = r.call("linear", functional.linear, x, down)
    if r.is_wrong("residual before the sum"):
        out = r.call("add", torch.add, out, whole)
        return summed(r, out)
    if r.is_wrong("squared before the sum"):
        out = r.call("pow", lambda part: part**2, out, numbers="2")
        return r.call("add", torch.add, summed(r, out), whole)
    if r.is_wrong("the product of terms"):
        out = r.call("mul", torch.mul, out, out)
    if r.is_wrong("returned before the sum"):
        return r.call("mul", torch.mul, out, scale)
    out = r.call("mul", torch.mul, summed(r, out), scale)
    return r.call("add", torch.add, out, whole)


def norm(r: Tape) -> Held:
    """A norm over features that ranks share."""
    x = r.input(numbers(11, ROWS, INNER), S0, S1)
    x = r.call("mul", torch.mul, x, r.weight("before", numbers(13, INNER), R, S0))
    gain = r.weight("gain", numbers(12, INNER), R, S0)
    squares = r.call("square", torch.square, x)
    squares = r.call("sum", lambda part: part.sum(-1, keepdim=True), squares, numbers="-1 True")
    if not r.is_wrong("of own features", "both of own"):
        squares = summed(r, squares, backward="copy" if r.is_wrong("no sum in backward") else "sum")
    count = INNER // r.ways if r.is_wrong("own count", "both of own") else INNER
    mean = r.call("div", lambda part: part / count, squares, numbers=str(count))
    if r.is_wrong("another epsilon"):
        mean = r.call("add", lambda part: part + 0.5, mean, numbers="0.5")
    else:
        mean = r.call("add", lambda part: part + 0.25, mean, numbers="0.25")
    root = r.call("rsqrt", torch.rsqrt, mean)
    out = r.call("mul", torch.mul, x, root)
    if r.is_wrong("gain of the next rank"):
        gain = moved(r, gain)
    return r.call("mul", torch.mul, out, gain)


def attention(r: Tape) -> Held:
    """Heads that ranks share, from one weight of queries, keys and values."""
    x = r.input(numbers(21, 6, WIDTH), R, R)
    size = 4
    heads = numbers(22, 3, 4, size, WIDTH)
    weights = [r.weight(f"of_{at}", heads[at].reshape(-1, WIDTH), R, S0) for at in range(3)]
    out = r.weight("out", numbers(23, WIDTH, 16), R, S1)
    given = copied(r, x)
    sides = [r.call("linear", functional.linear, given, weight) for weight in weights]
    query, key, part = (r.call("view", lambda side: side.view(6, -1, size).transpose(0, 1), side) for side in sides)
    if r.is_wrong("keys of the next rank"):
        key = moved(r, key)
    scores = r.call("matmul", lambda left, right: left @ right.transpose(1, 2), query, key)
    number = (16 if r.is_wrong("another root") else size) ** 0.5
    scores = r.call("div", lambda side: side / number, scores, numbers=str(number))
    dim = 1 if r.is_wrong("over queries") else 2
    scores = r.call("softmax", lambda side: side.softmax(dim), scores, numbers=str(dim))
    mixed = r.call("matmul", torch.matmul, scores, part)
    if r.is_wrong("heads not put back"):
        mixed = r.call("reshape", lambda side: side.reshape(6, -1), mixed)
    else:
        mixed = r.call("reshape", lambda side: side.transpose(0, 1).reshape(6, -1), mixed)
    made = r.call("linear", functional.linear, mixed, out)
    return made if r.is_wrong("no sum") else summed(r, made)


def fused(r: Tape) -> Held:
    """Two segments of one product: each rank has its part of both, or a contiguous part of the whole."""
    x = r.input(numbers(31, ROWS, WIDTH), S0, R)
    weight = numbers(32, 2 * INNER, WIDTH)
    if not r.is_wrong("a contiguous part"):
        weight = weight if r.is_whole else weight.view(2, r.ways, -1, WIDTH).transpose(0, 1).reshape(-1, WIDTH)
    both = r.weight("both", weight, R, S0, is_dealt=True)
    down = r.weight("down", numbers(33, WIDTH, INNER), R, S1)
    h = r.call("linear", functional.linear, copied(r, x), both)
    gate, up = r.cut("chunk", lambda part: part.chunk(2, -1), h, "2 -1")
    if r.is_wrong("halves exchanged"):
        gate, up = up, gate
    h = r.call("mul", torch.mul, r.call("silu", functional.silu, gate, numbers="False"), up)
    return summed(r, r.call("linear", functional.linear, h, down))


def vocabulary(r: Tape) -> Held:
    """Rows of a table that ranks share, looked up by words."""
    words = r.input(torch.as_tensor([1, 7, 3, 0, 5, 6, 2, 4, 7, 7, 1, 6]), R, R)
    table = r.weight("table", numbers(41, 8, WIDTH), R, S0)
    if r.is_whole:
        return r.call("embedding", lambda at, rows: rows[at], words, table)
    size = 8 // r.ways
    start = 0 if r.is_wrong("the first rows") else size
    local = r.call(
        "sub", lambda place, at: at - place * start, words, numbers=lambda place: str(place * start), by_place=True
    )
    inside = r.call("clamp", lambda at: at.clamp(0, size - 1), local, numbers=f"0 {size - 1}")
    rows = r.call("embedding", lambda at, part: part[at], inside, table)
    if not r.is_wrong("no mask"):
        mask = r.call("lt", lambda at, right: at != right, local, inside)
        rows = r.call("masked_fill", lambda part, at: part.masked_fill(at[:, None], 0.0), rows, mask, numbers="0.0")
    return rows if r.is_wrong("no sum") else summed(r, rows)


def experts(r: Tape) -> Held:
    """Rows that are sent to the rank of their experts, and back: each rank sends every rank as many."""
    x = r.input(numbers(51, 16, WIDTH), R, S0)
    weight = r.weight("experts", numbers(52, 4, WIDTH, WIDTH), R, S0)
    came = swapped(r, x)
    if r.is_wrong("scaled rows"):
        came = r.call("mul", lambda rows: rows * 1.5, came, numbers="1.5")
    if r.is_wrong("rows in another order"):
        came = r.call("flip", lambda rows: rows.flip(0), came, numbers="0")
    made = r.call("bmm", lambda rows, part: by_expert(rows, part, r.shares if r.is_whole else 1), came, weight)
    made = r.call("tanh", torch.tanh, made)
    if r.is_wrong("results in another order"):
        made = r.call("flip", lambda rows: rows.flip(0), made, numbers="0")
    return made if r.is_wrong("not sent back") else swapped(r, made)


def by_expert(rows: torch.Tensor, weight: torch.Tensor, shares: int) -> torch.Tensor:
    """Return each row times its expert's weight: stretches of as many rows go to the ranks that share experts."""
    length, of_share = len(rows) // shares // shares or len(rows), len(weight) // shares
    return torch.stack([row @ weight[at // length % shares * of_share + at % of_share] for at, row in enumerate(rows)])


def loop(r: Tape) -> Held:
    """A loop over the experts that a rank has, each times its gate."""
    x = r.input(numbers(61, 6, WIDTH), R, R)
    gates = r.input(numbers(62, 6, 4), R, R)
    weight = r.weight("experts", numbers(63, 4, WIDTH, WIDTH), R, S0)
    each = r.cut("unbind", lambda part: part.unbind(0), weight, "")
    total = None
    for number, expert in enumerate(each):
        made = r.call("matmul", torch.matmul, x, expert)
        gate = gate_of(r, gates, number, 0 if r.is_wrong("gates of the first experts") else len(each))
        made = r.call("mul", torch.mul, made, gate)
        total = made if total is None else r.call("add", torch.add, total, made)
    assert total is not None
    return total if r.is_wrong("no sum") else summed(r, total)


def gate_of(r: Tape, gates: Held, number: int, count: int) -> Held:
    """Return the column of an expert's gate, of which ranks have so many each."""

    def first(place: int) -> str:
        return f"1 {number + place * count}"

    def compute(place: int, part: torch.Tensor) -> torch.Tensor:
        return part[:, number + place * count :][:, :1]

    return r.call("select", compute, gates, numbers=first, by_place=True)
