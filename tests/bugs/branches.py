"""Blocks of several branches: attention beside an MLP, experts that every rank runs for all tokens."""

from __future__ import annotations

from tests.bugs.case import Bug
from tests.bugs.models import ENTER

BRANCHES = (
    ENTER
    + """
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
            a, m = Enter.apply(h, self.group), Enter.apply(h, self.group)
        q, k, v = self.qkv(a).view(b, t, 3, self.heads, 4).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1)
        out = self.wo(attended) + self.down(functional.gelu(self.up(m)))
        return x + (out if self.group is None else Leave.apply(out, self.group))


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
)

EVERY_TOKEN = (
    ENTER
    + """
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
            tokens, top = Enter.apply(h, self.group), Enter.apply(top, self.group)
        else:
            tokens = h
        out = torch.zeros_like(x)
        for number in range(len(self.up)):
            weight = (top * (chosen == number + self.first)).sum(-1, keepdim=True)
            out = out + weight * (functional.silu(tokens @ self.up[number]) @ self.down[number])
        if self.group is not None:
            out = Leave.apply(out, self.group)
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
)

CASES = (
    Bug(
        "one of two branches without a backward sum",
        "tp=2",
        BRANCHES,
        (("Enter.apply(h, self.group), Enter.apply(h, self.group)", "Enter.apply(h, self.group), h"),),
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
                    "        return x + (out if self.group is None else Leave.apply(out, self.group))"
                ),
                (
                    "        out = self.wo(attended)\n"
                    "        out = out if self.group is None else Leave.apply(out, self.group)\n"
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
                    "            out = Leave.apply(out, self.group)\n"
                    "        return x + out + self.shared(h)"
                ),
                (
                    "        out = out + self.shared(h)\n"
                    "        if self.group is not None:\n"
                    "            out = Leave.apply(out, self.group)\n"
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
