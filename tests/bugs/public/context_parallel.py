"""Ring attention: keys and values go round in forward, and must go round again in backward."""

from __future__ import annotations

from tests.bugs.case import Bug
from tests.bugs.public.case import Public

RING = '''
BATCH_AXES = ("cp",)
TOKENS, FEATURES = 16, 8


class Ring(torch.autograd.Function):
    """Attention of each rank's queries to the keys and values of all ranks, block by block."""

    @staticmethod
    def forward(ctx, query, key, value, group):
        ctx.group = group
        keys, values = gathered(key, group), gathered(value, group)
        scores = [query @ block.T / FEATURES**0.5 for block in keys]
        lse = torch.cat(scores, -1).logsumexp(-1, keepdim=True)
        out = sum((part - lse).exp() @ block for part, block in zip(scores, values))
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        _, key, value, _, _ = ctx.saved_tensors
        blocks = zip(gathered(key, ctx.group), gathered(value, ctx.group))
        queries, keys, values = zip(*(of_block(ctx, grad, *block) for block in blocks))
        own = distributed.get_rank(ctx.group)
        return sum(queries), summed(keys, ctx.group)[own], summed(values, ctx.group)[own], None


def of_block(ctx, grad, key, value):
    """Return the gradients of queries, keys and values that one block of keys and values gives."""
    query, _, _, out, lse = ctx.saved_tensors
    weights = (query @ key.T / FEATURES**0.5 - lse).exp()
    scores = weights * (grad @ value.T - (grad * out).sum(-1, keepdim=True)) / FEATURES**0.5
    return scores @ key, scores.T @ query, weights.T @ grad


def gathered(part, group):
    parts = [torch.empty_like(part) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(parts, part.contiguous(), group=group)
    return parts


def summed(parts, group):
    whole = torch.stack(parts)
    distributed.all_reduce(whole, group=group)
    return whole


class Attention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(4))

    def forward(self, x):
        query, key, value = self.q(x), self.k(x), self.v(x)
        if self.group is not None:
            return self.o(Ring.apply(query, key, value, self.group))
        return self.o((query @ key.T / FEATURES**0.5).softmax(-1) @ value)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, FEATURES)
        self.attn = Attention()

    def forward(self, x):
        x = self.embed(x)
        return x + self.attn(x)


def build():
    return Net()


def parallelize(model, mesh):
    model.attn.group = mesh.get_group("cp")


def batch():
    return torch.randn(TOKENS, FEATURES)


def step(model, rows, mesh):
    loss = model(rows).square().mean()
    loss.backward()
    loss = loss.detach().clone()
    for number in (loss, *(parameter.grad for parameter in model.parameters())):
        distributed.all_reduce(number, group=mesh.get_group("cp"))
        number /= mesh["cp"].size()
    return loss

'''

CASES = (
    Public(
        "diffusers#14265, TransformerEngine#1557",
        Bug(
            "ring attention's backward with its own keys and values alone",
            "cp=4",
            RING,
            (("query, _, _, out, lse = ctx", "query, key, value, out, lse = ctx"),),
            ("wrong-value",),
            ("attn", "backward"),
            ("not summed over cp",),
        ),
    ),
)
