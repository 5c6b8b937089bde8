"""A transformer of three layers under tensor parallel by hand, plain tensors throughout, beside data parallel."""

from __future__ import annotations

from tests.bugs.models import ATTENTION
from tests.bugs.places.fault import MEAN_OVER_DP, OTHER_RANK, Fault, Program, spoiled

TEXT = (
    OTHER_RANK
    + ATTENTION
    + '''
BATCH_AXES = ("dp",)
LAYERS, TOKENS = 3, 5


def is_spoiled(module):
    return module.number == 1


class Attention(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number, self.group = number, None
        self.q, self.k, self.v, self.o = (nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(4))
        self.norm = RMS()

    def forward(self, x):
        x = self.entered(x)
        q, k, v = self.norm(self.q(x)), self.k(x), self.v(x)
        return self.left(self.o(attend(q, k, v)))

    def entered(self, x):
        return x if self.group is None else Copy.apply(x, self.group)

    def left(self, x):
        return x if self.group is None else Sum.apply(x, self.group)


class RMS(nn.Module):
    """Divide by the root of the mean square of all features, also where a rank has some of them."""

    group = None

    def forward(self, x):
        square = x.square().sum(-1, keepdim=True)
        if self.group is not None:
            square = all_reduce(square, group=self.group)
        return x * (square / FEATURES + 1e-6).rsqrt()


class MLP(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number, self.group = number, None
        self.up = nn.Linear(FEATURES, 2 * FEATURES)
        self.down = nn.Linear(2 * FEATURES, FEATURES)

    def forward(self, x):
        x = self.entered(x)
        x = functional.linear(functional.gelu(self.up(x)), self.down.weight)
        return self.left(x) + self.down.bias

    def entered(self, x):
        return x if self.group is None else Copy.apply(x, self.group)

    def left(self, x):
        return x if self.group is None else Sum.apply(x, self.group)


class Layer(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(FEATURES), Attention(number)
        self.norm2, self.mlp = nn.LayerNorm(FEATURES), MLP(number)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, FEATURES)
        self.layers = nn.ModuleDict({str(number): Layer(number) for number in range(LAYERS)})
        self.head = nn.Linear(FEATURES, 6, bias=False)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)


def build():
    return Transformer()


def batch():
    return torch.randn(4, TOKENS, 8)


def parallelize(model, mesh):
    group = mesh.get_group("tp")
    for layer in model.layers.values():
        for name in "qkv":
            linear = getattr(layer.attn, name)
            linear.weight = own(linear.weight, mesh)
        layer.attn.o.weight = own(layer.attn.o.weight, mesh, 1)
        layer.mlp.up.weight, layer.mlp.up.bias = own(layer.mlp.up.weight, mesh), own(layer.mlp.up.bias, mesh)
        layer.mlp.down.weight = own(layer.mlp.down.weight, mesh, 1)
        layer.attn.group = layer.mlp.group = layer.attn.norm.group = group
    spoil(model.layers["1"], mesh)


def spoil(layer, mesh):
    """Leave everything as it is."""

'''
    + MEAN_OVER_DP
)

BY_HAND_TP = Program("transformer, TP by hand + DP", "dp=2,tp=2", TEXT)


FAULTS = (
    Fault(
        "a row-parallel sum left out",
        BY_HAND_TP,
        spoiled("layer.attn.left = lambda x: x"),
        ("layers.1.attn", "layers.1.attn.o"),
        ("tp", "not summed|all_reduce"),
    ),
    Fault(
        "a row-parallel sum taken twice",
        BY_HAND_TP,
        spoiled("left = layer.mlp.left; layer.mlp.left = lambda x: left(left(x))"),
        ("layers.1.mlp",),
        ("2 times|twice|once more", "tp"),
    ),
    Fault(
        "a row-parallel bias on every rank",
        BY_HAND_TP,
        spoiled(
            "left = layer.mlp.left; layer.mlp.left = lambda x: left(x + layer.mlp.down.bias) - layer.mlp.down.bias"
        ),
        ("layers.1.mlp",),
        ("down.bias", "2 times|every rank"),
    ),
    Fault(
        "no sum in backward before column-parallel layers",
        BY_HAND_TP,
        spoiled("layer.attn.entered = lambda x: x"),
        ("layers.1.attn",),
        ("tp", "sum"),
    ),
    Fault(
        "a sum that is taken again in backward",
        BY_HAND_TP,
        spoiled("layer.mlp.left = lambda x: all_reduce(x, group=layer.mlp.group)"),
        ("layers.1.mlp",),
        ("2 times", "tp", "backward"),
    ),
    Fault(
        "a sum that nothing flows back through",
        BY_HAND_TP,
        spoiled("left = layer.attn.left; layer.attn.left = lambda x: left(x.detach())"),
        ("layers.1.attn",),
        ("cut|detach|nothing flows back",),
    ),
    Fault(
        "a norm over a rank's own features",
        BY_HAND_TP,
        spoiled("layer.attn.norm.forward = lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()"),
        ("layers.1.attn.norm",),
        ("own",),
    ),
    Fault(
        "values of another rank's heads",
        BY_HAND_TP,
        spoiled(
            "layer.attn.v.register_forward_hook(lambda module, inputs, output: Other.apply(output, layer.attn.group))"
        ),
        ("layers.1.attn.v",),
        ("tp", "head|each other's parts"),
    ),
    Fault(
        "sharing by the size of the world in place of tp",
        BY_HAND_TP,
        spoiled("left = layer.mlp.left; layer.mlp.left = lambda x: left(x) / 4"),
        ("layers.1.mlp",),
        ("1/4|divided|averaged",),
    ),
    Fault(
        "a reduction over the wrong group",
        BY_HAND_TP,
        spoiled("layer.attn.left = lambda x: Sum.apply(x, mesh.get_group('dp'))"),
        ("layers.1.attn", "layers.1.attn.o"),
        ("dp|tp",),
    ),
    Fault(
        "gradients of one layer not reduced over data parallel",
        BY_HAND_TP,
        (
            (
                "for parameter in [one for one in model.parameters() if one.grad is not None]:",
                "for parameter in [one for name, one in model.named_parameters() if 'layers.1.mlp.up' not in name]:",
            ),
        ),
        ("layers.1.mlp.up",),
        ("dp",),
    ),
)
