"""Programs of `cases`, right on all ranks: a module each, or a loss, a training step and an optimizer."""

from __future__ import annotations

HEAD = """
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


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


def summed(x, group, backward=False):
    return x if group is None else Sum.apply(x, group, backward)


def copied(x, group):
    return x if group is None else Copy.apply(x, group)


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

STEP_HEAD = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None

"""

VOCABULARY = """
AXES = ("tp",)
WORDS = 24


class Speaker(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(16, 12), nn.Linear(12, WORDS, bias=False)

    def forward(self, x):
        return self.head(self.body(x).relu())


def build():
    return Speaker()


def parallelize(model, mesh):
    parallelize_module(model, mesh["tp"], {"head": ColwiseParallel(output_layouts=Shard(-1))})


def batch():
    return torch.randn(10, 16), torch.randint(WORDS, (10,))


def loss(model, batch):
    x, words = batch
    return F.cross_entropy(model(x), words)


def step(model, batch, mesh):
    x, words = batch
    group = mesh.get_group("tp")
    logits = model(x)
    size = logits.shape[-1]
    start = mesh.get_local_rank("tp") * size
    top = logits.detach().amax(-1, keepdim=True)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    logits = logits - top
    normal = Sum.apply(logits.exp().sum(-1), group).log()
    is_here = (words >= start) & (words < start + size)
    chosen = logits.gather(-1, (words - start).clamp(0, size - 1)[:, None])[:, 0]
    chosen = Sum.apply(chosen.masked_fill(~is_here, 0), group)
    value = (normal - chosen).mean()
    value.backward()
    return value
"""

BY_HAND = """
AXES = BATCH_AXES = ("dp",)
SCALE = 64.0


def build():
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 6))


def parallelize(model, mesh):
    pass


def batch():
    return torch.randn(8, 8), torch.randn(8, 6)


def loss(model, batch):
    x, target = batch
    return (model(x) - target).square().mean()


@torch.no_grad()
def unscale(model):
    for p in model.parameters():
        p.grad.div_(SCALE)


@torch.no_grad()
def average(model, group):
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad /= dist.get_world_size(group)


def step(model, batch, mesh):
    value = loss(model, batch)
    (value * SCALE).backward()
    average(model, mesh.get_group("dp"))
    unscale(model)
    return value
"""

TRUSTED = """
AXES = BATCH_AXES = ("fsdp",)


def local_of(x):
    return x.to_local() if isinstance(x, DTensor) else x


def norm_of(part, mesh):
    square = part.square().sum()
    if mesh is not None:
        dist.all_reduce(square, group=mesh.get_group())
    return square.sqrt()


class Lars(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                mesh = p.device_mesh if isinstance(p, DTensor) else None
                weight, grad = local_of(p), local_of(p.grad)
                trust = norm_of(weight, mesh) / norm_of(grad, mesh)
                weight.add_(grad * trust, alpha=-group["lr"])


def build():
    return nn.Sequential(nn.Linear(8, 24, bias=False), nn.Tanh(), nn.Linear(24, 6, bias=False))


def parallelize(model, mesh):
    fully_shard(model, mesh=mesh)


def batch():
    return torch.randn(8, 8)


def optimizer(model, mesh):
    return Lars(model.parameters(), lr=0.1)
"""
