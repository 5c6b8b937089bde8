"""Bugs where code takes a tensor apart, or runs along a dim, as if a rank had the whole of it."""

from __future__ import annotations

from tests.bugs.case import Bug

BY_HAND = '''
class Gather(torch.autograd.Function):
    """All parts of a dim; backward sums what the ranks want of this part."""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        parts = [torch.empty_like(x) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        distributed.all_reduce(grad, group=ctx.group)
        size, rank = distributed.get_world_size(ctx.group), distributed.get_rank(ctx.group)
        return grad.chunk(size, ctx.dim)[rank].contiguous(), None, None


def copy_in(x, group): return x if group is None else Copy.apply(x, group)
def sum_out(x, group): return x if group is None else Sum.apply(x, group)
def gather(x, dim, group): return x if group is None else Gather.apply(x, dim, group)
def part_of(group): return 0 if group is None else distributed.get_rank(group)
'''

IMAGES = (
    BY_HAND
    + """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.group = nn.Conv2d(4, 32, 1), nn.Conv2d(16, 4, 1, bias=False), None
    def forward(self, x):
        h = functional.tanh(self.up(copy_in(x, self.group)))
        h = functional.glu(h, 1)
        return x + sum_out(functional.conv2d(h, self.down.weight), self.group)
def build(): return nn.Sequential(nn.Conv2d(3, 4, 1), Block())
def batch(): return torch.randn(4, 3, 3, 3)
def parallelize(model, mesh):
    rank, size, block = mesh.get_local_rank(), mesh.size(), model[1]
    block.group = mesh.get_group()
    for weight in (block.up.weight, block.up.bias):
        weight.data = torch.cat([half.chunk(size)[rank] for half in weight.data.chunk(2)])
    block.down.weight.data = block.down.weight.data.chunk(size, 1)[rank].clone()
"""
)

SHARED_KEY = (
    BY_HAND
    + """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.group = nn.Linear(16, 32, bias=False), nn.Linear(16, 16, bias=False), None
    def forward(self, x):
        q, k, v = self.qkv(x).split([16, 8, 8], -1)
        q, k = copy_in(q, self.group), copy_in(k, self.group)
        v = copy_in(v, self.group)
        width, rank = self.out.weight.shape[1], part_of(self.group)
        q = q[..., rank * width : (rank + 1) * width].unflatten(-1, (-1, 8)).transpose(1, 2)
        k, v = (one[:, None].expand(-1, q.shape[1], -1, -1) for one in (k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + sum_out(self.out(out.transpose(1, 2).flatten(2)), self.group)
def build(): return nn.Sequential(nn.Linear(6, 16), Attention())
def batch(): return torch.randn(3, 7, 6)
def parallelize(model, mesh):
    model[1].group, weight = mesh.get_group(), model[1].out.weight
    weight.data = weight.data.chunk(mesh.size(), 1)[mesh.get_local_rank()].clone()
"""
)

FEATURES = (
    BY_HAND
    + """
class Join(Gather):
    @staticmethod
    def backward(ctx, grad):
        size, rank = distributed.get_world_size(ctx.group), distributed.get_rank(ctx.group)
        return grad.chunk(size, ctx.dim)[rank].contiguous(), None, None
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.group = nn.Linear(12, 36), None
    def join(self, x): return x if self.group is None else Join.apply(x, -1, self.group)
    def forward(self, x):
        h = self.up(copy_in(x, self.group))
        a, b, c = h.unflatten(-1, (3, h.shape[-1] // 3)).unbind(-2)
        h = self.join(a.tanh() * b.sigmoid() + c)
        return h.flip(-1)
def build(): return nn.Sequential(Layer(), Layer(), nn.Linear(12, 5))
def batch(): return torch.randn(7, 12)
def parallelize(model, mesh):
    rank, size = mesh.get_local_rank(), mesh.size()
    for layer in model[:2]:
        layer.group = mesh.get_group()
        for weight in (layer.up.weight, layer.up.bias):
            weight.data = torch.cat([part.chunk(size)[rank] for part in weight.data.chunk(3)])
"""
)

OVER_RANKS = """
AXES = ("cp",)
BATCH_AXES = {"cp": 1}
def parallelize(model, mesh): model.group = mesh.get_group()
def loss(model, x): return model(x).square().mean()
def step(model, x, mesh):
    value = loss(model, x)
    value.backward()
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad)
        parameter.grad /= mesh.size()
    return value
"""

DOCUMENTS = (
    BY_HAND
    + OVER_RANKS
    + """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48, bias=False), nn.Linear(16, 16, bias=False)
    def forward(self, x, mask, group):
        q, k, v = self.qkv(x).chunk(3, -1)
        k, v = gather(k, 1, group), gather(v, 1, group)
        return x + self.out(functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers, self.group = nn.Embedding(24, 16), nn.ModuleList([Layer(), Layer()]), None
    def forward(self, words):
        ends = (words == 0).long()
        documents = ends.cumsum(1) - ends
        ended = gather(ends.sum(1, keepdim=True), 1, self.group)
        documents = documents + ended[:, : part_of(self.group)].sum(1, keepdim=True)
        places = torch.arange(words.shape[1]).expand_as(words) + part_of(self.group) * words.shape[1]
        theirs, before = gather(documents, 1, self.group), gather(places, 1, self.group)
        mask = (documents[:, :, None] == theirs[:, None]) & (places[:, :, None] >= before[:, None])
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x, mask, self.group)
        return x
def build(): return Model()
def batch():
    words = torch.randint(1, 24, (4, 24))
    words[[0, 0, 1, 2, 3, 3], [4, 17, 7, 13, 10, 15]] = 0
    return words
"""
)

FOURIER = (
    BY_HAND
    + OVER_RANKS
    + """
class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.group = nn.Linear(6, 16), nn.Linear(16, 6), None
    def forward(self, x):
        h = gather(functional.tanh(self.up(x)), 1, self.group)
        mixed = torch.fft.fft2(h, dim=(1, 2), norm="ortho").real
        return x + self.down(mixed[:, part_of(self.group) * x.shape[1] :][:, : x.shape[1]])
def build(): return Mixer()
def batch(): return torch.randn(3, 16, 6)
"""
)

SHIFTS = (
    BY_HAND
    + OVER_RANKS
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.near, self.out = nn.Linear(8, 8), nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 8)
        self.group = None
    def ends(self, x):
        rank, both = part_of(self.group), gather(torch.stack([x[:, 0], x[:, -1]], 1), 1, self.group)
        zeros = both[:, :1] * 0
        before = both[:, 2 * rank - 1 : 2 * rank] if rank else zeros
        return before, both[:, 2 * rank + 2 : 2 * rank + 3] if 2 * rank + 2 < both.shape[1] else zeros
    def forward(self, x):
        before = functional.pad(x, (0, 0, 1, 0))[:, :-1]
        if self.group is not None:
            before = torch.cat([self.ends(x)[0], before[:, 1:]], 1)
        x = x + self.mix(x + before).tanh()
        if self.group is None:
            near = self.near(x.transpose(1, 2))
        else:
            first, last = self.ends(x)
            near = self.near(torch.cat([first, x, last], 1).transpose(1, 2))[..., 1:-1]
        return self.out(near.transpose(1, 2))
def build(): return Model()
def batch(): return torch.randn(3, 12, 8)
"""
)

BAGS = (
    BY_HAND
    + """
class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.group, self.first = nn.Parameter(torch.randn(12, 6)), None, 0
    def forward(self, ids):
        here = (ids >= self.first) & (ids < self.first + len(self.weight))
        rows = functional.embedding((ids - self.first).clamp(0, len(self.weight) - 1), self.weight) * here[..., None]
        count = (ids >= 0).sum(-1, keepdim=True).clamp(min=1)
        return sum_out(rows.sum(1) / count, self.group)
def build(): return nn.Sequential(Bag(), nn.Linear(6, 3))
def batch():
    ids = torch.randint(12, (8, 5))
    ids[torch.arange(8), torch.arange(8) % 5] = -1
    return ids
def parallelize(model, mesh):
    rank, weight = mesh.get_local_rank(), model[0].weight
    model[0].group = mesh.get_group()
    weight.data = weight.data.chunk(mesh.size())[rank].clone()
    model[0].first = rank * len(weight)
"""
)

CASES = (
    Bug(
        "a token shift without the last token of the rank before",
        "cp=2",
        SHIFTS,
        (("        if self.group is not None:\n", "        if False:\n"),),
        ("wrong-value",),
        ("pad in case.py:", "Its first slice needs the end of the previous part"),
        ("keys and values", "sizes and offsets"),
        with_lines=True,
    ),
    Bug(
        "a convolution without the neighbors' tokens",
        "cp=2",
        SHIFTS,
        (("        if self.group is None:\n            near", "        if True:\n            near"),),
        ("wrong-value",),
        ("conv1d in case.py:", "first slice needs the end", "last slice needs the start of the next part"),
        ("keys and values", "sizes and offsets"),
        with_lines=True,
    ),
    Bug(
        "bags divided by the ids that a rank has",
        "tp=2",
        BAGS,
        (("(ids >= 0).sum(-1", "here.sum(-1"),),
        ("unreduced-output",),
        ("divides each rank's own sum by its own sum or count", "rows.sum(1) / count"),
        ("group and op of each collective",),
        with_lines=True,
    ),
    Bug(
        "features turned around on each rank before they are joined",
        "tp=2",
        FEATURES,
        (
            (
                "self.join(a.tanh() * b.sigmoid() + c)\n        return h.flip(-1)",
                "(a.tanh() * b.sigmoid() + c).flip(-1)\n        return self.join(h)",
            ),
        ),
        ("misordered", "wrong-value"),
        ("flip in case.py:", "each rank's own part"),
        ("than it cut them", "first on all ranks", "order of their ranks"),
        with_lines=True,
    ),
    Bug(
        "features indexed on each rank before they are joined",
        "tp=2",
        FEATURES,
        (
            (
                "self.join(a.tanh() * b.sigmoid() + c)\n        return h.flip(-1)",
                "a.tanh() * b.sigmoid() + c\n        return self.join(h[:, torch.arange(h.shape[1]).flip(0)])",
            ),
        ),
        ("misordered", "wrong-value"),
        ("getitem in case.py:", "each rank's own part"),
        ("than it cut them",),
        with_lines=True,
    ),
    Bug(
        "the rows of three gates cut in one stretch",
        "tp=2",
        FEATURES,
        (
            (
                "torch.cat([part.chunk(size)[rank] for part in weight.data.chunk(3)])",
                "weight.data.chunk(size)[rank].clone()",
            ),
        ),
        ("wrong-value",),
        ("unflatten in case.py:", "3 segments", "0.up.weight is cut in one stretch: rank 0 has rows 0-17"),
        ("joins parts", "before dims are merged"),
        with_lines=True,
    ),
    Bug(
        "a gated linear unit whose halves are split as one block",
        "tp=2",
        IMAGES,
        (
            (
                "torch.cat([half.chunk(size)[rank] for half in weight.data.chunk(2)])",
                "weight.data.chunk(size)[rank].clone()",
            ),
        ),
        ("wrong-value",),
        ("glu", "2 segments", "functional.glu(h, 1)"),
        ("gather or reduce",),
        with_lines=True,
    ),
    Bug(
        "a value that all heads share without a sum in backward",
        "tp=2",
        SHARED_KEY,
        (("        v = copy_in(v, self.group)\n", ""),),
        ("wrong-value",),
        ("result[2] of split", "nothing sums its gradient"),
        ("match its forward",),
        with_lines=True,
    ),
    Bug(
        "documents that each rank counts from its first token",
        "cp=2",
        DOCUMENTS,
        (
            ("        ended = gather(ends.sum(1, keepdim=True), 1, self.group)\n", ""),
            ("        documents = documents + ended[:, : part_of(self.group)].sum(1, keepdim=True)\n", ""),
        ),
        ("wrong-value",),
        ("cumsum", "documents = ends.cumsum(1) - ends"),
        ("keys and values",),
        with_lines=True,
    ),
    Bug(
        "a Fourier transform of a rank's own tokens",
        "cp=2",
        FOURIER,
        (
            ("h = gather(functional.tanh(self.up(x)), 1, self.group)", "h = functional.tanh(self.up(x))"),
            ("mixed[:, part_of(self.group) * x.shape[1] :][:, : x.shape[1]]", "mixed"),
        ),
        ("wrong-value",),
        ("fft2", "its part of"),
        ("sizes and offsets, and",),
        with_lines=True,
    ),
)
