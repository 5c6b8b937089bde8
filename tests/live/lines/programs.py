"""Programs of `cases`: a module each, whose ranks do right."""

from __future__ import annotations

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
