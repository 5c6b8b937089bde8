"""Weights that code cuts over tp by itself, alone or with FSDP over dp, and optimizers that work on whole matrices."""

from __future__ import annotations

from tests.bugs.case import Bug, Healthy

BLOCK = """
BATCH_AXES = ("dp",)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.group = None

    def forward(self, x):
        if self.group is None:
            return x + self.down(torch.tanh(self.up(x)))
        term = functional.linear(torch.tanh(self.up(Copy.apply(x, self.group))), self.down.weight)
        return x + Sum.apply(term, self.group) + self.down.bias


def build():
    return nn.Sequential(Block(), Block(), Block())


def cut(block, rank, size):
    block.up.weight = nn.Parameter(block.up.weight.detach().chunk(size)[rank].clone())
    block.up.bias = nn.Parameter(block.up.bias.detach().chunk(size)[rank].clone())
    block.down.weight = nn.Parameter(block.down.weight.detach().chunk(size, 1)[rank].clone())


def parallelize(model, mesh):
    tp = mesh["tp"]
    for block in model:
        block.group = tp.get_group()
        cut(block, tp.get_local_rank(), tp.size())
    fully_shard(model, mesh=mesh["dp"])


def batch():
    return torch.randn(8, 8)

"""

OUTER = (
    BLOCK.replace('    fully_shard(model, mesh=mesh["dp"])\n', "")
    + """
def step(model, rows, mesh):
    loss = model(rows).square().mean()
    loss.backward()
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        parameter.grad /= mesh["dp"].size()
    return loss

"""
)
"""A block without FSDP, so that any axis of the mesh may be the outer one."""

WORDS = """
BATCH_AXES = ("dp",)


class Words(nn.Module):
    group, first = None, 0

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 8))

    def forward(self, ids):
        local = ids - self.first
        is_other = (local < 0) | (local >= len(self.weight))
        out = self.weight[local.masked_fill(is_other, 0)].masked_fill(is_other[..., None], 0)
        return out if self.group is None else Sum.apply(out, self.group)


def build():
    return nn.Sequential(Words(), nn.Linear(8, 4))


def parallelize(model, mesh):
    size, rank = mesh["tp"].size(), mesh.get_local_rank("tp")
    model[0].group, model[0].first = mesh.get_group("tp"), rank * 12 // size
    model[0].weight.data = model[0].weight.data.chunk(size)[rank].clone()


def batch():
    return torch.randint(12, (8, 5))


def step(model, rows, mesh):
    loss = model(rows).square().mean()
    loss.backward()
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        parameter.grad /= mesh["dp"].size()
    return loss

"""

SUM = "return x + Sum.apply(term, self.group) + self.down.bias"

HEADS = """
class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own, group):
        ctx.rank, parts = distributed.get_rank(group), [torch.empty_like(own) for _ in range(2)]
        distributed.all_gather(parts, own.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, gradient):
        return gradient[ctx.rank], None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)
        self.out = nn.Linear(8, 8, bias=False)
        self.heads, self.group = 2, None

    def forward(self, x):
        rows, tokens, _ = x.shape
        given = x if self.group is None else Copy.apply(x, self.group)
        parts = [part.view(rows, tokens, self.heads, 4).transpose(1, 2) for part in self.qkv(given).chunk(3, -1)]
        own = functional.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(rows, tokens, -1)
        if self.group is not None:
            own = Gathered.apply(own, self.group).permute(1, 2, 0, 3).reshape(rows, tokens, 8)
        return self.out(own)


def build():
    return nn.Sequential(nn.Linear(8, 8), Attention(), nn.Linear(8, 4))


def parallelize(model, mesh):
    attention, rank = model[1], mesh.get_local_rank("tp")
    part = attention.qkv.weight.detach().view(3, 2, 4, 8)[:, rank].reshape(12, 8)
    attention.qkv.weight = nn.Parameter(part.clone())
    attention.heads, attention.group = 1, mesh.get_group("tp")


def batch():
    return torch.randn(3, 5, 8)


"""

ORTHOGONAL = """
BATCH_AXES = ("fsdp",)


def build():
    return nn.Linear(8, 16)


def parallelize(model, mesh):
    fully_shard(model, mesh=mesh["fsdp"])


def batch():
    return torch.randn(24, 8)


def whole(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def part(step, like):
    return distribute_tensor(step, like.device_mesh, like.placements).to_local() if isinstance(like, DTensor) else step


class Orthogonal(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            gradient = whole(parameter.grad)
            if gradient.ndim == 2:
                left, _, right = torch.linalg.svd(gradient, full_matrices=False)
                gradient = left @ right
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            own -= 0.02 * part(gradient, parameter.grad)


def optimizer(model, mesh):
    return Orthogonal(model.parameters(), {})

"""

QUANTIZED = """
class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        weight = torch.randn(12, 8)
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = nn.Parameter(torch.randn(12))

    def forward(self, x):
        return functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


class Net(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.into, self.up, self.down = nn.Linear(5, 8), Quantized(), nn.Linear(12, 3, bias=False)

    def forward(self, x):
        h = self.into(x)
        if self.group is not None:
            h = Copy.apply(h, self.group)
        y = self.down(self.up(h).tanh())
        return y if self.group is None else Sum.apply(y, self.group)


def build():
    return Net()


def parallelize(model, mesh):
    up, rank, size = model.up, mesh["tp"].get_local_rank(), mesh["tp"].size()
    model.group = mesh.get_group("tp")
    up.weight, up.scale = up.weight.chunk(size)[rank].clone(), up.scale.chunk(size)[rank].clone()
    up.bias = nn.Parameter(up.bias.detach().chunk(size)[rank].clone())
    model.down.weight = nn.Parameter(model.down.weight.detach().chunk(size, 1)[rank].clone())


def batch():
    return torch.randn(12, 5)
"""
"""Weights of eight bits, which hold no ids, beside others, all cut by hand."""

CASES = (
    Bug(
        "heads of two ranks that alternate feature by feature",
        "tp=2",
        HEADS,
        ((".permute(1, 2, 0, 3)", ".permute(1, 2, 3, 0)"),),
        ("misordered", "wrong-value"),
        ("call permute(0, 1, 3, 2)",),
        with_lines=True,
    ),
    Bug(
        "a residual within the sum of a hand-cut block under FSDP",
        "dp=2,tp=2",
        BLOCK,
        ((SUM, "return Sum.apply(x + term, self.group) + self.down.bias"),),
        ("wrong-scale",),
        ("before the sum", "the input of"),
        ("from_local",),
    ),
    Bug(
        "columns of a hand-cut weight on the other rank, under FSDP",
        "dp=2,tp=2",
        BLOCK,
        ((".chunk(size, 1)[rank]", ".chunk(size, 1)[size - 1 - rank]"),),
        ("misordered", "wrong-placement", "wrong-value"),
        ("down.weight",),
        ("from_local",),
    ),
    Bug(
        "an orthogonal step of each rank's rows",
        "fsdp=2",
        ORTHOGONAL,
        (
            ("return gradient.full_tensor() if", "return gradient.to_local() if"),
            ("return distribute_tensor(step, like.device_mesh, like.placements).to_local() if", "return step if"),
        ),
        ("wrong-value",),
        ("whole matri", "full_tensor()"),
        ("learning rate",),
    ),
    Bug(
        "weights cut by the rank in the world, with tp as the outer axis",
        "tp=2,dp=2",
        OUTER,
        (("cut(block, tp.get_local_rank(), tp.size())", "cut(block, distributed.get_rank() % tp.size(), tp.size())"),),
        ("wrong-value",),
        (
            "0.up.weight is cut over dp, which splits the batch, instead of by the coordinate along tp",
            "1 of its 2 parts",
            "mesh.get_local_rank('tp')",
        ),
        with_lines=True,
    ),
    Bug(
        "weights cut by the rank in the world, with more ranks along tp than along dp",
        "tp=4,dp=2",
        OUTER,
        (("cut(block, tp.get_local_rank(), tp.size())", "cut(block, distributed.get_rank() % tp.size(), tp.size())"),),
        ("wrong-value",),
        ("0.up.weight is cut over dp", "2 of its 4 parts"),
        never=("each other's parts",),
        with_lines=True,
    ),
    Bug(
        "columns of one weight of two cut along dp",
        "dp=2,tp=2",
        OUTER,
        (("chunk(size, 1)[rank]", "chunk(size, 1)[distributed.get_rank() // size]"),),
        ("wrong-value",),
        ("0.down.weight is cut over dp", "1 of its 2 parts"),
        with_lines=True,
    ),
    Bug(
        "words of a vocabulary cut along dp",
        "tp=2,dp=2",
        WORDS,
        (('mesh.get_local_rank("tp")', "distributed.get_rank() % 2"),),
        ("wrong-value",),
        ("0.weight is cut over dp", "1 of its 2 parts"),
        with_lines=True,
    ),
    Bug(
        "scales of a quantized weight's first rows on every rank",
        "tp=2",
        QUANTIZED,
        (("up.scale.chunk(size)[rank]", "up.scale.chunk(size)[0]"),),
        ("duplicated", "missing", "misordered"),
        ("up.scale",),
    ),
    Healthy("weights of eight bits and their scales", "tp=4", QUANTIZED),
)
