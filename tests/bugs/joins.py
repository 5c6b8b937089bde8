"""Parts of a sequence that are joined wrongly: states of a scan, blocks of keys, and what comes from far away."""

from __future__ import annotations

from tests.bugs.case import Bug

GATHER = '''
BATCH_AXES = {"cp": 1}


class Gather(torch.autograd.Function):
    """A tensor of each rank; backward sums over ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        distributed.all_reduce(grad, group=ctx.group)
        return grad[distributed.get_rank(ctx.group)], None


def build():
    return nn.Sequential(nn.Embedding(12, 8), Mixer(), nn.Linear(8, 8))


def parallelize(model, mesh):
    model[1].group = mesh.get_group("cp")


def batch():
    return torch.randint(0, 12, (2, 16))


def loss(model, tokens):
    return model(tokens).square().mean()


def step(model, tokens, mesh):
    value = loss(model, tokens)
    value.backward()
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad, op=distributed.ReduceOp.AVG, group=mesh.get_group("cp"))
    return value.detach()

'''

GATED_SCAN = (
    '''
class Mixer(nn.Module):
    """A running state that each token's gate decays."""

    group = None

    def __init__(self):
        super().__init__()
        self.gate, self.value, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        gate, value, state = self.gate(x).sigmoid(), self.value(x), torch.zeros(len(x), 8)
        states = []
        for at in range(x.shape[1]):
            state = gate[:, at] * state + value[:, at]
            states.append(state)
        states = torch.stack(states, 1)
        if self.group is not None:
            states = states + gate.cumprod(1) * self.before(state, gate.prod(1))[:, None]
        return self.out(states)

    def before(self, state, decay):
        ends, decays = Gather.apply(state, self.group), Gather.apply(decay, self.group)
        joined = 0 * ends.sum(0) + 0 * decays.sum(0)
        for rank in range(distributed.get_rank(self.group)):
            joined = decays[rank] * joined + ends[rank]
        return joined

'''
    + GATHER
)

BACKWARD_SCAN = (
    GATED_SCAN.replace("for at in range(x.shape[1]):", "for at in reversed(range(x.shape[1])):")
    .replace("states = torch.stack(states, 1)\n", "states = torch.stack(states[::-1], 1)\n")
    .replace("gate.cumprod(1) *", "gate.flip(1).cumprod(1).flip(1) *")
    .replace(
        "for rank in range(distributed.get_rank(self.group)):",
        "for rank in range(len(ends) - 1, distributed.get_rank(self.group), -1):",
    )
)

BLOCKS = (
    '''
class Mixer(nn.Module):
    """Attention with a sink, over blocks of keys."""

    group = None

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.out = nn.Linear(8, 8)
        self.sinks = nn.Parameter(torch.randn(2))

    def block(self, query, key, value, mask, sink):
        scores = query @ key.transpose(-1, -2)
        scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
        top = scores.detach().amax(-1, keepdim=True)
        powers = (scores - top).exp()
        total = powers.sum(-1, keepdim=True) + sink * (self.sinks[:, None, None] - top).exp()
        return powers @ value / total, total.log() + top

    def forward(self, x):
        sides = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        query, key, value = sides
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        out, log_sum = self.block(query, key, value, mask, 1)
        if self.group is not None:
            keys, values = Gather.apply(key, self.group), Gather.apply(value, self.group)
            out = out + 0 * (keys.sum() + values.sum())
            for rank in range(distributed.get_rank(self.group)):
                other, other_sum = self.block(query, keys[rank], values[rank], None, 0)
                both = torch.logaddexp(log_sum, other_sum)
                out = out * (log_sum - both).exp() + other * (other_sum - both).exp()
                log_sum = both
        return self.out(out.transpose(1, 2).flatten(2))

'''
    + GATHER
)

FAR = ("joined right", "rank just before", "coordinates 0-1 are right")
NOT_ALONE = ("own part alone", "computes with each rank's own part", "wrong order or scale")

CASES = (
    Bug(
        "states of all ranks before are added up without decay",
        "cp=4",
        GATED_SCAN,
        (("joined = decays[rank] * joined + ends[rank]", "joined = joined + ends[rank]"),),
        ("wrong-value",),
        (*FAR, "joined = joined + ends[rank]"),
        never=NOT_ALONE,
        with_lines=True,
    ),
    Bug(
        "the decay of the rank itself in place of those between",
        "cp=4",
        GATED_SCAN,
        (("joined = decays[rank] * joined + ends[rank]", "joined = decay * joined + ends[rank]"),),
        ("wrong-value",),
        FAR,
        never=NOT_ALONE,
        with_lines=True,
    ),
    Bug(
        "only the state of the rank before is added",
        "cp=4",
        GATED_SCAN,
        (("joined = decays[rank] * joined + ends[rank]", "joined = 0 * decays[rank] * joined + ends[rank]"),),
        ("wrong-value",),
        FAR,
        never=NOT_ALONE,
        with_lines=True,
    ),
    Bug(
        "states of all ranks after are added up without decay",
        "cp=4",
        BACKWARD_SCAN,
        (("joined = decays[rank] * joined + ends[rank]", "joined = joined + ends[rank]"),),
        ("wrong-value",),
        ("rank just after", "coordinates 2-3 are right", "once for each rank after"),
        never=NOT_ALONE,
        with_lines=True,
    ),
    Bug(
        "a sink in each block of keys",
        "cp=2",
        BLOCKS,
        (("values[rank], None, 0)", "values[rank], None, 1)"),),
        ("wrong-value",),
        ("denominator", "too large", "4 features"),
        never=NOT_ALONE,
        with_lines=True,
    ),
    Bug(
        "what was joined before is not scaled anew",
        "cp=2",
        BLOCKS,
        (("out = out * (log_sum - both).exp() +", "out = out +"),),
        ("wrong-value",),
        ("once for each rank before", "how the parts are joined"),
        never=("own part alone", "denominator"),
        with_lines=True,
    ),
    Bug(
        "a gate of positions that each rank counts from its own first one",
        "cp=2",
        BLOCKS.replace(
            "        return self.out(out.transpose(1, 2).flatten(2))",
            """        first = 0 if self.group is None else distributed.get_rank(self.group) * x.shape[1]
        gate = 1 / (1 + 0.1 * (first + torch.arange(x.shape[1])))
        return self.out(out.transpose(1, 2).flatten(2) * gate[:, None])""",
        ),
        (("distributed.get_rank(self.group) * x.shape[1]", "0"),),
        ("wrong-value",),
        ("offset|gate|first|position|begin",),
        never=("attention sink", "own part alone"),
        with_lines=True,
    ),
)
