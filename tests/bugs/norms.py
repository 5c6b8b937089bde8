"""Norms whose statistics or scales are shared by ranks that split what they normalise, and adapters beside them."""

from __future__ import annotations

from tests.bugs.case import Bug, Healthy
from tests.bugs.models import FSDP

NORMED = '''
class MLP(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 12, bias=False)
        self.scale = nn.Parameter(torch.rand(12) + 0.5)
        self.down = nn.Linear(12, 8, bias=False)

    def forward(self, x):
        if self.group is not None:
            x = Copy.apply(x, self.group)
        x = self.up(x)
        square = x.square().sum(-1, keepdim=True)
        if self.group is not None:
            square = Both.apply(square, self.group)
        x = x * torch.rsqrt(square / 12 + 1e-5) * self.scale
        x = self.down(x)
        return x if self.group is None else Sum.apply(x, self.group)


class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.clone()
        distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        distributed.all_reduce(grad, group=ctx.group)
        return grad, None


def build():
    return MLP()


def parallelize(model, mesh):
    """Split the features over tp: the norm is over all of them."""
    model.up.weight = own(model.up.weight, mesh)
    model.scale = own(model.scale, mesh)
    model.down.weight = own(model.down.weight, mesh, 1)
    model.group = mesh.get_group("tp")


def batch():
    return torch.randn(24, 8)

'''

LORA = '''
class Adapted(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 12, bias=False)
        self.a = nn.Linear(8, 3, bias=False)
        self.b = nn.Linear(3, 12, bias=False)
        self.up.weight.requires_grad = False

    def forward(self, x):
        low = self.a(x)
        if self.group is not None:
            low = Copy.apply(low, self.group)
        return self.up(x) + self.b(low)


def build():
    return Adapted()


def parallelize(model, mesh):
    """Keep A whole and split B by its rows."""
    model.up.weight = own(model.up.weight, mesh)
    model.up.weight.requires_grad = False
    model.b.weight = own(model.b.weight, mesh)
    model.group = mesh.get_group("tp")


def batch():
    return torch.randn(24, 8)


def whole_output(output, mesh):
    return DTensor.from_local(output, mesh, [Shard(1)]).full_tensor()


def loss(model, batch):
    found = model(batch).square().sum() / 24 / 12
    return found


def step(model, rows, mesh):
    value = loss(model, rows)
    value.backward()
    value = value.detach().clone()
    distributed.all_reduce(value, group=mesh.get_group("tp"))
    return value

'''

ADAPTERS = """
class Adapted(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.base, self.a, self.b = nn.Linear(8, 16), nn.Linear(8, 4, bias=False), nn.Linear(4, 16, bias=False)

    def forward(self, x):
        low = self.a(x)
        if self.group is not None:
            x = Copy.apply(x, self.group)
            low = Copy.apply(low, self.group)
        return self.base(x) + self.b(low)


class Layer(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.norm, self.gate, self.up, self.down = nn.LayerNorm(8), Adapted(), Adapted(), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        y = self.norm(x)
        y = self.down(torch.sigmoid(self.gate(y)) * self.up(y))
        return x + (y if self.group is None else Sum.apply(y, self.group))


def build():
    return nn.Sequential(Layer(), Layer())


def parallelize(model, mesh):
    for layer in model:
        layer.group = mesh.get_group("tp")
        layer.down.weight = own(layer.down.weight, mesh, 1)
        for adapted in (layer.gate, layer.up):
            adapted.group = layer.group
            adapted.base.weight, adapted.base.bias = own(adapted.base.weight, mesh), own(adapted.base.bias, mesh)
            adapted.b.weight = own(adapted.b.weight, mesh)


def batch():
    return torch.randn(4, 6, 8)

"""

HEADS = '''
class Attention(nn.Module):
    group, heads = None, 4

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 16, bias=False)
        self.k = nn.Linear(8, 16, bias=False)
        self.v = nn.Linear(8, 16, bias=False)
        self.norm = nn.Parameter(torch.rand(4) + 0.5)
        self.out = nn.Linear(16, 8, bias=False)

    def forward(self, x):
        norm = self.norm
        if self.group is not None:
            x, norm = Copy.apply(x, self.group), Copy.apply(norm, self.group)
        q, k, v = (layer(x).unflatten(-1, (self.heads, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q = functional.normalize(q, dim=-1) * norm
        x = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.out(x)
        return x if self.group is None else Sum.apply(x, self.group)


def build():
    return Attention()


def parallelize(model, mesh):
    """Split the heads; the scale of every head's features is shared by all heads."""
    for layer in (model.q, model.k, model.v):
        layer.weight = own(layer.weight, mesh)
    model.out.weight = own(model.out.weight, mesh, 1)
    model.group, model.heads = mesh.get_group("tp"), 4 // mesh["tp"].size()


def batch():
    return torch.randn(4, 6, 8)

'''

NARROW = FSDP.replace(
    '    fully_shard(model, mesh=mesh["fsdp"])',
    """    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh["fsdp"], mp_policy=policy)""",
)

CASES = (
    Bug(
        "a norm over the features of each rank",
        "tp=2",
        NORMED,
        (("            square = Both.apply(square, self.group)\n", "            square = square * 2\n"),),
        ("wrong-value", "unreduced-output"),
        ("tp", "down"),
    ),
    Bug(
        "the gradient of a norm's statistics not summed",
        "tp=2",
        NORMED,
        (
            (
                "        grad = grad.clone()\n        distributed.all_reduce(grad, group=ctx.group)\n"
                "        return grad, None\n\n\ndef build",
                "        return grad, None\n\n\ndef build",
            ),
        ),
        ("wrong-value",),
        ("up.weight", "collective without a backward"),
        ("AVG",),
    ),
    Bug(
        "the gradient of an adapter's first matrix not summed",
        "tp=2",
        LORA,
        (("            low = Copy.apply(low, self.group)\n", "            pass\n"),),
        ("unreduced-gradient",),
        ("a.weight", "tp", "SUM"),
        ("AVG",),
    ),
    Bug(
        "the gradients of adapters' first matrices not summed, in every layer",
        "tp=2",
        ADAPTERS,
        (("            low = Copy.apply(low, self.group)\n", ""),),
        ("unreduced-gradient",),
        ("1.up.b", "where 1.up.b begins", "tp"),
        never=("collective without a backward",),
    ),
    Bug(
        "the gradient of a scale that all heads share not summed",
        "tp=2",
        HEADS,
        (("Copy.apply(x, self.group), Copy.apply(norm, self.group)", "Copy.apply(x, self.group), norm"),),
        ("unreduced-gradient",),
        ("norm", "tp", "SUM"),
        ("AVG",),
    ),
    Healthy("weights narrowed by FSDP's policy", "fsdp=2", NARROW),
)
