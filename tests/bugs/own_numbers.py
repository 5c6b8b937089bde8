"""Numbers that a rank takes from its own part: means, norms, sizes and counts, where those of the whole are due."""

from __future__ import annotations

from tests.bugs.case import Bug
from tests.bugs.models import DATA_PARALLEL, FSDP, MLP, STAGES

FACTORED = (
    FSDP
    + '''
class Factored(torch.optim.Optimizer):
    """Divides by means over rows and over columns."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self):
        for weight in self.param_groups[0]["params"]:
            held, grad = (one.to_local() if isinstance(one, DTensor) else one for one in (weight, weight.grad))
            if grad.ndim < 2:
                held.sub_(grad, alpha=0.05)
                continue
            rows, columns = grad.square().mean(1, keepdim=True), grad.square().mean(0, keepdim=True)
            if isinstance(weight, DTensor):
                distributed.all_reduce(columns, distributed.ReduceOp.AVG, weight.device_mesh.get_group())
            held.sub_(grad * FORM, alpha=0.05)


def optimizer(model, mesh):
    return Factored(model.parameters())

'''
)
MULTIPLIED = FACTORED.replace("FORM", "(rows * columns).rsqrt()")
ADDED = FACTORED.replace("FORM", "(rows.sqrt() + columns.sqrt()).reciprocal()").replace(
    "mean(1, keepdim=True)", "amax(1, keepdim=True)"
)
REDUCED = (
    """            if isinstance(weight, DTensor):
                distributed.all_reduce(columns, distributed.ReduceOp.AVG, weight.device_mesh.get_group())
""",
    "",
)
FIRST_ALONE = (REDUCED[0], REDUCED[0].replace("DTensor)", "DTensor) and weight.shape[0] > 8"))

RATES = (
    MLP
    + """
def parallelize(model, mesh):
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def optimizer(model, mesh):
    sizes = {weight: weight.shape for weight in model.parameters()}
    groups = [{"params": [weight], "lr": 0.5 / shape[-1]} for weight, shape in sizes.items()]
    return torch.optim.AdamW(groups, foreach=False)

"""
)

LORA = """
class Adapted(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.a = nn.Parameter(torch.randn(4, 8))
        self.b = nn.Parameter(torch.randn(8, 4))
        self.rank = len(self.a)

    def forward(self, x):
        scale = 16 / self.rank
        inner = x if self.group is None else Copy.apply(x, self.group)
        delta = functional.linear(functional.linear(inner, self.a), self.b) * scale
        return self.base(x) + (delta if self.group is None else Sum.apply(delta, self.group))


def build():
    return nn.Sequential(nn.Linear(8, 8), Adapted(), nn.Linear(8, 4))


def parallelize(model, mesh):
    adapted, rank = model[1], mesh.get_local_rank("tp")
    adapted.a = nn.Parameter(adapted.a.detach().chunk(2)[rank].clone())
    adapted.b = nn.Parameter(adapted.b.detach().chunk(2, 1)[rank].clone())
    adapted.group = mesh.get_group("tp")


def batch():
    return torch.randn(9, 8)

"""

CLIPPED = (
    STAGES
    + """
@torch.no_grad()
def clip(model, group):
    squares = sum(weight.grad.square().sum() for weight in model.parameters())
    if group is not None:
        distributed.all_reduce(squares, group=group)
    for weight in model.parameters():
        weight.grad *= 0.05 / squares.sqrt()


def optimizer(model, mesh):
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    group = mesh.get_group("pp") if len(model.layers) < LAYERS else None
    sgd.register_step_pre_hook(lambda *_: clip(model, group))
    return sgd

"""
)

COUNTED = """
from torch.utils.checkpoint import checkpoint

BATCH_AXES = ("dp",)


class Experts(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.experts = nn.Parameter(torch.randn(4, 8, 8) / 3)
        self.register_buffer("counts", torch.zeros(4))

    def count(self, chosen):
        counts = torch.bincount(chosen, minlength=4).to(self.counts.dtype)
        if self.group is not None:
            distributed.all_reduce(counts, group=self.group)
        self.counts += counts

    def mix(self, x, again):
        gate, chosen = self.router(x).softmax(-1).max(-1)
        if again:
            self.count(chosen)
        return torch.bmm(x[:, None], self.experts[chosen])[:, 0] * gate[:, None]

    def forward(self, x):
        if self.group is None:
            return x + self.mix(x, True)
        self.count(self.router(x).argmax(-1))
        return x + checkpoint(self.mix, x, False, use_reentrant=False)


def build():
    return nn.Sequential(nn.Linear(8, 8), Experts())


def parallelize(model, mesh):
    model[1].group = mesh.get_group("dp")


def batch():
    return torch.randn(24, 8)


def step(model, rows, mesh):
    loss = model(rows).square().mean()
    loss.backward()
    for weight in model.parameters():
        distributed.all_reduce(weight.grad, distributed.ReduceOp.AVG, mesh.get_group("dp"))
    return loss.detach()


def optimizer(model, mesh):
    return torch.optim.SGD(model.parameters(), lr=0.1)

"""

MAIN = (
    DATA_PARALLEL
    + """
def step(model, rows, mesh):
    total, main = 0.0, {weight: torch.zeros_like(weight) for weight in model.parameters()}
    for part in rows.chunk(2):
        loss = model(part).square().mean() / 2
        loss.backward()
        total += loss.detach()
        for weight in model.parameters():
            main[weight] += weight.grad
            weight.grad = None
    for weight in model.parameters():
        weight.grad = main[weight]
    reduce(model, mesh)
    return total

"""
)

CASES = (
    Bug(
        "a gradient added to the main one and not cleared",
        "dp=3",
        MAIN,
        (("            weight.grad = None\n", ""),),
        ("wrong-value",),
        ("2, 1 times", "nothing clears .grad"),
        ("after every micro-batch",),
    ),
    Bug(
        "means of columns over a rank's own rows",
        "fsdp=2",
        MULTIPLIED,
        (REDUCED,),
        ("wrong-value",),
        ("whole matrix", "alike along dim 0"),
        ("learning rate", "different parameter"),
    ),
    Bug(
        "means of the columns of one matrix alone over a rank's own rows",
        "fsdp=2",
        ADDED,
        (FIRST_ALONE,),
        ("wrong-value",),
        ("whole matrix", "up.weight is right"),
        ("learning rate", "different parameter"),
    ),
    Bug(
        "a learning rate divided by the columns of a shard",
        "tp=2",
        RATES,
        (
            (
                "{weight: weight.shape for",
                "{weight: (weight.to_local() if isinstance(weight, DTensor) else weight).shape for",
            ),
        ),
        ("wrong-value",),
        ("learning rate", "a local size"),
        ("stepped 2 times",),
    ),
    Bug(
        "an adapter scaled by the rank of its shard",
        "tp=2",
        LORA,
        (("scale = 16 / self.rank", "scale = 16 / len(self.a)"),),
        ("wrong-value", "wrong-scale"),
        ("2 times the unsharded model's", "* scale"),
        ("nothing sums",),
        with_lines=True,
    ),
    Bug(
        "gradients clipped by the norm of a stage's own",
        "pp=2",
        CLIPPED,
        (('mesh.get_group("pp") if len(model.layers) < LAYERS else None', "None"),),
        ("wrong-value",),
        ("norms of each rank's own gradients",),
        ("learning rate",),
    ),
    Bug(
        "tokens counted again where activations are recomputed",
        "dp=2",
        COUNTED,
        (
            ("        self.count(self.router(x).argmax(-1))\n", ""),
            ("self.mix, x, False", "self.mix, x, True"),
        ),
        ("wrong-value",),
        ("2 times", "checkpoint"),
    ),
)
