"""Attention over a sequence that ranks share: offsets of positions and masks, exchanges of heads."""

from __future__ import annotations

from tests.bugs.case import Bug, Healthy

STEP = """
def batch():
    return torch.randn(2, 16, 8)


def step(model, x, mesh):
    loss = model(x).square().mean()
    loss.backward()
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad, op=distributed.ReduceOp.AVG, group=mesh.get_group("cp"))
    loss = loss.detach()
    distributed.all_reduce(loss, op=distributed.ReduceOp.AVG, group=mesh.get_group("cp"))
    return loss

"""

CAUSAL = (
    """
BATCH_AXES = {"cp": 1}
HEADS = 2


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        distributed.all_reduce(grad, group=ctx.group)
        return grad.chunk(distributed.get_world_size(ctx.group), 2)[distributed.get_rank(ctx.group)], None


def rotate(x, positions):
    angles = positions[:, None] * torch.tensor([1.0, 0.1])
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Attention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (part.view(b, t, HEADS, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        offset = 0
        if self.group is not None:
            offset = distributed.get_rank(self.group) * t
        positions = torch.arange(t) + offset
        q, k = rotate(q, positions), rotate(k, positions)
        if self.group is not None:
            k, v = Gather.apply(k, self.group), Gather.apply(v, self.group)
        mask = positions[:, None] >= torch.arange(k.shape[2])
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(out.transpose(1, 2).reshape(b, t, -1))


def build():
    return nn.Sequential(Attention(), Attention())


def parallelize(model, mesh):
    for layer in model:
        layer.group = mesh.get_group("cp")


"""
    + STEP
)

RING = (
    '''
BATCH_AXES = {"cp": 1}
HEADS, SIZE = 2, 4


def passed(x, group, by):
    size, rank = distributed.get_world_size(group), distributed.get_rank(group)
    came = torch.empty_like(x)
    ranks = [distributed.get_global_rank(group, (rank + step) % size) for step in (by, -by)]
    sending = distributed.P2POp(distributed.isend, x, ranks[0], group)
    for work in distributed.batch_isend_irecv([sending, distributed.P2POp(distributed.irecv, came, ranks[1], group)]):
        work.wait()
    return came


class Pass(torch.autograd.Function):
    """To the next rank, and gradients back to the one before."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return passed(x.contiguous(), group, 1)

    @staticmethod
    def backward(ctx, grad):
        return passed(grad.contiguous(), ctx.group, -1), None


def ring(q, k, v, group):
    size, rank = (1, 0) if group is None else (distributed.get_world_size(group), distributed.get_rank(group))
    own = torch.arange(q.shape[2])
    queries = rank * len(own) + own
    top = q.new_full((*q.shape[:3], 1), -1e30)
    below, above = torch.zeros_like(top), torch.zeros_like(q)
    for turn in range(size):
        block = (rank - turn) % size
        keys = block * len(own) + own
        scores = (q @ k.transpose(-1, -2) / 2).masked_fill(keys > queries[:, None], float("-inf"))
        higher = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
        weights, shrink = (scores - higher).exp(), (top - higher).exp()
        below = below * shrink + weights.sum(-1, keepdim=True)
        above = above * shrink + weights @ v
        top = higher
        if turn < size - 1:
            k, v = Pass.apply(k, group), Pass.apply(v, group)
    return above / below


class Attention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)
        self.out = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + self.out(ring(q, k, v, self.group).transpose(1, 2).flatten(2))


def build():
    return Attention()


def parallelize(model, mesh):
    model.group = mesh.get_group("cp")


'''
    + STEP
)

EXCHANGED = '''
BATCH_AXES = {"sp": 1}
HEADS = 4


class Swap(torch.autograd.Function):
    """Split one dim over ranks and gather another."""

    @staticmethod
    def forward(ctx, x, split, gather, group):
        ctx.args = gather, split, group
        size = distributed.get_world_size(group)
        sent = [part.contiguous() for part in x.chunk(size, split)]
        received = [torch.empty_like(part) for part in sent]
        distributed.all_to_all(received, sent, group=group) if False else exchange(received, sent, group)
        return torch.cat(received, gather)

    @staticmethod
    def backward(ctx, grad):
        return Swap.apply(grad, *ctx.args), None, None, None


def exchange(received, sent, group):
    out = torch.empty_like(torch.stack(sent))
    distributed.all_to_all_single(out, torch.stack(sent), group=group)
    for target, part in zip(received, out):
        target.copy_(part)


class Attention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x):
        b, t, _ = x.shape
        parts = [part.view(b, t, HEADS, -1) for part in self.qkv(x).chunk(3, -1)]
        if self.group is not None:
            parts = [Swap.apply(part, 2, 1, self.group) for part in parts]
        q, k, v = (part.transpose(1, 2) for part in parts)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        if self.group is not None:
            out = Swap.apply(out, 1, 2, self.group)
        return x + self.out(out.reshape(b, t, -1))


def build():
    return nn.Sequential(Attention(), nn.LayerNorm(16), Attention())


def parallelize(model, mesh):
    for layer in (model[0], model[2]):
        layer.group = mesh.get_group("sp")


def batch():
    return torch.randn(2, 8, 16)


def step(model, x, mesh):
    loss = model(x).square().mean()
    loss.backward()
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad, op=distributed.ReduceOp.AVG, group=mesh.get_group("sp"))
    loss = loss.detach()
    distributed.all_reduce(loss, op=distributed.ReduceOp.AVG, group=mesh.get_group("sp"))
    return loss

'''

GROUPED = """
KEYS = 2


class Attention(nn.Module):
    group, size = None, 1

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 4 * heads, bias=False) for heads in (4, KEYS, KEYS))
        self.out = nn.Linear(16, 8, bias=False)

    def forward(self, x):
        entered = x if self.group is None else Copy.apply(x, self.group)
        q, k, v = (layer(entered).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out = self.out(mixed.transpose(1, 2).flatten(2))
        return x + (out if self.group is None else Sum.apply(out, self.group))


def build():
    return nn.Sequential(Attention(), Attention())


def batch():
    return torch.randn(2, 6, 8)


def parallelize(model, mesh):
    for layer in model:
        layer.group = mesh.get_group("tp")
        for split in (layer.q, layer.k, layer.v):
            split.weight = own(split.weight, mesh)
        layer.out.weight = own(layer.out.weight, mesh, 1)
"""

ONE_KEY = (
    GROUPED.replace("KEYS = 2", "KEYS = 1").replace("(layer.q, layer.k, layer.v):", "(layer.q,):")
    + """

def step(model, x, mesh):
    loss = model(x).square().mean()
    loss.backward()
    for layer in model:
        for shared in (layer.k, layer.v):
            distributed.all_reduce(shared.weight.grad, group=mesh.get_group("tp"))
    return loss.detach()
"""
)

CASES = (
    Bug(
        "values of all heads beside the rank's own queries and keys",
        "tp=2",
        GROUPED,
        (("(layer.q, layer.k, layer.v):", "(layer.q, layer.k):"),),
        ("wrong-value",),
        ("scaled_dot_product_attention in case.py:78", "not the same ones", "the key and value heads of its own query"),
        with_lines=True,
    ),
    Healthy("one key and value head for all queries, on every rank", "tp=2", ONE_KEY),
    Bug(
        "rotary positions that count from 0 on every rank",
        "cp=2",
        CAUSAL,
        (
            (
                "q, k = rotate(q, positions), rotate(k, positions)",
                "q, k = rotate(q, torch.arange(t)), rotate(k, torch.arange(t))",
            ),
        ),
        ("wrong-value", "sequence-order"),
        ("position|rotat|start",),
    ),
    Bug(
        "a causal mask without the rank's offset",
        "cp=2",
        CAUSAL,
        (("mask = positions[:, None] >=", "mask = torch.arange(t)[:, None] >="),),
        ("wrong-value", "sequence-order"),
        ("mask|position|start",),
    ),
    Bug(
        "heads put back in another order after an exchange",
        "sp=2",
        EXCHANGED,
        (
            (
                "out = Swap.apply(out, 1, 2, self.group)",
                "out = Swap.apply(out, 1, 2, self.group).flatten(2).view(b, t, 2, 2, -1).transpose(2, 3)",
            ),
        ),
        ("misordered", "wrong-value"),
        ("order",),
    ),
    Bug(
        "a ring that numbers blocks in the other direction than it passes them",
        "cp=4",
        RING,
        (("(rank - turn) % size", "(rank + turn) % size"),),
        ("wrong-value",),
        ("keys = block * len(own)", "rank 1 masks keys 0-3", "takes them as 8-11", "the block of rank - turn"),
        never=("sizes, offsets",),
        with_lines=True,
    ),
    Bug(
        "a ring whose keys always have the rank's own positions",
        "cp=2",
        RING,
        (("(rank - turn) % size", "rank"),),
        ("wrong-value",),
        ("takes them as 0-7", "the block of rank - turn"),
        never=("sizes, offsets",),
        with_lines=True,
    ),
    Bug(
        "a ring whose queries count from 0 on every rank",
        "cp=4",
        RING,
        (("queries = rank * len(own) + own", "queries = 1 * own"),),
        ("wrong-value",),
        ("positions that the queries don't have", "queries 4-7"),
        with_lines=True,
    ),
    Bug(
        "a ring that passes keys on and keeps values",
        "cp=4",
        RING,
        (("Pass.apply(k, group), Pass.apply(v, group)", "Pass.apply(k, group), v"),),
        ("wrong-value",),
        ("case.py",),
        never=("positions that the",),
        with_lines=True,
    ),
    Bug(
        "a ring that doesn't shrink sums to a higher maximum",
        "cp=4",
        RING,
        (("below = below * shrink + weights", "below = below + weights"),),
        ("wrong-value",),
        ("case.py",),
        never=("positions that the", "max of its own part"),
        with_lines=True,
    ),
)
