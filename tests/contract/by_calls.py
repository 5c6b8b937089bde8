"""`python -m tests.contract.by_calls`: the room `calls`, of what ranks call inside of a module, made by rule.

Small modules, as tensor-parallel, context-parallel and expert-parallel code has them, are run for all ranks in one
process (`taping`), each of them right and with every mistake that its `Tape.is_wrong` names; so are the steps around a
model of `taped_steps`. Meshes take turns.
"""

from __future__ import annotations

import inspect
import re
import tempfile
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from shardviz.layout.mesh import parse_mesh
from tests.contract import store
from tests.contract.choosing import chosen
from tests.contract.judge import IN_MEMORY, judge_room, record
from tests.contract.step_changes import S0, S1, R
from tests.contract.taped_steps import BOTH, STEPS, step_of
from tests.contract.taping import Held, Tape, copied, dump_of, joined, moved, summed, swapped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.contract.by_step import Step
    from tests.contract.taping import Program

ROOM = "calls"
MOST_ALIKE = 2
MESHES = tuple(map(parse_mesh, ("tp=2", "dp=2,tp=2", "tp=4")))
ROWS, WIDTH, INNER = 8, 4, 8
SUM = "Partial()"


def numbers(seed: int, *shape: int) -> torch.Tensor:
    """Return numbers of few digits, always the same ones."""
    return torch.as_tensor(np.random.default_rng(seed).standard_normal(shape).round(3), dtype=torch.float32)


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
    gate, up = r.call("chunk", lambda part: part.chunk(2, -1), h, numbers="2 -1")
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
    made = r.call("bmm", lambda rows, part: _by_expert(rows, part, r.shares if r.is_whole else 1), came, weight)
    made = r.call("tanh", torch.tanh, made)
    if r.is_wrong("results in another order"):
        made = r.call("flip", lambda rows: rows.flip(0), made, numbers="0")
    return made if r.is_wrong("not sent back") else swapped(r, made)


def _by_expert(rows: torch.Tensor, weight: torch.Tensor, shares: int) -> torch.Tensor:
    """Return each row times its expert's weight: stretches of as many rows go to the ranks that share experts."""
    length, of_share = len(rows) // shares // shares or len(rows), len(weight) // shares
    return torch.stack([row @ weight[at // length % shares * of_share + at % of_share] for at, row in enumerate(rows)])


def loop(r: Tape) -> Held:
    """A loop over the experts that a rank has, each times its gate."""
    x = r.input(numbers(61, 6, WIDTH), R, R)
    gates = r.input(numbers(62, 6, 4), R, R)
    weight = r.weight("experts", numbers(63, 4, WIDTH, WIDTH), R, S0)
    each = r.call("unbind", lambda part: part.unbind(0), weight)
    each = each if isinstance(each, tuple) else (each,)
    total = None
    for number, expert in enumerate(each):
        made = r.call("matmul", torch.matmul, x, expert)
        count, first = len(each), 0 if r.is_wrong("gates of the first experts") else 1
        gate = r.call(
            "select",
            lambda place, part, at=number, by=first, of=count: part[:, at + place * of * by : at + place * of * by + 1],
            gates,
            numbers=lambda place, at=number, by=first, of=count: f"1 {at + place * of * by}",
            by_place=True,
        )
        made = r.call("mul", torch.mul, made, gate)
        total = made if total is None else r.call("add", torch.add, total, made)
    assert total is not None
    return total if r.is_wrong("no sum") else summed(r, total)


def positions(r: Tape) -> Held:
    """Tokens that ranks share, with numbers of their places."""
    x = r.input(numbers(71, ROWS, WIDTH), R, S0)
    table = r.weight("table", numbers(72, ROWS, WIDTH), R, R)
    size = ROWS // r.ways
    step = 0 if r.is_wrong("from zero") else 1 if r.is_wrong("by one") else size
    begin = {place: place * step for place in range(r.ways)}
    if r.is_wrong("the next part"):
        begin = {place: (place + 1) % r.ways * size for place in range(r.ways)}
    rows = r.call(
        "narrow",
        lambda place, part: part[begin[place] : begin[place] + size],
        table,
        numbers=lambda place: f"0 {begin[place]} {size}",
        by_place=True,
    )
    out = r.call("add", torch.add, x, rows)
    if r.is_wrong("a running sum of a part"):
        return r.call("cumsum", lambda part: part.cumsum(0), out, numbers="0")
    every = out if r.is_whole else joined(r, out, 0, order=-1 if r.is_wrong("backwards") else 1)
    total = r.call("cumsum", lambda part: part.cumsum(0), every, numbers="0")
    if r.is_whole:
        return total
    return r.call(
        "narrow",
        lambda place, part: part[place * size : (place + 1) * size],
        total,
        numbers=lambda place: f"0 {place * size} {size}",
        by_place=True,
    )


def masked(r: Tape) -> Held:
    """Attention of a rank's queries to all keys, under a causal mask."""
    x = r.call("mul", torch.mul, r.input(numbers(81, ROWS, WIDTH), R, S0), r.weight("gain", numbers(82, WIDTH), R, R))
    size = ROWS // r.ways
    every = x if r.is_whole else joined(r, x, 0, backward="none" if r.is_wrong("no backward") else "sum")
    scores = r.call("matmul", lambda own, keys: own @ keys.T, x, every)
    step = 0 if r.is_wrong("queries from zero") else size
    at = r.call(
        "arange",
        lambda place, part: torch.arange(size) + place * step + 0 * part[:, 0].detach().long(),
        x,
        numbers=lambda place: str(place * step),
        by_place=True,
    )
    mask = r.call("le", lambda rows: torch.arange(ROWS)[None, :] <= rows[:, None], at)
    bias = r.call("where", lambda right: torch.where(right, 0.0, -1e4), mask, numbers="-10000.0")
    scores = r.call("add", torch.add, scores, bias)
    if r.is_wrong("a part of the keys"):
        weights = r.call("softmax", lambda part: part.softmax(0), scores, numbers="0")
    else:
        weights = r.call("softmax", lambda part: part.softmax(1), scores, numbers="1")
    return r.call("matmul", torch.matmul, weights, every)


def causal(r: Tape) -> Held:
    """torch's own attention, of a rank's queries to all keys."""
    x = r.input(numbers(83, 1, ROWS, WIDTH), R, S1)
    every = x if r.is_whole else joined(r, x, 1)
    if r.is_whole or r.is_wrong("causal of a part"):
        compute = lambda own, keys, parts: functional.scaled_dot_product_attention(own, keys, parts, is_causal=True)  # noqa: E731
        return r.call("scaled_dot_product_attention", compute, x, every, every, numbers="True")
    size = ROWS // r.ways

    def compute_part(place: int, own: torch.Tensor, keys: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(size) + (0 if r.is_wrong("a mask from zero") else place * size)
        mask = torch.arange(ROWS)[None, :] <= rows[:, None]
        return functional.scaled_dot_product_attention(own, keys, parts, attn_mask=mask)

    return r.call("scaled_dot_product_attention", compute_part, x, every, every, by_place=True)


def labels(r: Tape) -> Held:
    """A product by rows whose result is called something, and made whole by that."""
    x = r.input(numbers(91, ROWS, INNER), S0, S1)
    down = r.weight("down", numbers(92, WIDTH, INNER), R, S1)
    out = r.call("linear", functional.linear, x, down)
    if r.is_whole:
        return r.call("relu", torch.relu, out)
    if r.is_wrong("the whole called terms"):
        out = summed(r, out)
    label = "Replicate()" if r.is_wrong("terms called the whole") else SUM
    out = r.call("_FromTorchTensor", lambda part: part.clone(), out, placements=label)
    if label == SUM:
        out = summed(r, out, name="Redistribute")
    out = r.call("_ToTorchTensor", lambda part: part.clone(), out)
    return r.call("relu", torch.relu, out)


def padding(r: Tape) -> Held:
    """Logits of a padded vocabulary that ranks share: the unsharded model cuts the padding off."""
    x = r.input(numbers(101, 6, WIDTH), R, R)
    words = r.weight("words", numbers(102, 8, WIDTH), R, S0)
    logits = r.call("linear", functional.linear, copied(r, x), words)
    if r.is_whole:
        logits = r.call("getitem", lambda part: part[:, :7], logits)
    elif not r.is_wrong("padding counted"):
        size = 8 // r.ways
        logits = r.call(
            "masked_fill",
            lambda place, part: part.masked_fill(torch.arange(size) + place * size > 6, -1e9),
            logits,
            numbers="-1000000000.0",
            by_place=True,
        )
    powers = r.call("exp", torch.exp, logits)
    total = r.call("sum", lambda part: part.sum(1, keepdim=True), powers, numbers="1 True")
    total = total if r.is_wrong("no sum") else summed(r, total)
    return r.call("log", torch.log, total)


def room(r: Tape) -> Held:
    """Rows gathered into memory that is made before."""
    x = r.input(numbers(111, ROWS, WIDTH), R, S0)
    weight = r.weight("mix", numbers(112, WIDTH, ROWS), R, R)
    if r.is_whole:
        every = x
    else:
        junk = numbers(113, ROWS, WIDTH) * 1e3
        empty = r.call("empty", lambda place, part: junk * (1 + place) + 0 * part[:1], x, by_place=True)
        every = empty if r.is_wrong("not gathered") else joined(r, x, 0, into=empty)
        if r.is_wrong("gathered elsewhere"):
            every = r.call("clone", torch.clone, empty)
    out = r.call("matmul", torch.matmul, weight, every)
    return r.call("tanh", torch.tanh, out)


def ratio(r: Tape) -> Held:
    """A mean over rows that ranks share, with weights."""
    x = r.input(numbers(121, ROWS, INNER), R, S0)
    by = r.input(numbers(122, ROWS, 1).abs() + 0.5, R, S0)
    total = r.call("sum", lambda part: part.sum(0), r.call("mul", torch.mul, x, by), numbers="0")
    count = r.call("sum", lambda part: part.sum(0), by, numbers="0")
    if r.is_wrong("quotients summed"):
        return summed(r, r.call("div", torch.div, total, count))
    if not r.is_wrong("own mean", "own total"):
        total = summed(r, total, backward="sum")
    if not r.is_wrong("own mean", "own count"):
        count = summed(r, count, backward="sum")
    return r.call("div", torch.div, total, count)


def replaced(r: Tape) -> Held:
    """A class in the place of another: ranks' lines are not those of the unsharded model."""
    x = r.input(numbers(131, ROWS, WIDTH), S0, R)
    up = r.weight("up", numbers(132, INNER, WIDTH), R, S0)
    down = r.weight("down", numbers(133, WIDTH, INNER), R, S1)
    bias = r.weight("bias", numbers(134, WIDTH), R, R)
    if r.is_whole:
        h = r.call("linear", functional.linear, x, up)
        h = r.call("gelu", functional.gelu, h, numbers="'none'")
        return r.call("linear", functional.linear, h, down, bias)
    given = copied(r, x)
    h = r.call("linear", functional.linear, given, up)
    h = r.call("gelu", functional.gelu, h, numbers="'none'")
    if r.is_wrong("nonlinear twice"):
        h = r.call("gelu", functional.gelu, h, numbers="'none'")
    if r.is_wrong("bias in each term"):
        return summed(r, r.call("linear", functional.linear, h, down, bias))
    out = r.call("linear", functional.linear, h, down)
    if not r.is_wrong("no sum"):
        out = summed(r, out)
    return out if r.is_wrong("no bias") else r.call("add", torch.add, out, bias)


def branches(r: Tape) -> Held:
    """One tensor that two branches read: one of them has the rank's part of it, or of a product."""
    x = r.input(numbers(141, ROWS, WIDTH), S0, R)
    up = r.weight("up", numbers(142, INNER, WIDTH), R, S0)
    down = r.weight("down", numbers(143, WIDTH, INNER), R, S1)
    side = r.weight("side", numbers(144, WIDTH, WIDTH), R, R)
    h = r.call("mul", torch.mul, x, r.weight("gain", numbers(145, WIDTH), R, R))
    given = h if r.is_wrong("no copy for the branch") else copied(r, h)
    inner = r.call("linear", functional.linear, given, up)
    out = summed(r, r.call("linear", functional.linear, inner, down))
    beside = r.call("linear", functional.linear, given if r.is_wrong("the copy for both") else h, side)
    out = r.call("add", torch.add, out, beside)
    return r.call("add", torch.add, out, h)


def drawn(r: Tape) -> Held:
    """Numbers that are dropped at random."""
    x = r.input(numbers(151, ROWS, INNER), R, R)

    def compute(place: int, part: torch.Tensor) -> torch.Tensor:
        seed = 5 if r.is_wrong("another state") else place if r.is_wrong("own seed") else 0
        mask = torch.rand(part.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
        return part * mask * 2

    h = r.call("dropout", compute, x, numbers="0.5", by_place=True)
    return r.call("mul", lambda part: part * 3, h, numbers="3.0")


def gathered(r: Tape) -> Held:
    """Rows that ranks share, gathered for a product and shared again."""
    x = r.input(numbers(161, ROWS, WIDTH), R, S0)
    x = r.call("mul", torch.mul, x, r.weight("gain", numbers(164, WIDTH), R, R))
    up = r.weight("up", numbers(162, INNER, WIDTH), R, S0)
    down = r.weight("down", numbers(163, WIDTH, INNER), R, S1)
    backward = "part" if r.is_wrong("no sum in backward") else "none" if r.is_wrong("no backward") else "sum"
    every = x if r.is_whole else joined(r, x, 0, order=-1 if r.is_wrong("backwards") else 1, backward=backward)
    h = r.call("silu", functional.silu, r.call("linear", functional.linear, every, up), numbers="False")
    out = r.call("linear", functional.linear, h, down)
    if r.is_whole:
        return out
    out = out if r.is_wrong("no sum") else summed(r, out, backward="sum")
    size = ROWS // r.ways
    shift = 1 if r.is_wrong("the next part") else 0
    return r.call(
        "narrow",
        lambda place, part: part[(place + shift) % r.ways * size :][:size],
        out,
        numbers=lambda place: f"0 {(place + shift) % r.ways * size} {size}",
        by_place=True,
    )


PROGRAMS: dict[Program, tuple[str, str]] = {
    **dict.fromkeys((mlp, residual_in_sum, fused, labels, replaced, branches), (S0, R)),
    **dict.fromkeys((attention, vocabulary, loop, padding, room, ratio, drawn), (R, R)),
    **dict.fromkeys((experts, positions, masked, gathered), (R, S0)),
    norm: (S0, S1),
    causal: (R, S1),
}
"""The modules, with the placements of what they return."""


def bugs_of(*functions: Callable[..., object]) -> list[str]:
    """Return the mistakes that some functions name."""
    calls = re.findall(r"is_wrong\(([^)]*)\)", "".join(map(inspect.getsource, functions)))
    return list(dict.fromkeys(text for call in calls for text in re.findall(r'"([^"]*)"', call)))


def modules() -> Iterator[tuple[str, Step]]:
    """Yield every module right and with each mistake, on two ranks and on another mesh."""
    for program in PROGRAMS:
        for at, bug in enumerate(("", *bugs_of(program))):
            for mesh in (MESHES[0], MESHES[1 + at % 2]):
                size = "x".join(map(str, mesh.shape))
                yield f"{program.__name__} {bug or 'right'}, {size}", dump_of(program, mesh, bug, PROGRAMS[program])


def steps() -> Iterator[tuple[str, Step]]:
    """Yield every step right and with each mistake."""
    for program, (_, helpers) in STEPS.items():
        for bug in ("", *bugs_of(program, *helpers), BOTH):
            mesh = parse_mesh("dp=2,tp=2" if bug == BOTH else "dp=2,tp=1")
            yield f"{program.__name__} {bug or 'right'}", step_of(program, mesh, bug)


def main() -> None:
    """Make the room, judge it, and keep what is judged in many ways."""
    room_ = store.Room(ROOM)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        for at, (name, step) in enumerate(chain(modules(), steps())):
            room_.add(name, ("check", "{0}"), [store.files_of(step.write(Path(folder, f"{at}.shardviz")))])
        room_.keep(chosen(judge_room(room_), MOST_ALIKE, program_of))
    record(room_)


def program_of(name: str) -> str:
    """Return the program's name."""
    return name.partition(" ")[0]


if __name__ == "__main__":
    main()
