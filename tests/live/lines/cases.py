"""Programs with a fault in one module, the line that must be named, and their right twins.

The lines were written down before the judge was run for the first time. A case without a line must not name any.
"""

from __future__ import annotations

from dataclasses import dataclass

HEAD = """
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, term, group, backward):
        ctx.group, ctx.backward_too = group, backward
        total = term.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        if ctx.backward_too:
            gradient = gradient.clone()
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None, None


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, group, dim):
        ctx.group, ctx.dim = group, dim
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(dist.get_world_size(ctx.group), ctx.dim)[dist.get_rank(ctx.group)], None, None


def summed(x, group, backward=False):
    return x if group is None else Sum.apply(x, group, backward)


def copied(x, group):
    return x if group is None else Copy.apply(x, group)


def gathered(x, group, dim):
    return x if group is None else Gather.apply(x, group, dim)


def own(parameter, mesh, dim=0):
    part = parameter.detach().chunk(mesh["tp"].size(), dim)[mesh["tp"].get_local_rank()]
    return nn.Parameter(part.clone())


class Part(nn.Module):
    tp, group, rank = 1, None, 0

    def split(self, mesh):
        self.tp, self.group, self.rank = mesh["tp"].size(), mesh.get_group("tp"), mesh["tp"].get_local_rank()
        for name, dim in self.dims.items():
            setattr(self, name, own(getattr(self, name), mesh, dim))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(8, 8), Block(), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.block(self.first(x)))


def build():
    return Model()


def parallelize(model, mesh):
    model.block.split(mesh)


def batch():
    return torch.randn(4, 6, 8)

"""


@dataclass(frozen=True)
class Case:
    """A fault and its right twin.

    Attributes:
        name: What is wrong.
        program: The right program.
        edits: Pairs of a text that stands once in the program and what the wrong one has instead.
        line: What the line that must be named contains; empty if none may be named.
        mesh: The mesh.
        is_between: Whether the line is not named yet: the finding names two lines between which it is.
        head: The source before the program.
    """

    name: str
    program: str
    edits: tuple[tuple[str, str], ...]
    line: str
    mesh: str = "tp=2"
    is_between: bool = False
    head: str = HEAD

    @property
    def right(self) -> str:
        """The right twin's source."""
        return self.head + self.program

    @property
    def wrong(self) -> str:
        """The wrong program's source."""
        text = self.right
        for right, wrong in self.edits:
            assert text.count(right) == 1, f"{self.name}: {right!r} stands {text.count(right)} times"
            text = text.replace(right, wrong)
        return text


NORMED = """
class Block(Part):
    dims = {"up": 0, "down": 1}

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(32, 8))
        self.down = nn.Parameter(torch.randn(8, 32))
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x):
        given = copied(x, self.group)
        h = F.silu(F.linear(given, self.up))
        squares = h.square().sum(-1, keepdim=True)
        squares = summed(squares, self.group, True)
        h = h * torch.rsqrt(squares / 32)
        out = F.linear(h, self.down)
        out = summed(out, self.group)
        out = out + self.bias
        return x + out
"""

ATTENTION = """
class Block(Part):
    dims = {"q": 0, "k": 0, "v": 0, "o": 1}
    heads = 4

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Parameter(torch.randn(32, 8)), nn.Parameter(torch.randn(32, 8))
        self.v, self.o = nn.Parameter(torch.randn(32, 8)), nn.Parameter(torch.randn(8, 32))

    def forward(self, x):
        given = copied(x, self.group)
        rows, length, _ = given.shape
        q, k, v = F.linear(given, self.q), F.linear(given, self.k), F.linear(given, self.v)
        q = q.view(rows, length, self.heads // self.tp, -1).transpose(1, 2)
        k = k.view(rows, length, self.heads // self.tp, -1).transpose(1, 2)
        v = v.view(rows, length, self.heads // self.tp, -1).transpose(1, 2)
        scores = q @ k.transpose(-1, -2)
        scores = scores / math.sqrt(q.shape[-1])
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        weights = scores.masked_fill(~mask, -1e9).softmax(-1)
        mixed = (weights @ v).transpose(1, 2).reshape(rows, length, -1)
        out = F.linear(mixed, self.o)
        return x + summed(out, self.group)
"""

VOCABULARY = """
class Block(Part):
    dims = {"head": 0, "table": 0}

    def __init__(self):
        super().__init__()
        self.head, self.table = nn.Parameter(torch.randn(20, 8)), nn.Parameter(torch.randn(20, 8))

    def forward(self, x):
        logits = F.linear(copied(x, self.group), self.head)
        logits = gathered(logits, self.group, -1)
        chances = logits.softmax(-1)
        tokens = logits.argmax(-1)
        first = self.rank * len(self.table)
        inside = (tokens >= first) & (tokens < first + len(self.table))
        rows = F.embedding((tokens - first).clamp(0, len(self.table) - 1), self.table)
        rows = rows * inside[..., None]
        rows = summed(rows, self.group)
        return x + rows * chances.amax(-1, keepdim=True)
"""

SEQUENCE = """
class Block(Part):
    dims = {}

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
        self.places = nn.Parameter(torch.randn(6, 8))

    def forward(self, x):
        given = copied(x, self.group)
        places, weight = copied(self.places, self.group), copied(self.q, self.group)
        part = given.chunk(self.tp, 1)[self.rank]
        length = part.shape[1]
        at = torch.arange(length) + self.rank * length
        q = F.linear(part + places[at], weight)
        k = F.linear(given, copied(self.k, self.group))
        scores = q @ k.transpose(-1, -2)
        mask = at[:, None] >= torch.arange(x.shape[1])[None]
        weights = scores.masked_fill(~mask, -1e9).softmax(-1)
        out = gathered(weights @ given, self.group, 1)
        return x + out
"""

EXPERTS = """
class Block(Part):
    dims = {"experts": 0}

    def __init__(self):
        super().__init__()
        self.router = nn.Parameter(torch.randn(4, 8))
        self.experts = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x):
        given = copied(x, self.group)
        gates = F.linear(given, copied(self.router, self.group)).softmax(-1)
        count = len(self.experts)
        own = gates[..., self.rank * count : (self.rank + 1) * count]
        each = torch.einsum("bsd,edf->bsef", given, self.experts)
        out = (each * own[..., None]).sum(-2)
        out = summed(out, self.group)
        return x + out
"""

LOOPED = """
class Block(Part):
    dims = {"experts": 0}

    def __init__(self):
        super().__init__()
        self.router = nn.Parameter(torch.randn(4, 8))
        self.experts = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x):
        given = copied(x, self.group)
        gates = F.linear(given, copied(self.router, self.group)).softmax(-1)
        first = self.rank * len(self.experts)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            gate = gates[..., first + number, None]
            out = out + F.linear(given, expert) * gate
        out = summed(out, self.group)
        return x + out
"""

IN_PLACE = """
class Block(Part):
    dims = {"up": 0, "down": 1}

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(32, 8)), nn.Parameter(torch.randn(8, 32))

    def forward(self, x):
        h = F.linear(copied(x, self.group), self.up).relu_()
        out = F.linear(h, self.down)
        out = summed(out, self.group)
        out += x
        return out.mul_(0.5)
"""

DTENSOR = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(32, 8)), nn.Parameter(torch.randn(8, 32))

    def forward(self, x):
        if isinstance(self.up, DTensor):
            x = DTensor.from_local(x, self.up.device_mesh, [Replicate()])
        h = F.linear(x, self.up).relu()
        out = F.linear(h, self.down)
        if isinstance(out, DTensor):
            out = out.redistribute(placements=[Replicate()]).to_local()
            x = x.to_local()
        out = torch.tanh(out)
        return x + out


def parallelize(model, mesh):
    for name, dim in (("up", 0), ("down", 1)):
        weight = distribute_tensor(getattr(model.block, name), mesh, [Shard(dim)])
        setattr(model.block, name, nn.Parameter(weight))
"""

FUNCTIONAL = """
class Block(Part):
    dims = {"up": 0, "gain": 0}

    def __init__(self):
        super().__init__()
        self.up, self.gain = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x):
        h = F.linear(copied(x, self.group), self.up)
        total = h.detach().sum(-1, keepdim=True)
        if self.group is not None:
            total = all_reduce(total, "sum", self.group)
        h = (h - total / 8) * self.gain
        if self.group is not None:
            h = gathered(h, self.group, -1)
        return x.detach() + h
"""

REPLACED = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        h = torch.tanh(self.up(x))
        return x + self.down(h)


class Split(nn.Module):
    def __init__(self, block, mesh):
        super().__init__()
        self.group = mesh.get_group("tp")
        self.up, self.down = block.up, block.down
        self.up.weight, self.up.bias = own(block.up.weight, mesh), own(block.up.bias, mesh)
        self.down.weight = own(block.down.weight, mesh, 1)

    def forward(self, x):
        given = copied(x, self.group)
        hidden = torch.tanh(self.up(given))
        terms = F.linear(hidden, self.down.weight)
        terms = summed(terms, self.group)
        return x + (terms + self.down.bias)


def parallelize(model, mesh):
    model.block = Split(model.block, mesh)
"""

CASES = (
    Case(
        "statistics of the local columns",
        NORMED,
        (("squares = summed(squares, self.group, True)", "squares = squares * self.tp"),),
        "* self.tp",
    ),
    Case("no sum", NORMED, (("out = summed(out, self.group)\n", "\n"),), "out = out + self.bias"),
    Case(
        "bias before the sum",
        NORMED,
        (
            ("out = summed(out, self.group)\n", "out = out + self.bias\n"),
            ("        out = out + self.bias\n        return", "        out = summed(out, self.group)\n        return"),
        ),
        "out = out + self.bias",
    ),
    Case("sum twice", NORMED, (("x + out\n", "x + summed(out, self.group)\n"),), "x + summed(out"),
    Case(
        "sum without its backward",
        NORMED,
        (("squares = summed(squares, self.group, True)", "squares = summed(squares, self.group)"),),
        "squares = summed(",
    ),
    Case("no backward of the input", NORMED, (("given = copied(x, self.group)", "given = x"),), "F.linear(given"),
    Case("divided by the local width", NORMED, (("squares / 32", "squares / h.shape[-1]"),), "squares / "),
    Case(
        "norm of local features",
        NORMED,
        (("h = h * torch.rsqrt(squares / 32)", "h = F.rms_norm(h, h.shape[-1:])"),),
        "F.rms_norm",
    ),
    Case(
        "backward sums a whole gradient",
        NORMED,
        (("out = summed(out, self.group)\n", "out = summed(out, self.group, True)\n"),),
        "out = summed(",
    ),
    Case(
        "global number of heads on a shard",
        ATTENTION,
        (
            ("q = q.view(rows, length, self.heads // self.tp, -1)", "q = q.view(rows, length, self.heads, -1)"),
            ("k = k.view(rows, length, self.heads // self.tp, -1)", "k = k.view(rows, length, self.heads, -1)"),
            ("v = v.view(rows, length, self.heads // self.tp, -1)", "v = v.view(rows, length, self.heads, -1)"),
        ),
        ".view(rows, length, self.heads, -1)",
    ),
    Case(
        "scale by the local number of features",
        ATTENTION,
        (("math.sqrt(q.shape[-1])", "math.sqrt(self.q.shape[0] / 4)"),),
        "self.q.shape[0] / 4",
    ),
    Case(
        "heads and features exchanged",
        ATTENTION,
        (
            ("(weights @ v).transpose(1, 2).reshape", "(weights @ v).reshape"),
            (
                "v = v.view(rows, length, self.heads // self.tp, -1).transpose(1, 2)",
                "v = v.view(rows, length, self.heads // self.tp, -1).transpose(1, 2) if self.tp == 1 else "
                "v.view(rows, length, -1, self.heads // self.tp).permute(0, 3, 1, 2)",
            ),
        ),
        "v.view(rows, length, -1,",
    ),
    Case(
        "gather along the wrong dim",
        VOCABULARY,
        (("gathered(logits, self.group, -1)", "gathered(logits, self.group, 1).view(*logits.shape[:2], -1)"),),
        "gathered(logits",
    ),
    Case(
        "softmax over a shard",
        VOCABULARY,
        (
            ("        chances = logits.softmax(-1)\n", ""),
            (
                "        logits = gathered(logits, self.group, -1)\n",
                "        chances = logits.softmax(-1)\n        logits = gathered(logits, self.group, -1)\n"
                "        chances = gathered(chances, self.group, -1)\n",
            ),
        ),
        "logits.softmax(-1)",
    ),
    Case(
        "rows of other ranks' tokens",
        VOCABULARY,
        (("rows = rows * inside[..., None]", "rows = rows * 1.0"),),
        "rows = F.embedding(",
    ),
    Case(
        "largest of a shard",
        VOCABULARY,
        (
            ("        tokens = logits.argmax(-1)\n", ""),
            (
                "        logits = gathered(logits, self.group, -1)\n",
                "        tokens = logits.argmax(-1)\n        logits = gathered(logits, self.group, -1)\n",
            ),
        ),
        "logits.argmax(-1)",
        is_between=True,
    ),
    Case(
        "positions counted within the part",
        SEQUENCE,
        (("at = torch.arange(length) + self.rank * length", "at = torch.arange(length)"),),
        "at = torch.arange(length)",
    ),
    Case(
        "mask counted within the part",
        SEQUENCE,
        (("mask = at[:, None] >= ", "mask = torch.arange(length)[:, None] >= "),),
        "mask = torch.arange(length)",
    ),
    Case(
        "running sum over a split sequence",
        SEQUENCE,
        (("q = F.linear(part + places[at], weight)", "q = F.linear(part.cumsum(1) + places[at], weight)"),),
        "part.cumsum(1)",
    ),
    Case(
        "gates of the first experts",
        EXPERTS,
        (("gates[..., self.rank * count : (self.rank + 1) * count]", "gates[..., :count]"),),
        "gates[..., :count]",
    ),
    Case(
        "softmax over a rank's experts",
        EXPERTS,
        (
            (".softmax(-1)\n", "\n"),
            ("(self.rank + 1) * count]\n", "(self.rank + 1) * count].softmax(-1)\n"),
        ),
        "own = gates",
    ),
    Case("gates of the first experts, in a loop", LOOPED, (("first + number, None", "number, None"),), ""),
    Case(
        "residual within the sum, in place",
        IN_PLACE,
        (
            (
                "        out = summed(out, self.group)\n        out += x\n",
                "        out += x\n        out = summed(out, self.group)\n",
            ),
        ),
        "out += x",
    ),
    Case(
        "nonlinear before the sum, in place",
        IN_PLACE,
        (("out = F.linear(h, self.down)\n", "out = F.linear(h, self.down).tanh_().clone()\n"),),
        ".tanh_()",
    ),
    Case(
        "terms taken as the whole",
        DTENSOR,
        (("out.redistribute(placements=[Replicate()]).to_local()", "out.to_local()"),),
        "out = torch.tanh(out)",
    ),
    Case(
        "terms labeled as copies",
        DTENSOR,
        (
            (
                "out.redistribute(placements=[Replicate()])",
                "DTensor.from_local(out.to_local(), out.device_mesh, [Replicate()])",
            ),
        ),
        "out = torch.tanh(out)",
    ),
    Case(
        "average for a sum",
        FUNCTIONAL,
        (('all_reduce(total, "sum", self.group)', 'all_reduce(total, "avg", self.group)'),),
        '"avg"',
    ),
    Case(
        "mean of local columns",
        FUNCTIONAL,
        (('total = all_reduce(total, "sum", self.group)', "total = total * self.tp"),),
        "total = total * self.tp",
    ),
    Case(
        "replaced class, no sum",
        REPLACED,
        (("terms = summed(terms, self.group)\n", "\n"),),
        "terms + self.down.bias",
    ),
    Case(
        "replaced class, nonlinear twice",
        REPLACED,
        (("terms = F.linear(hidden, self.down.weight)", "terms = F.linear(torch.tanh(hidden), self.down.weight)"),),
        "F.linear(torch.tanh(hidden)",
    ),
    Case(
        "sum over the wrong axis",
        NORMED,
        (
            (
                'self.group, self.rank = mesh["tp"].size(), mesh.get_group("tp")',
                'self.group, self.rank = mesh["tp"].size(), mesh.get_group("dp")',
            ),
        ),
        "squares = summed(",
        "dp=2,tp=2",
    ),
)
"""Every case; the expectations of lines stand beside the edits."""
