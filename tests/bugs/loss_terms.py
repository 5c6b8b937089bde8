"""Losses of several terms, of which one counts too often, not at all, or is of each rank's own rows."""

from __future__ import annotations

from tests.bugs.case import Bug

MIXTURE = """
EXPERTS = 4
BATCH_AXES = ("ep",)


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sent, received, group):
        ctx.args = received, sent, group
        out = x.new_empty(sum(received), *x.shape[1:])
        distributed.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad, *ctx.args), None, None, None


class MoE(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(EXPERTS))
        self.shared = nn.Linear(8, 8)

    def run(self, rows, counts):
        return torch.cat([expert(part) for expert, part in zip(self.experts, rows.split(counts))])

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        gate, choice = probs.max(-1)
        order = choice.argsort(stable=True)
        counts = torch.bincount(choice, minlength=EXPERTS)
        rows = x[order]
        if self.group is None:
            out = self.run(rows, counts.tolist())
            share = counts
        else:
            size = distributed.get_world_size(self.group)
            received = torch.empty_like(counts)
            distributed.all_to_all_single(received, counts, group=self.group)
            here = EXPERTS // size
            sizes = counts.view(size, -1).sum(1).tolist(), received.view(size, -1).sum(1).tolist()
            arrived = Exchange.apply(rows, *sizes, self.group)
            of = torch.arange(here).repeat(size).repeat_interleave(received)
            by = of.argsort(stable=True)
            done = self.run(arrived[by], torch.bincount(of, minlength=here).tolist())
            out = Exchange.apply(done[by.argsort()], sizes[1], sizes[0], self.group)
            share = counts.clone()
            distributed.all_reduce(share, group=self.group)
        self.balance = EXPERTS * (probs.mean(0) * share / share.sum()).sum()
        return out[order.argsort()] * gate[:, None] + self.shared(x)


def build():
    return nn.Sequential(nn.Linear(8, 8), MoE())


def parallelize(model, mesh):
    moe = model[1]
    moe.group = mesh.get_group("ep")
    rank, size = mesh["ep"].get_local_rank(), mesh["ep"].size()
    own = torch.arange(EXPERTS).chunk(size)[rank].tolist()
    moe.experts = nn.ModuleDict({str(number): moe.experts[number] for number in own})
    moe.run = lambda rows, counts: torch.cat(
        [expert(part) for expert, part in zip(moe.experts.values(), rows.split(counts))]
    )


def batch():
    return torch.randn(32, 8)


def loss(model, x):
    out = model(x)
    return out.square().mean() + 0.5 * model[1].balance


def step(model, x, mesh):
    value = loss(model, x)
    value.backward()
    for name, parameter in model.named_parameters():
        if "experts" not in name:
            distributed.all_reduce(parameter.grad, group=mesh.get_group("ep"))
        parameter.grad /= mesh["ep"].size()
    value = value.detach()
    distributed.all_reduce(value, group=mesh.get_group("ep"))
    return value / mesh["ep"].size()

"""

PENALTY = """
BATCH_AXES = ("dp",)
MICRO = 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 4)
        self.penalty = None

    def forward(self, x):
        h = torch.tanh(self.up(x))
        self.penalty = h.square().mean()
        return self.down(h)


def build():
    return Net()


def batch():
    return torch.randn(16, 8)


def loss(model, x):
    return model(x).square().mean() + 0.1 * model.penalty


def step(model, x, mesh):
    total = 0.0
    for part in x.chunk(MICRO):
        out = model(part)
        value = out.square().mean() / MICRO + 0.1 * model.penalty / MICRO
        value.backward()
        total += value.detach()
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad, op=distributed.ReduceOp.AVG, group=mesh.get_group("dp"))
    distributed.all_reduce(total, op=distributed.ReduceOp.AVG, group=mesh.get_group("dp"))
    return total

"""

CASES = (
    Bug(
        "a balance term counted once a rank",
        "ep=2",
        MIXTURE,
        (
            (
                "self.balance = EXPERTS *",
                "self.balance = (1 if self.group is None else distributed.get_world_size(self.group)) * EXPERTS *",
            ),
        ),
        ("wrong-scale", "wrong-value"),
        ("term 2", "2 times"),
    ),
    Bug(
        "a balance term of each rank's own tokens",
        "ep=2",
        MIXTURE,
        (("            distributed.all_reduce(share, group=self.group)\n", ""),),
        ("wrong-value",),
        ("term 2", "statistics of its own rows"),
    ),
    Bug(
        "a penalty that is not divided by the number of micro-batches",
        "dp=2",
        PENALTY,
        (("0.1 * model.penalty / MICRO", "0.1 * model.penalty"),),
        ("wrong-scale", "wrong-value"),
        ("term 2", "2 times"),
    ),
    Bug(
        "a penalty that no micro-batch adds",
        "dp=2",
        PENALTY,
        (
            (
                "        value = out.square().mean() / MICRO + 0.1 * model.penalty / MICRO",
                "        value = out.square().mean() / MICRO",
            ),
        ),
        ("wrong-value", "wrong-scale"),
        ("term 2", "leaves it out"),
    ),
)
