"""A rank's part that is taken for the first of the whole: queries under a mask, rows of a table, rounds of a loop."""

from __future__ import annotations

from tests.bugs.attention_parts import CAUSAL
from tests.bugs.case import Bug, Healthy

MASK = "out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)"
IS_CAUSAL = "out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)"
GROUPED = CAUSAL.replace(
    "        if self.group is not None:\n            k, v = Gather",
    "        k, v = k[:, :1], v[:, :1]\n        if self.group is not None:\n            k, v = Gather",
).replace("attn_mask=mask)", "attn_mask=mask, enable_gqa=True)")

HEAD_TAIL = """
TOKENS = 16


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        distributed.all_reduce(grad, group=ctx.group)
        return grad.chunk(distributed.get_world_size(ctx.group), 1)[distributed.get_rank(ctx.group)], None


class Model(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(12, 8), nn.Embedding(TOKENS, 8)
        self.query, self.value = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 12)

    def forward(self, ids, index):
        t = ids.shape[1]
        first = 0 if self.group is None else distributed.get_rank(self.group) * t
        words = self.words(ids)
        x = words + self.places(index)
        query, keys, values, seen = self.query(x), x, self.value(x), index
        if self.group is not None:
            keys, values = Gather.apply(keys, self.group), Gather.apply(values, self.group)
            seen = Gather.apply(index[None], self.group)[0]
        y = functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen <= index[:, None])
        return self.head(x + y)


def build():
    return Model()


def parallelize(model, mesh):
    model.group = mesh.get_group("cp")


def batch():
    return torch.randint(12, (3, TOKENS)), torch.randint(12, (3, TOKENS))


def loss(model, data):
    ids, labels = data
    return functional.cross_entropy(model(ids, torch.arange(TOKENS)).flatten(0, 1), labels.flatten())


def own(mesh):
    rank, size = mesh.get_local_rank("cp"), mesh["cp"].size()
    chunks = torch.arange(TOKENS).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def step(model, data, mesh):
    at = own(mesh)
    ids, labels = (part[:, at] for part in data)
    value = functional.cross_entropy(model(ids, at).flatten(0, 1), labels.flatten())
    value.backward()
    total = value.detach().clone()
    for number in (total, *(p.grad for p in model.parameters())):
        distributed.all_reduce(number, group=mesh.get_group("cp"))
        number /= mesh["cp"].size()
    return total


def whole_output(output, mesh):
    group = mesh.get_group("cp")
    return Gather.apply(output, group)[:, Gather.apply(own(mesh)[None], group)[0].argsort()]

"""

LOOP = """
EXPERTS, TOP = 8, 2


class Experts(nn.Module):
    group, rank = None, 0

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, 8, 8) / 3)

    def forward(self, x):
        weights, ids = self.gate(x).topk(TOP, -1)
        weights = weights.softmax(-1)
        if self.group is not None:
            x, weights = Copy.apply(x, self.group), Copy.apply(weights, self.group)
        y = torch.zeros_like(x)
        local = len(self.experts)
        first = self.rank * local
        for i in range(local):
            share = (weights * (ids == first + i)).sum(-1, keepdim=True)
            y = y + share * torch.tanh(x @ self.experts[i])
        return y if self.group is None else Sum.apply(y, self.group)


def build():
    return nn.Sequential(nn.Linear(8, 8), Experts(), nn.Linear(8, 4))


def parallelize(model, mesh):
    experts = model[1]
    experts.group, experts.rank = mesh.get_group("ep"), mesh.get_local_rank("ep")
    experts.experts.data = experts.experts.data.chunk(mesh["ep"].size())[experts.rank].clone()


def batch():
    return torch.randn(28, 8)

"""

DENSE = LOOP.replace(
    "        weights, ids = self.gate(x).topk(TOP, -1)\n        weights = weights.softmax(-1)\n",
    "        weights = self.gate(x).softmax(-1)\n",
).replace("(weights * (ids == first + i)).sum(-1, keepdim=True)", "weights[:, first + i, None]")

TABLE_OF_SLICES = "slices 0-3, 12-15 of one tensor with slices 0-7 of the other"

WORDS_AND_PLACES = """
WORDS, TOKENS = 24, 8


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.contiguous().clone()
        distributed.all_reduce(x, group=group)
        return x.chunk(distributed.get_world_size(group), 1)[distributed.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(distributed.get_world_size(ctx.group))]
        distributed.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts, 1), None


class Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(distributed.get_world_size(ctx.group), 1)[distributed.get_rank(ctx.group)], None


class Embedded(nn.Module):
    group, rank = None, 0

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 16), nn.Embedding(TOKENS, 16)

    def forward(self, ids):
        rows = self.words.weight.shape[0]
        local = ids - self.rank * rows
        outside = (local < 0) | (local >= rows)
        x = self.words(local.masked_fill(outside, 0)).masked_fill(outside[..., None], 0)
        table = self.places.weight
        if self.group is not None:
            x, table = Scatter.apply(x, self.group), Copy.apply(table, self.group)
        places = torch.arange(x.shape[1]) + self.rank * x.shape[1]
        return x + functional.embedding(places, table)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix = Embedded(), nn.Linear(16, 16)

    def forward(self, ids):
        x, group = self.embed(ids), self.embed.group
        return torch.tanh(self.mix(x if group is None else Joined.apply(x, group)))


def build():
    return Model()


def parallelize(model, mesh):
    embed = model.embed
    embed.group, embed.rank = mesh.get_group(), mesh.get_local_rank()
    embed.words.weight = nn.Parameter(embed.words.weight.detach().chunk(mesh.size())[embed.rank].clone())


def batch():
    return torch.randint(WORDS, (2, TOKENS))

"""

CASES = (
    Bug(
        "places of a rank's tokens from zero, behind words of its own rows",
        "tp=2",
        WORDS_AND_PLACES,
        ((" + self.rank * x.shape[1]", ""),),
        ("wrong-value",),
        ("places = ", "rank's own offset"),
        never=("first wrong module", "its output is wrong"),
        with_lines=True,
    ),
    Bug(
        "a causal mask that counts a rank's queries from 0",
        "cp=2",
        CAUSAL,
        ((MASK, IS_CAUSAL),),
        ("wrong-value",),
        ("queries 8-15 of 16, and is_causal=True masks them as 0-7", "pass attn_mask"),
        with_lines=True,
    ),
    Bug(
        "a causal mask of grouped heads that counts a rank's queries from 0",
        "cp=4",
        GROUPED,
        ((MASK.replace("mask)", "mask, enable_gqa=True)"), IS_CAUSAL.replace("True)", "True, enable_gqa=True)")),),
        ("wrong-value",),
        ("queries 4-7 of 16, and is_causal=True masks them as 0-3",),
        with_lines=True,
    ),
    Bug(
        "positions of one stretch for tokens from front and back",
        "cp=2",
        HEAD_TAIL,
        (("self.places(index)", "self.places(torch.arange(first, first + t))"),),
        ("wrong-value",),
        (TABLE_OF_SLICES, "rows of a table"),
        with_lines=True,
    ),
    Bug(
        "a slice of the table for tokens from front and back",
        "cp=2",
        HEAD_TAIL,
        (("words + self.places(index)", "words + self.places.weight[first : first + t]"),),
        ("wrong-value",),
        ("slices|part",),
        with_lines=True,
    ),
    Bug(
        "a loop over a rank's experts whose counter is taken for the expert's number",
        "ep=2",
        LOOP,
        (("first = self.rank * local", "first = 0"),),
        ("wrong-value",),
        ("reads slices 4-7 on rank 1, and eq takes 0 to 3 there", "its coordinate times 4"),
        with_lines=True,
    ),
    Bug(
        "a loop over a rank's experts with the weights of the first experts",
        "ep=4",
        DENSE,
        (("first = self.rank * local", "first = 0"),),
        ("wrong-value",),
        ("reads slices 6-7 on rank 3", "its coordinate times 2"),
        with_lines=True,
    ),
    Bug(
        "a loop over a rank's experts whose results are not summed",
        "ep=2",
        LOOP,
        (("Sum.apply(y, self.group)", "y"),),
        ("wrong-value", "unreduced-output"),
        ("sum",),
        ("counts from 0",),
        with_lines=True,
    ),
    Bug(
        "every rank with the first experts in its loop",
        "ep=2",
        LOOP,
        (('.chunk(mesh["ep"].size())[experts.rank]', '.chunk(mesh["ep"].size())[0]'),),
        ("missing", "duplicated"),
        ("experts",),
        ("counts from 0",),
        with_lines=True,
    ),
    Healthy("causal masks of grouped heads by positions", "cp=4", GROUPED),
    Healthy("dense experts in a loop", "ep=4", DENSE),
)
