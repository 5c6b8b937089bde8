"""Weights that were reordered before they were split: heads, segments, the vocabulary."""

from __future__ import annotations

from tests.bugs.case import Bug, Healthy
from tests.bugs.models import FSDP

FUSED = '''
HEADS, SIZE = 4, 2


def build():
    return nn.Linear(6, 3 * HEADS * SIZE, bias=False)


def load(weight):
    """Return the weight as the model reads it."""
    return weight


def parallelize(model, mesh):
    with torch.no_grad():
        model.weight.copy_(load(model.weight.detach().clone()))
    fully_shard(model, mesh=mesh["fsdp"])

'''

REORDERED = (
    FSDP.replace(
        '    fully_shard(model, mesh=mesh["fsdp"])\n',
        """    index = torch.arange(12).view(2, 3, 2).transpose(1, 2).flatten()
    with torch.no_grad():
        model.up.weight.copy_(model.up.weight[index].clone())
        model.up.bias.copy_(model.up.bias[index].clone())
        model.down.weight.copy_(model.down.weight[:, index].clone())
    fully_shard(model, mesh=mesh["fsdp"])
""",
    )
    + """
expect = {
    "up.weight": "[*/fsdp, *] order 0: view(2, 3, 2).transpose(1, 2)",
    "up.bias": "[*/fsdp] order 0: view(2, 3, 2).transpose(1, 2)",
    "down.weight": "[*/fsdp, *] order 1: view(2, 3, 2).transpose(1, 2)",
}


def optimizer(model, mesh):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

"""
)

SAME = "return weight\n"

SQUARE = (
    FSDP.replace("nn.Linear(8, 12)", "nn.Linear(8, 8)").replace("nn.Linear(12, 8)", "nn.Linear(8, 8)")
    + """
def parallelize(model, mesh):
    load(model.up.weight)
    fully_shard(model, mesh=mesh["fsdp"])


@torch.no_grad()
def load(weight):
    weight.copy_(weight.clone())

"""
)

VOCABULARY = """
def build():
    return nn.Embedding(20, 6)


@torch.no_grad()
def load(weight):
    weight.copy_(weight.clone())


def parallelize(model, mesh):
    load(model.weight)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tp"], (Shard(0),)))

"""

ORDER = ("misordered",)

PUT_TOGETHER = """
class Attention(nn.Module):
    group, heads = None, 4

    def __init__(self):
        super().__init__()
        self.fused = None
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x):
        if self.fused is None:
            q, k, v = self.q(x), self.k(x), self.v(x)
        else:
            q, k, v = self.fused(Copy.apply(x, self.group)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, 4)).transpose(1, 2) for part in (q, k, v))
        y = self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return y if self.group is None else Sum.apply(y, self.group)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.attention, self.head = nn.Linear(5, 16), Attention(), nn.Linear(16, 3)

    def forward(self, x):
        h = self.into(x)
        return self.head(h + self.attention(h))


def build():
    return Net()


def parallelize(model, mesh):
    attention, rank, size = model.attention, mesh["tp"].get_local_rank(), mesh["tp"].size()
    attention.group, attention.heads = mesh.get_group("tp"), 4 // size
    weights = [linear.weight.detach() for linear in (attention.q, attention.k, attention.v)]
    own = torch.cat([weight.chunk(size)[rank] for weight in weights])
    attention.fused = nn.Linear(16, len(own), bias=False, dtype=own.dtype)
    attention.fused.weight = nn.Parameter(own)
    del attention.q, attention.k, attention.v
    attention.out.weight = nn.Parameter(attention.out.weight.detach().chunk(size, 1)[rank].clone())


def batch():
    return torch.randn(4, 6, 5)
"""
"""Each rank's rows of three weights in one weight, of a name that the unsharded model doesn't have."""

CASES = (
    Bug(
        "a square weight transposed on load",
        "fsdp=4",
        SQUARE,
        (("weight.clone()", "weight.t().clone()"),),
        ORDER,
        ("transpose",),
    ),
    Bug(
        "q, k and v interleaved head by head",
        "fsdp=2",
        FUSED,
        ((SAME, "return weight.view(3, HEADS, SIZE, 6).transpose(0, 1).reshape(-1, 6)\n"),),
        ORDER,
        ("interleaved|segments",),
        ("no simple rule",),
    ),
    Bug(
        "k, q and v for q, k and v",
        "fsdp=4",
        FUSED,
        ((SAME, "q, k, v = weight.chunk(3)\n    return torch.cat((k, q, v))\n"),),
        ORDER,
        ("segments",),
    ),
    Bug(
        "q, k and v for v, k and q",
        "fsdp=2",
        FUSED,
        ((SAME, "return torch.cat(weight.chunk(3)[::-1])\n"),),
        ORDER,
        ("segments",),
    ),
    Bug(
        "up and gate exchanged",
        "fsdp=4",
        FUSED,
        ((SAME, "return torch.cat(weight.chunk(2)[::-1])\n"),),
        ORDER,
        ("segments|rolled",),
    ),
    Bug(
        "rotary halves of each head interleaved",
        "fsdp=4",
        FUSED.replace("HEADS, SIZE = 4, 2", "HEADS, SIZE = 1, 8"),
        ((SAME, "return weight.view(3, 2, SIZE // 2, 6).transpose(1, 2).reshape(-1, 6)\n"),),
        ORDER,
        ("rotary",),
    ),
    Bug(
        "rows of each head in an order of their own",
        "fsdp=4",
        FUSED.replace("HEADS, SIZE = 4, 2", "HEADS, SIZE = 2, 4"),
        ((SAME, "return weight.view(-1, SIZE, 6)[:, [2, 0, 3, 1]].reshape(-1, 6)\n"),),
        ORDER,
        ("each 4|every 4|blocks of 4|groups of 4|within each|[2, 0, 3, 1]",),
        ("no simple rule",),
    ),
    Bug(
        "query heads grouped by another number of key heads",
        "fsdp=2",
        FUSED.replace("HEADS, SIZE = 4, 2", "HEADS, SIZE = 6, 2").replace("3 * HEADS", "HEADS"),
        ((SAME, "return weight.view(2, 3, SIZE, 6).transpose(0, 1).reshape(-1, 6)\n"),),
        ORDER,
        ("interleaved|head",),
        ("no simple rule",),
    ),
    Bug(
        "the vocabulary moved up by one for a new first token",
        "tp=4",
        VOCABULARY,
        (("weight.copy_(weight.clone())", "weight[1:] = weight[:-1].clone()\n    weight[0] = 0"),),
        ("misordered", "foreign", "missing"),
        ("padding|moved up|shifted|offset",),
    ),
    Bug(
        "the vocabulary rolled by two",
        "tp=4",
        VOCABULARY,
        (("weight.copy_(weight.clone())", "weight.copy_(weight.roll(2, 0))"),),
        ORDER,
        ("rolled",),
    ),
    Bug(
        "one weight not in the order that is expected of all",
        "fsdp=2",
        REORDERED,
        (("        model.up.bias.copy_(model.up.bias[index].clone())\n", ""),),
        (*ORDER, "misordered-within-shard"),
        ("up.bias", "order that is expected", "Dim 0 is still in"),
        ("down.weight", "up.weight", "rotary"),
    ),
    Healthy("a weight kept whole beside one that is split", "tp=4", VOCABULARY + "expect = {'weight': '[20/tp, 6]'}\n"),
    Bug(
        "q, k and v in one weight that is cut as a whole",
        "tp=2",
        PUT_TOGETHER,
        (
            (
                "torch.cat([weight.chunk(size)[rank] for weight in weights])",
                "torch.cat(weights).chunk(size)[rank].clone()",
            ),
        ),
        ("wrong-value",),
        ("cut as a whole", "one by one"),
        ("seed", "renames"),
        with_lines=True,
    ),
    Healthy("q, k and v that are put into one weight while they are sharded", "tp=4", PUT_TOGETHER),
)
