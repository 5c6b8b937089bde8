"""Outputs and the weights behind them: parts not summed, put side by side, or cut across what the model reads."""

from __future__ import annotations

from tests.bugs.case import Bug
from tests.bugs.models import ATTENTION, TENSOR_PARALLEL

ROW = TENSOR_PARALLEL

LAST = "        return Sum.apply(x, self.group) + self.down.bias"

FUSED = """
class Gated(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.gate_up = nn.Linear(8, 24, bias=False)
        self.down = nn.Linear(12, 8, bias=False)

    def forward(self, x):
        if self.group is not None:
            x = Copy.apply(x, self.group)
        gate, up = self.gate_up(x).chunk(2, -1)
        x = self.down(functional.silu(gate) * up)
        return x if self.group is None else Sum.apply(x, self.group)


def build():
    return Gated()


def parallelize(model, mesh):
    gate, up = model.gate_up.weight.chunk(2)
    model.gate_up.weight = nn.Parameter(torch.cat((own(gate, mesh), own(up, mesh))).detach())
    model.down.weight = own(model.down.weight, mesh, 1)
    model.group = mesh.get_group("tp")


def batch():
    return torch.randn(24, 8)

"""

QKV = (
    ATTENTION
    + """
class Attention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.wqkv = nn.Linear(FEATURES, 3 * FEATURES, bias=False)
        self.wo = nn.Linear(FEATURES, FEATURES, bias=False)

    def forward(self, x):
        if self.group is not None:
            x = Copy.apply(x, self.group)
        x = self.wo(attend(*self.wqkv(x).chunk(3, -1)))
        return x if self.group is None else Sum.apply(x, self.group)


def build():
    return Attention()


def parallelize(model, mesh):
    parts = model.wqkv.weight.chunk(3)
    model.wqkv.weight = nn.Parameter(torch.cat([own(part, mesh) for part in parts]).detach())
    model.wo.weight = own(model.wo.weight, mesh, 1)
    model.group = mesh.get_group("tp")


def batch():
    return torch.randn(6, 5, FEATURES)

"""
)

GROUPED = (
    QKV.replace(
        "self.wqkv = nn.Linear(FEATURES, 3 * FEATURES, bias=False)",
        "self.wq = nn.Linear(FEATURES, FEATURES, bias=False)\n"
        "        self.wk = nn.Linear(FEATURES, FEATURES // 2, bias=False)",
    )
    .replace("attend(*self.wqkv(x).chunk(3, -1))", "attend(self.wq(x), self.wk(x), self.wk(x))")
    .replace(
        """    parts = model.wqkv.weight.chunk(3)
    model.wqkv.weight = nn.Parameter(torch.cat([own(part, mesh) for part in parts]).detach())
""",
        """    rank, size = mesh.get_local_rank("tp"), mesh["tp"].size()
    model.wq.weight = own(model.wq.weight, mesh)
    model.wk.weight = nn.Parameter(model.wk.weight.detach().chunk(2)[rank * 2 // size].clone())
""",
    )
    + """
def step(model, rows, mesh):
    loss = model(rows).square().mean()
    loss.backward()
    groups = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
    distributed.all_reduce(model.wk.weight.grad, group=groups[mesh.get_local_rank("tp") // 2])
    return loss.detach()

"""
)

GATHERED = """
        parts = torch.distributed.nn.functional.all_gather(x, group=self.group)
"""

WRONG = ("wrong-value", "wrong-scale")

LABELLED = '''
class Outer(nn.Linear):
    """Put out a DTensor, whose label says what a rank has of it."""

    mesh = None

    def forward(self, x):
        if self.mesh is None:
            return super().forward(x)
        if SPLIT == Shard(1):
            x = x.chunk(self.mesh.size(), -1)[self.mesh.get_local_rank()]
        return DTensor.from_local(functional.linear(x, self.weight.to_local()), self.mesh, (LABEL,))


def build():
    return Outer(8, 12, bias=False)


def parallelize(model, mesh):
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tp"], (SPLIT,)))
    model.mesh = mesh["tp"]


def batch():
    return torch.randn(24, 8)


def loss(model, rows):
    output = model(rows)
    return (output.full_tensor() if isinstance(output, DTensor) else output).square().mean()

'''
COLUMNS = LABELLED + "\nSPLIT, LABEL = Shard(0), Shard(1)\n"
SUMS = LABELLED + "\nSPLIT, LABEL = Shard(1), Partial()\n"

CASES = (
    Bug(
        "a row-parallel bias on every rank",
        "tp=2",
        ROW,
        (
            ("functional.linear(torch.tanh(self.up(x)), self.down.weight)", "self.down(torch.tanh(self.up(x)))"),
            (" + self.down.bias\n\n\ndef build", "\n\n\ndef build"),
        ),
        ("wrong-scale",),
        ("down.bias", "2 times", "tp"),
    ),
    Bug(
        "a row-parallel bias left out",
        "tp=2",
        ROW,
        ((" + self.down.bias\n\n\ndef build", "\n\n\ndef build"),),
        ("wrong-scale", "wrong-value"),
        ("down.bias", "leaves out|0 times"),
    ),
    Bug(
        "columns put beside one another where they are summed",
        "tp=2",
        ROW,
        ((LAST, GATHERED.strip("\n") + "\n        return torch.cat(parts, -1)"),),
        ("wrong-shape", "unreduced-output"),
        ("tp", "concatenat", "sum"),
    ),
    Bug(
        "copies put below one another",
        "tp=2",
        ROW,
        ((LAST, LAST.replace("return", "x =") + GATHERED.rstrip("\n") + "\n        return torch.cat(parts)"),),
        ("wrong-shape", "duplicated"),
        ("tp", "copies|2 times|twice"),
    ),
    Bug(
        "a row-parallel sum left out",
        "tp=2",
        ROW,
        (("return Sum.apply(x, self.group) +", "return x +"),),
        ("unreduced-output", "wrong-value"),
        ("tp", "all_reduce|adds the products"),
        ("no sum or mean of them is right", "of torch.distributed.nn.functional"),
    ),
    Bug(
        "a row-parallel sum averaged",
        "tp=4",
        ROW,
        (("return Sum.apply(x, self.group) +", "return Sum.apply(x, self.group) / 4 +"),),
        WRONG,
        ("tp", "averag|mean|divided"),
    ),
    Bug(
        "gate and up cut as one",
        "tp=2",
        FUSED,
        (("torch.cat((own(gate, mesh), own(up, mesh))).detach()", "own(model.gate_up.weight, mesh).detach()"),),
        ("wrong-segment", "wrong-value"),
        ("gate_up", "segment|fused"),
    ),
    Bug(
        "q, k and v cut as one",
        "tp=2",
        QKV,
        (("torch.cat([own(part, mesh) for part in parts]).detach()", "own(model.wqkv.weight, mesh).detach()"),),
        ("wrong-segment", "wrong-value"),
        ("wqkv", "segment|fused"),
    ),
    Bug(
        "query heads that look at another rank's key head",
        "tp=4",
        GROUPED,
        (("[rank * 2 // size]", "[rank % 2]"),),
        ("misordered", "wrong-value"),
        ("wk.weight|key", "head|order|in turn|rank"),
        ("compare the outputs module by module",),
    ),
    Bug(
        "columns of an output labelled as rows",
        "tp=2",
        COLUMNS,
        (("SPLIT, LABEL = Shard(0), Shard(1)", "SPLIT, LABEL = Shard(0), Shard(0)"),),
        ("wrong-placement", "wrong-shape"),
        ("output", "Shard(1)|dim 1|[24, 12/tp]"),
    ),
    Bug(
        "terms of a sum labelled as copies",
        "tp=2",
        SUMS,
        (("SPLIT, LABEL = Shard(1), Partial()", "SPLIT, LABEL = Shard(1), Replicate()"),),
        ("wrong-placement", "unreduced-output"),
        ("output", "Partial()"),
        ("of torch.distributed.nn.functional",),
    ),
)
