"""Context parallel: three layers of attention whose ranks gather keys and values of the whole sequence."""

from __future__ import annotations

from tests.bugs.places.fault import LAYERS_AND_HEAD, Fault, Program, spoiled

TEXT = (
    '''
BATCH_AXES = {"dp": 0, "cp": 1}
LAYERS, TOKENS, FEATURES = 3, 8, 8


class Gather(torch.autograd.Function):
    """All ranks' parts of the sequence, one after the other; backward sums, and each rank takes its own."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(grad, group=ctx.group)
        size = distributed.get_world_size(ctx.group)
        rank = distributed.get_group_rank(ctx.group, distributed.get_rank())
        return grad.chunk(size, 1)[rank], None


class Attention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = self.q(x), self.keys(self.k(x)), self.values(self.v(x))
        mask = torch.arange(k.shape[1]) <= self.first(x) + torch.arange(x.shape[1])[:, None]
        return self.o(functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))

    def first(self, x):
        """Return the position of the rank's first token."""
        return 0 if self.group is None else distributed.get_group_rank(self.group, distributed.get_rank()) * x.shape[1]

    def keys(self, k):
        return k if self.group is None else Gather.apply(k, self.group)

    def values(self, v):
        return v if self.group is None else Gather.apply(v, self.group)


class Positions(nn.Module):
    first = 0

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(TOKENS, FEATURES))

    def forward(self, x):
        return x + self.table[self.first : self.first + x.shape[1]]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.pos, self.norm, self.attn = Positions(), nn.LayerNorm(FEATURES), Attention()
        self.mlp = nn.Linear(FEATURES, FEATURES)

    def forward(self, x):
        x = self.pos(x)
        x = x + self.attn(self.norm(x))
        return x + torch.tanh(self.mlp(x))

'''
    + LAYERS_AND_HEAD
    + '''

def batch():
    return torch.randn(4, TOKENS, FEATURES)


def parallelize(model, mesh):
    for layer in model.layers:
        layer.attn.group = mesh.get_group("cp")
        layer.pos.first = mesh.get_local_rank("cp") * TOKENS // mesh["cp"].size()
    spoil(model.layers[1], mesh)


def spoil(layer, mesh):
    """Leave everything as it is."""


def step(model, rows, mesh):
    loss = model(rows).square().mean()
    loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            reduce(name, parameter.grad, mesh)
    return loss.detach()


def reduce(name, grad, mesh):
    distributed.all_reduce(grad)
    grad /= mesh.size()

'''
)

SEQUENCE = Program("attention, CP + DP", "dp=2,cp=2", TEXT)


OWN_ONLY = """class Own(Gather):
        @staticmethod
        def backward(ctx, grad):
            return grad.chunk(2, 1)[distributed.get_group_rank(ctx.group, distributed.get_rank())], None
    layer.attn.values = lambda v: Own.apply(v, layer.attn.group)"""

NO_BACKWARD = """def values(v):
        parts = [torch.empty_like(v) for _ in range(2)]
        distributed.all_gather(parts, v.detach().contiguous(), group=layer.attn.group)
        return torch.cat(parts, 1)
    layer.attn.values = values"""

SWAPPED = """values = layer.attn.values
    layer.attn.values = lambda v: torch.cat(values(v).chunk(2, 1)[::-1], 1)"""

FAULTS = (
    Fault(
        "a mask of positions within the rank",
        SEQUENCE,
        spoiled("layer.attn.first = lambda x: 0"),
        ("layers.1.attn",),
        ("cp", "mask|position"),
    ),
    Fault(
        "positions that begin again on every rank of cp",
        SEQUENCE,
        spoiled("layer.pos.first = 0"),
        ("layers.1.pos",),
        ("position|again",),
    ),
    Fault(
        "keys of the rank's own tokens only",
        SEQUENCE,
        spoiled("layer.attn.keys = lambda k: k; layer.attn.values = lambda v: v; layer.attn.first = lambda x: 0"),
        ("layers.1.attn",),
        ("cp", "gather"),
    ),
    Fault("values gathered in another order than keys", SEQUENCE, spoiled(SWAPPED), ("layers.1.attn",), ("cp|order",)),
    Fault(
        "a gather whose backward does not sum",
        SEQUENCE,
        spoiled(OWN_ONLY),
        ("layers.1.attn", "layers.1.attn.v"),
        ("backward",),
    ),
    Fault(
        "a gather without a backward",
        SEQUENCE,
        spoiled(NO_BACKWARD),
        ("layers.1.attn", "layers.1.attn.v"),
        ("cut|detach|nothing flows back|no backward|without a backward",),
    ),
)
