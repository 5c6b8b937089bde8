"""Blocks of several branches: attention beside an MLP, experts that every rank runs for all tokens."""

from __future__ import annotations

from tests.bugs.case import Bug

BRANCHES = """
class Parallel(nn.Module):
    group, heads = None, 2

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.qkv = nn.Linear(8, 24, bias=False)
        self.wo = nn.Linear(8, 8, bias=False)
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        h = self.norm(x)
        a = m = h
        if self.group is not None:
            a, m = Copy.apply(h, self.group), Copy.apply(h, self.group)
        q, k, v = self.qkv(a).view(b, t, 3, self.heads, 4).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1)
        out = self.wo(attended) + self.down(functional.gelu(self.up(m)))
        return x + (out if self.group is None else Sum.apply(out, self.group))


def build():
    return nn.Sequential(Parallel(), Parallel())


def parallelize(model, mesh):
    rank, size = mesh["tp"].get_local_rank(), mesh["tp"].size()
    for layer in model:
        layer.group, layer.heads = mesh.get_group("tp"), 2 // size
        heads = layer.qkv.weight.detach().view(3, 2, 4, 8).chunk(size, 1)[rank]
        layer.qkv.weight = nn.Parameter(heads.reshape(-1, 8).clone())
        layer.wo.weight = nn.Parameter(layer.wo.weight.detach().chunk(size, 1)[rank].clone())
        layer.up.weight = nn.Parameter(layer.up.weight.detach().chunk(size)[rank].clone())
        layer.down.weight = nn.Parameter(layer.down.weight.detach().chunk(size, 1)[rank].clone())


def batch():
    return torch.randn(2, 5, 8)

"""

EVERY_TOKEN = """
EXPERTS = 4


class MoE(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.router = nn.Linear(8, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, 8, 12) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 12, 8) * 0.3)
        self.shared = nn.Linear(8, 8)
        self.first = 0

    def forward(self, x):
        h = self.norm(x)
        gates = self.router(h).softmax(-1)
        top, chosen = gates.topk(2, -1)
        if self.group is not None:
            tokens, top = Copy.apply(h, self.group), Copy.apply(top, self.group)
        else:
            tokens = h
        out = torch.zeros_like(x)
        for number in range(len(self.up)):
            weight = (top * (chosen == number + self.first)).sum(-1, keepdim=True)
            out = out + weight * (functional.silu(tokens @ self.up[number]) @ self.down[number])
        if self.group is not None:
            out = Sum.apply(out, self.group)
        return x + out + self.shared(h)


def build():
    return nn.Sequential(nn.Linear(8, 8), MoE(), nn.Linear(8, 4))


def parallelize(model, mesh):
    rank, size = mesh["tp"].get_local_rank(), mesh["tp"].size()
    moe = model[1]
    moe.group, moe.first = mesh.get_group("tp"), EXPERTS // size * rank
    moe.up = nn.Parameter(moe.up.detach().chunk(size)[rank].clone())
    moe.down = nn.Parameter(moe.down.detach().chunk(size)[rank].clone())


def batch():
    return torch.randn(10, 8)

"""

FUNCTION = """
def swiglu(x, w1, w3, w2, group=None):
    x = x if group is None else Copy.apply(x, group)
    gate = functional.silu(functional.linear(x, w1))
    up = functional.linear(x, w3)
    out = functional.linear(gate * up, w2)
    return out if group is None else Sum.apply(out, group)


class Net(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.RMSNorm(8)
        self.w1, self.w3 = (nn.Parameter(torch.randn(12, 8) / 3) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(8, 12) / 3)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return x + swiglu(self.norm(x), self.w1, self.w3, self.w2, self.group)


def build():
    return Net()


def parallelize(model, mesh):
    model.group = mesh.get_group("tp")
    for weight, dim in ((model.w1, 0), (model.w3, 0), (model.w2, 1)):
        weight.data = weight.data.chunk(mesh.size(), dim)[mesh.get_local_rank()].clone()


def batch():
    return torch.randn(14, 8)

"""

ENTERS = "    x = x if group is None else Copy.apply(x, group)\n"

CASES = (
    Bug(
        "the gate of a function that a module calls reads what has no backward sum",
        "tp=2",
        FUNCTION,
        ((ENTERS, "    a = x\n" + ENTERS), ("linear(x, w1)", "linear(a, w1)")),
        ("unreduced-gradient",),
        ("`gate = functional.silu(functional.linear(a, w1))`", "each rank's own part of a gradient", "over tp"),
        never=("doesn't match its forward",),
        with_lines=True,
    ),
    Bug(
        "both halves of a function read what has no backward sum, beside a residual",
        "tp=2",
        FUNCTION,
        ((ENTERS, ""), ("swiglu(self.norm(x),", "swiglu(x,")),
        ("unreduced-gradient",),
        ("gate = functional.silu", "each rank's own part of a gradient", "over tp"),
        never=("doesn't match its forward",),
        with_lines=True,
    ),
    Bug(
        "one of two branches without a backward sum",
        "tp=2",
        BRANCHES,
        (("Copy.apply(h, self.group), Copy.apply(h, self.group)", "Copy.apply(h, self.group), h"),),
        ("unreduced-gradient",),
        ("over tp", "case.py"),
        with_lines=True,
    ),
    Bug(
        "one of two branches without a forward sum",
        "tp=2",
        BRANCHES,
        (
            (
                (
                    "        out = self.wo(attended) + self.down(functional.gelu(self.up(m)))\n"
                    "        return x + (out if self.group is None else Sum.apply(out, self.group))"
                ),
                (
                    "        out = self.wo(attended)\n"
                    "        out = out if self.group is None else Sum.apply(out, self.group)\n"
                    "        return x + out + self.down(functional.gelu(self.up(m)))"
                ),
            ),
        ),
        ("unreduced-output",),
        ("over tp", "case.py"),
        with_lines=True,
    ),
    Bug(
        "a shared expert added on every rank before the sum",
        "tp=2",
        EVERY_TOKEN,
        (
            (
                (
                    "        if self.group is not None:\n"
                    "            out = Sum.apply(out, self.group)\n"
                    "        return x + out + self.shared(h)"
                ),
                (
                    "        out = out + self.shared(h)\n"
                    "        if self.group is not None:\n"
                    "            out = Sum.apply(out, self.group)\n"
                    "        return x + out"
                ),
            ),
        ),
        ("wrong-scale",),
        ("shared", "before the sum"),
    ),
    Bug(
        "experts of a sum counted from 0 on every rank",
        "tp=2",
        EVERY_TOKEN,
        (("EXPERTS // size * rank", "0"),),
        ("wrong-value", "misordered"),
        ("1 is the first",),
    ),
)
