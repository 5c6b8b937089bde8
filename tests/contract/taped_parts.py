"""Modules whose rows, tokens or results ranks share, as context-parallel code has them, right and with mistakes."""

from __future__ import annotations

import torch
from torch.nn import functional

from tests.contract.step_changes import S0, S1, R
from tests.contract.taping import Held, Tape, copied, joined, numbers, summed

ROWS, WIDTH, INNER = 8, 4, 8
SUM = "Partial()"


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


def hooked(r: Tape) -> Held:
    """A product by rows, whose sum a hook makes of what the module returns."""
    x = r.input(numbers(171, ROWS, INNER), S0, S1)
    down = r.weight("down", numbers(172, WIDTH, INNER), R, S1)
    out = r.call("linear", functional.linear, x, down)
    if r.is_wrong("scaled before"):
        out = r.call("mul", lambda part: part * 2, out, numbers="2.0")
    if r.is_whole:
        return out
    made = list(out.parts)
    if not r.is_wrong("no sum"):
        parts = dict(zip(r.mesh.ranks, out.parts, strict=True))
        groups = [[parts[other] for other in r.mesh.group_of(rank, "tp")] for rank in r.mesh.ranks]
        totals = [torch.stack(group).sum(0).detach() for group in groups]
        made = [total + part - part.detach() for total, part in zip(totals, out.parts, strict=True)]
    if r.is_wrong("halved by the hook"):
        made = [part / 2 for part in made]
    return r.outside([part * 1 for part in made])


def noise(r: Tape) -> Held:
    """Random numbers of no other tensor's, which are added."""
    x = r.input(numbers(181, ROWS, INNER), S0, R)

    def compute(place: int) -> torch.Tensor:
        seed = 5 if r.is_wrong("another state") else place if r.is_wrong("own seed") else 0
        return torch.rand(INNER, generator=torch.Generator().manual_seed(seed))

    drawn_ = r.call("rand", compute, numbers=str(INNER), by_place=True)
    mask = r.call("bernoulli", lambda part: (part > 0.5).float(), drawn_)
    return r.call("mul", torch.mul, r.call("add", torch.add, x, drawn_), mask)


def heads_of_keys(r: Tape) -> Held:
    """Queries of more heads than keys have, of which ranks share both or the queries alone."""
    x = r.input(numbers(191, 4, 6, 3), R, S0)
    keys = r.input(numbers(192, 2, 6, 3), R, R)
    size = max(1, 2 // r.ways)
    shift = 1 if r.is_wrong("keys of the next head") else 0
    own = r.call(
        "narrow",
        lambda place, part: part.roll(shift, 0)[place * 2 // r.ways :][:size],
        keys,
        numbers=lambda place: f"0 {(place + shift) * 2 // r.ways} {size}",
        by_place=True,
    )
    every = r.call(
        "repeat_interleave", lambda part: part.repeat_interleave(4 // r.ways // size or 1, 0), own, numbers="2 0"
    )
    is_causal = r.is_wrong("no mask")
    compute = lambda a, b, c: functional.scaled_dot_product_attention(a, b, c, is_causal=not is_causal)  # noqa: E731
    return r.call("scaled_dot_product_attention", compute, x, every, every, numbers=str(not is_causal))


def counted(r: Tape) -> Held:
    """Tokens of experts, whose places are counted along a split sequence, and a table that is read at them."""
    x = r.input(torch.as_tensor([[1.0], [0], [1], [1], [0], [1], [0], [1]]), R, S0)
    table = r.input(numbers(202, 9, WIDTH), R, R)
    if not r.is_whole and not r.is_wrong("counted in a part"):
        every = joined(r, x, 0)
        counts = r.call("cumsum", lambda part: part.cumsum(0), every, numbers="0")
        size = ROWS // r.ways
        counts = r.call(
            "narrow",
            lambda place, part: part[place * size :][:size],
            counts,
            numbers=lambda place: f"0 {place * size} {size}",
            by_place=True,
        )
    else:
        counts = r.call("cumsum", lambda part: part.cumsum(0), x, numbers="0")
    places = r.call("long", lambda part: part.long()[:, 0], counts)
    rows = r.call("index_select", lambda part, at: part[at], table, places)
    out = r.call("mul", torch.mul, rows, counts)
    every = out if r.is_whole else joined(r, out, 0)
    total = r.call("sum", lambda part: part.sum(0, keepdim=True), every, numbers="0 True")
    return r.call("div", torch.div, out, r.call("add", lambda part: part.abs() + 1, total, numbers="1"))


def rolled(r: Tape) -> Held:
    """Each token beside the one before it: what crosses the end of a rank's part comes from the rank before."""
    x = r.call("mul", torch.mul, r.input(numbers(211, ROWS, WIDTH), R, S0), r.weight("gain", numbers(212, WIDTH), R, R))
    size = ROWS // r.ways
    every = x if r.is_whole or r.is_wrong("a part by itself") else joined(r, x, 0)
    before = r.call("roll", lambda part: part.roll(1, 0), every, numbers="1 0")
    if not r.is_whole and not r.is_wrong("a part by itself"):
        before = r.call(
            "narrow",
            lambda place, part: part[place * size :][:size],
            before,
            numbers=lambda place: f"0 {place * size} {size}",
            by_place=True,
        )
    return r.call("mul", torch.mul, x, before)
