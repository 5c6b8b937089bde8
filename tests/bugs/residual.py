"""Residuals around hand-cut layers: sums missing or taken twice, forward and backward, in one block and in three."""

from __future__ import annotations

from tests.bugs.case import Bug
from tests.bugs.models import BLOCK_BY_HAND

BLOCK = (
    BLOCK_BY_HAND
    + """

def build():
    return BLOCKS


def parallelize(model, mesh):
    rank, size = mesh["tp"].get_local_rank(), mesh["tp"].size()
    for block in model.modules():
        if isinstance(block, Block):
            block.group = mesh.get_group("tp")
            block.up.weight = nn.Parameter(block.up.weight.detach().chunk(size)[rank].clone())
            block.up.bias = nn.Parameter(block.up.bias.detach().chunk(size)[rank].clone())
            block.down.weight = nn.Parameter(block.down.weight.detach().chunk(size, 1)[rank].clone())


def batch():
    return torch.randn(6, 8)

"""
)

PLAIN = BLOCK.replace(
    "        h = self.norm(x)\n        if self.group is not None:\n            h = Copy",
    "        h = x\n        if self.group is not None:\n            h = Copy",
).replace("        self.norm = nn.LayerNorm(8)\n", "")

CASES = (
    Bug(
        "no backward sum of a block behind a norm, in three blocks",
        "tp=2",
        BLOCK.replace("BLOCKS", "nn.Sequential(nn.Linear(8, 8), Block(), Block(), Block(), nn.Linear(8, 4))"),
        (("            h = Copy.apply(h, self.group)", "            pass"),),
        ("unreduced-gradient",),
        ("over tp", "backward"),
    ),
    Bug(
        "no backward sum of a block behind a norm, in one block",
        "tp=2",
        BLOCK.replace("BLOCKS", "Block()"),
        (("            h = Copy.apply(h, self.group)", "            pass"),),
        ("unreduced-gradient",),
        ("over tp", "where up begins"),
    ),
    Bug(
        "no forward sum in three blocks with residuals",
        "tp=2",
        BLOCK.replace("BLOCKS", "nn.Sequential(nn.Linear(8, 8), Block(), Block(), Block(), nn.Linear(8, 4))"),
        (("            h = Sum.apply(h, self.group)", "            pass"),),
        ("unreduced-output",),
        ("over tp", "case.py"),
        with_lines=True,
    ),
    Bug(
        "a sum taken twice in three blocks with residuals",
        "tp=2",
        BLOCK.replace("BLOCKS", "nn.Sequential(nn.Linear(8, 8), Block(), Block(), Block(), nn.Linear(8, 4))"),
        (("h = Sum.apply(h, self.group)", "h = Sum.apply(Sum.apply(h, self.group), self.group)"),),
        ("wrong-scale",),
        ("already the whole", "case.py"),
        with_lines=True,
    ),
    Bug(
        "a sum taken twice in one block with a residual",
        "tp=2",
        BLOCK.replace("BLOCKS", "Block()"),
        (("h = Sum.apply(h, self.group)", "h = Sum.apply(Sum.apply(h, self.group), self.group)"),),
        ("wrong-scale",),
        ("already the whole", "case.py"),
        with_lines=True,
    ),
    Bug(
        "no backward sum beside a residual, in two blocks",
        "tp=2",
        PLAIN.replace("BLOCKS", "nn.Sequential(nn.Linear(8, 8), Block(), Block(), nn.Linear(8, 4))"),
        (("            h = Copy.apply(h, self.group)", "            pass"),),
        ("unreduced-gradient",),
        ("over tp", "as a residual does", "case.py"),
        with_lines=True,
    ),
    Bug(
        "no backward sum beside a residual, in one block",
        "tp=2",
        PLAIN.replace("BLOCKS", "nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 4))"),
        (("            h = Copy.apply(h, self.group)", "            pass"),),
        ("unreduced-gradient",),
        ("over tp", "as a residual does", "case.py"),
        with_lines=True,
    ),
    Bug(
        "no forward sum beside a residual, in one block",
        "tp=2",
        PLAIN.replace("BLOCKS", "Block()"),
        (("            h = Sum.apply(h, self.group)", "            pass"),),
        ("unreduced-output",),
        ("over tp", "case.py"),
        with_lines=True,
    ),
)
