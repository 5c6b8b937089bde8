"""Losses and statistics that the sharded program computes by lines of its own: a term is left out, or ranks' means."""

from __future__ import annotations

from tests.bugs.case import Bug

VOCABULARY = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.group = None
        self.embed = nn.Embedding(12, 8)
        self.head = nn.Parameter(torch.randn(12, 8))

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        if self.group is None:
            logits = functional.linear(x, self.head)
            log_sum = torch.logsumexp(logits, -1)
            picked = logits.gather(-1, labels[..., None])[..., 0]
            return (log_sum - picked).mean() + 0.1 * log_sum.square().mean()
        logits = functional.linear(Copy.apply(x, self.group), self.head)
        top = logits.detach().amax(-1)
        distributed.all_reduce(top, op=distributed.ReduceOp.MAX, group=self.group)
        logits = logits - top[..., None]
        log_sum = Sum.apply(logits.exp().sum(-1), self.group).log()
        local = labels - distributed.get_rank(self.group) * len(self.head)
        mine = (local >= 0) & (local < len(self.head))
        picked = logits.gather(-1, local.clamp(0, len(self.head) - 1)[..., None])[..., 0] * mine
        picked = Sum.apply(picked, self.group)
        return (log_sum - picked).mean() + 0.1 * (log_sum + top).square().mean()


def build():
    return Model()


def parallelize(model, mesh):
    model.group = mesh.get_group("tp")
    model.head.data = model.head.data.chunk(mesh.size(), 0)[mesh.get_local_rank("tp")].clone()


def batch():
    return torch.randint(0, 12, (4, 6)), torch.randint(0, 12, (4, 6))


def loss(model, batch):
    return model(*batch)

"""

WHITENED = """
BATCH_AXES = ("dp",)


def average(x, group):
    x = x.detach().clone()
    if group is not None:
        distributed.all_reduce(x, op=distributed.ReduceOp.AVG, group=group)
    return x


def whitened(x, group):
    mean = average(x.mean(), group)
    var = average(SPREAD, group)
    return (x - mean) * torch.rsqrt(var + 1e-8)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.group = None
        self.policy, self.value = nn.Linear(6, 4), nn.Linear(6, 1)

    def forward(self, x):
        return self.policy(x).log_softmax(-1), self.value(x)[:, 0]


def build():
    return Model()


def parallelize(model, mesh):
    model.group = mesh.get_group("dp")


def batch():
    return torch.randn(16, 6), 3 * torch.randn(16)


def loss(model, batch):
    rows, returns = batch
    chances, values = model(rows)
    advantages = whitened(returns - values.detach(), model.group)
    return functional.mse_loss(values, returns) - (chances[:, 0] * advantages).mean()


def step(model, batch, mesh):
    value = loss(model, batch)
    value.backward()
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad, op=distributed.ReduceOp.AVG, group=model.group)
    return value.detach()

""".replace("SPREAD", "(x - mean).square().mean()")

NEVER = ("first the group and op of each collective", "gather or reduce the input of")

CASES = (
    Bug(
        "the square of a log-sum-exp without the maximum",
        "tp=2",
        VOCABULARY,
        (("(log_sum + top).square()", "log_sum.square()"),),
        ("wrong-value",),
        ("square", "lacks a term", "amax|all_reduce(top"),
        never=NEVER,
        with_lines=True,
    ),
    Bug(
        "variances around each rank's own mean, averaged",
        "dp=2",
        WHITENED,
        (("(x - mean).square().mean()", "x.var(unbiased=False)"),),
        ("wrong-value",),
        ("own mean", "all_reduce puts these together", "dp"),
        never=NEVER,
        with_lines=True,
    ),
    Bug(
        "deviations of each rank's own rows, averaged and squared",
        "dp=4",
        WHITENED,
        (("average((x - mean).square().mean(), group)", "average(x.std(unbiased=False), group).square()"),),
        ("wrong-value",),
        ("own mean", "dp"),
        never=NEVER,
        with_lines=True,
    ),
)
