"""Adapters beside hand-cut layers, and layers that gather what they put out."""

from __future__ import annotations

from tests.bugs.case import Bug

GATHERED = """
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(distributed.get_world_size(ctx.group), -1)[distributed.get_rank(ctx.group)].contiguous(), None


class Column(nn.Linear):
    group = None

    def forward(self, x):
        if self.group is None:
            return super().forward(x)
        return Gather.apply(super().forward(Copy.apply(x, self.group)), self.group)


def build():
    return nn.Sequential(Column(8, 12), nn.Tanh(), Column(12, 8), nn.Tanh(), nn.Linear(8, 4))


def parallelize(model, mesh):
    rank, size = mesh["tp"].get_local_rank(), mesh["tp"].size()
    for layer in (model[0], model[2]):
        layer.group = mesh.get_group("tp")
        layer.weight = nn.Parameter(layer.weight.detach().chunk(size)[rank].clone())
        layer.bias = nn.Parameter(layer.bias.detach().chunk(size)[rank].clone())


def batch():
    return torch.randn(6, 8)

"""

ADAPTED = """
class LoRA(nn.Module):
    group = None

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.base = nn.Linear(8, 8, bias=False)
        self.a = nn.Linear(8, 2, bias=False)
        self.b = nn.Linear(2, 8, bias=False)
        self.base.weight.requires_grad_(False)

    def forward(self, x):
        if self.group is None:
            return self.base(x) + self.b(self.a(x))
        if self.kind == "column":
            low = self.a(x)
            return self.base(Copy.apply(x, self.group)) + self.b(Copy.apply(low, self.group))
        low = Sum.apply(self.a(x), self.group)
        return Sum.apply(self.base(x), self.group) + self.b(low)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.up = LoRA("column")
        self.down = LoRA("row")

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return x + self.down(torch.tanh(self.up(x)))


def build():
    return Net()


def parallelize(model, mesh):
    rank, size = mesh["tp"].get_local_rank(), mesh["tp"].size()
    model.up.group = model.down.group = mesh.get_group("tp")
    model.up.base.weight = nn.Parameter(model.up.base.weight.detach().chunk(size)[rank].clone(), requires_grad=False)
    model.up.b.weight = nn.Parameter(model.up.b.weight.detach().chunk(size)[rank].clone())
    part = model.down.base.weight.detach().chunk(size, 1)[rank].clone()
    model.down.base.weight = nn.Parameter(part, requires_grad=False)
    model.down.a.weight = nn.Parameter(model.down.a.weight.detach().chunk(size, 1)[rank].clone())


def batch():
    return torch.randn(6, 8)

"""

FUSED = """
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


class GateUp(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.base = nn.Parameter(torch.randn(16, 8) / 4, requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.zeros(16, 2))
        self.down = nn.Parameter(torch.randn(8, 8) / 4)

    def forward(self, x):
        b, down = (one.to_local() if isinstance(one, DTensor) else one for one in (self.b, self.down))
        low = x @ self.a.T
        if self.group is not None:
            x, low = Copy.apply(x, self.group), Copy.apply(low, self.group)
        gate, up = (x @ self.base.T + low @ b.T).chunk(2, -1)
        out = (torch.tanh(gate) * up) @ down.T
        return out if self.group is None else Sum.apply(out, self.group)


def build():
    return nn.Sequential(nn.Linear(8, 8), GateUp())


def by_segments(weight, mesh):
    parts = weight.detach().unflatten(0, (2, mesh.size(), -1))
    return parts[:, mesh.get_local_rank()].flatten(0, 1).clone()


def parallelize(model, mesh):
    layer, tp = model[1], mesh["tp"]
    layer.group = mesh.get_group("tp")
    layer.base = nn.Parameter(by_segments(layer.base, tp), requires_grad=False)
    layer.b = nn.Parameter(by_segments(layer.b, tp))
    layer.down = nn.Parameter(distribute_tensor(layer.down.detach(), tp, [Shard(1)]))


def batch():
    return torch.randn(6, 8)

"""

CASES = (
    Bug(
        "an adapter of a fused layer cut as one stretch",
        "tp=2",
        FUSED,
        (
            (
                "    layer.b = nn.Parameter(by_segments(layer.b, tp))",
                "    layer.b = nn.Parameter(distribute_tensor(layer.b.detach(), tp, [Shard(0)]))",
            ),
        ),
        ("misordered",),
        ("1.b", "2 segments"),
    ),
    Bug(
        "a gather whose backward sums equal gradients",
        "tp=2",
        GATHERED,
        (
            (
                "        return grad.chunk(distr",
                (
                    "        grad = grad.clone()\n"
                    "        distributed.all_reduce(grad, group=ctx.group)\n"
                    "        return grad.chunk(distr"
                ),
            ),
        ),
        ("wrong-scale",),
        ("backward", "gather|0|2", "tp"),
    ),
    Bug(
        "the first matrix of a column-parallel adapter without a sum",
        "tp=2",
        ADAPTED,
        (("self.b(Copy.apply(low, self.group))", "self.b(low)"),),
        ("unreduced-gradient",),
        ("up.a", "over tp"),
    ),
    Bug(
        "an adapter's output added to each rank's term",
        "tp=2",
        ADAPTED,
        (
            (
                "        return Sum.apply(self.base(x), self.group) + self.b(low)",
                "        return Sum.apply(self.base(x) + self.b(low), self.group)",
            ),
        ),
        ("wrong-scale",),
        ("down.b", "before the sum|twice|2 times"),
    ),
)
