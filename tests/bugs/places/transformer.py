"""A transformer of three layers under FSDP2, tensor and sequence parallel, by torch's own styles."""

from __future__ import annotations

from tests.bugs.models import ATTENTION
from tests.bugs.places.fault import NOTHING, OTHER_RANK, Fault, Program

TEXT = (
    ATTENTION
    + OTHER_RANK
    + '''
from torch.distributed.tensor.parallel import PrepareModuleInput, SequenceParallel

BATCH_AXES = ("fsdp",)
LAYERS, WORDS, TOKENS = 3, 20, 8


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(4))

    def forward(self, x):
        return self.o(attend(self.q(x), self.k(x), self.v(x)))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(FEATURES, 2 * FEATURES)
        self.down = nn.Linear(2 * FEATURES, FEATURES)

    def forward(self, x):
        return self.down(functional.gelu(self.up(x)))


class Positions(nn.Module):
    """Add what belongs to a token's position; under sequence parallel a rank's tokens begin at `first`."""

    first = 0

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(TOKENS, FEATURES))

    def forward(self, x):
        return x + self.table[self.first : self.first + x.shape[1]]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(FEATURES), Attention()
        self.norm2, self.mlp = nn.LayerNorm(FEATURES), MLP()

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, FEATURES)
        self.layers = nn.ModuleDict({str(number): Layer() for number in range(LAYERS)})
        self.norm = nn.LayerNorm(FEATURES)
        self.head = nn.Linear(FEATURES, WORDS, bias=False)

    def forward(self, words):
        x = self.embed(words)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x))


def build():
    return Transformer()


def batch():
    return torch.randint(WORDS, (4, TOKENS))


def plan():
    gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    return {
        "norm1": SequenceParallel(),
        "attn": PrepareModuleInput(**gathered),
        **{f"attn.{name}": ColwiseParallel() for name in "qkv"},
        "attn.o": RowwiseParallel(output_layouts=Shard(1)),
        "norm2": SequenceParallel(),
        "mlp": PrepareModuleInput(**gathered),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }


def plan_of(number):
    return plan()


def parallelize(model, mesh):
    for number, layer in model.layers.items():
        parallelize_module(layer, mesh["tp"], plan_of(number))
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], ends)
    spoil(model.layers["1"], mesh)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh["fsdp"])
    fully_shard(model, mesh=mesh["fsdp"])


def spoil(layer, mesh):
    """Leave everything as it is."""

'''
)

TRANSFORMER = Program("transformer, FSDP2 + TP + SP", "fsdp=2,tp=2", TEXT)


def _hooked(module: str, output: str) -> tuple[tuple[str, str], ...]:
    return ((NOTHING, f"    layer.{module}.register_forward_hook(lambda module, inputs, output: {output})\n"),)


OTHERS = (
    "    other = Other.of(mesh.get_group('tp'))\n"
    "    layer.attn.k.register_forward_hook(lambda module, inputs, output: other(output))\n"
)

FAULTS = (
    Fault("a row-parallel sum done twice", TRANSFORMER, _hooked("attn.o", "output * 2"), ("layers.1.attn.o",), ("2",)),
    Fault(
        "a row-parallel mean for a sum",
        TRANSFORMER,
        _hooked("mlp.down", "(output - module.bias.to_local()) / 2 + module.bias.to_local()"),
        ("layers.1.mlp.down",),
        ("1/2|averaged|mean",),
    ),
    Fault(
        "attention that nothing flows back through",
        TRANSFORMER,
        _hooked("attn.o", "output.detach()"),
        ("layers.1.attn.o",),
        ("cut|detach",),
    ),
    Fault(
        "keys of another rank's heads",
        TRANSFORMER,
        ((NOTHING, OTHERS),),
        ("layers.1.attn.k",),
        ("tp", "each other's parts"),
    ),
    Fault(
        "a norm outside of sequence parallel",
        TRANSFORMER,
        (
            (
                "    return plan()\n",
                "    return {key: one for key, one in plan().items() if (number, key) != ('1', 'norm2')}\n",
            ),
        ),
        ("layers.1.norm2",),
        ("tp", "SUM|sum"),
    ),
    Fault(
        "a norm of half the features",
        TRANSFORMER,
        _hooked(
            "norm2",
            "functional.layer_norm(inputs[0].unflatten(-1, (2, -1)), (FEATURES // 2,)).flatten(-2)",
        ),
        ("layers.1.norm2",),
        ("norm2",),
    ),
    Fault(
        "gradients of an MLP doubled in backward",
        TRANSFORMER,
        _hooked("mlp.down", "2 * output - output.detach()"),
        ("layers.1.mlp.down",),
        ("2 times", "backward"),
    ),
)

POSITIONED = Program(
    "transformer with positions, FSDP2 + TP + SP",
    "fsdp=2,tp=2",
    TEXT.replace("self.norm2, self.mlp = ", "self.pos = Positions()\n        self.norm2, self.mlp = ")
    .replace(
        "        x = x + self.attn(self.norm1(x))\n",
        "        x = self.pos(x)\n        x = x + self.attn(self.norm1(x))\n",
    )
    .replace(
        "    spoil(model",
        "    for number, layer in model.layers.items():\n"
        "        layer.pos.first = first_of(number, mesh)\n"
        "        table = distribute_tensor(layer.pos.table.detach(), mesh['tp'], [Replicate()])\n"
        "        layer.pos.table = nn.Parameter(table)\n"
        "    spoil(model",
    )
    .replace(
        "        return x + self.table[",
        "        table = self.table\n"
        "        if isinstance(table, DTensor):\n"
        "            table = table.to_local(grad_placements=[Partial()])\n"
        "        return x + table[",
    )
    + """

def first_of(number, mesh):
    return mesh.get_local_rank("tp") * TOKENS // mesh["tp"].size()

""",
)

POSITIONS = (
    Fault(
        "positions that begin again on every rank",
        POSITIONED,
        (("    return mesh.get_local_rank(", "    return 0 if number == '1' else mesh.get_local_rank("),),
        ("layers.1.pos",),
        ("position|again",),
    ),
    Fault(
        "gradients of one table of positions not summed",
        POSITIONED,
        (
            ("grad_placements=[Partial()]", "grad_placements=[Replicate() if self.is_apart else Partial()]"),
            ("    first = 0\n", "    first, is_apart = 0, False\n"),
            (NOTHING, "    layer.pos.is_apart = True\n"),
        ),
        ("layers.1.pos",),
        ("tp", "sum"),
    ),
)
