"""Dropout: masks that must be alike on copies, and must not be on what is split."""

from __future__ import annotations

from tests.bugs.case import Bug, Healthy
from tests.bugs.models import FSDP

DROPPED = '''
class MLP(nn.Module):
    group, seed = None, 3

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 24, bias=False)
        self.down = nn.Linear(24, 16, bias=False)

    def forward(self, x):
        if self.group is None:
            return functional.dropout(self.down(torch.tanh(self.up(x))), 0.5, self.training)
        x = Copy.apply(x, self.group)
        x = Sum.apply(self.down(torch.tanh(self.up(x))), self.group)
        torch.manual_seed(self.seed)
        return functional.dropout(x, 0.5, self.training)


def build():
    return MLP()


def parallelize(model, mesh):
    """Drop the same numbers of the same activations on all ranks."""
    model.up.weight = own(model.up.weight, mesh)
    model.down.weight = own(model.down.weight, mesh, 1)
    model.group = mesh.get_group("tp")
    model.seed = 3


def batch():
    return torch.randn(24, 16)

'''

INNER = (
    DROPPED.replace(
        """        x = Sum.apply(self.down(torch.tanh(self.up(x))), self.group)
        torch.manual_seed(self.seed)
        return functional.dropout(x, 0.5, self.training)
""",
        """        torch.manual_seed(self.seed)
        return Sum.apply(self.down(functional.dropout(torch.tanh(self.up(x)), 0.5, self.training)), self.group)
""",
    )
    .replace(
        "functional.dropout(self.down(torch.tanh(self.up(x))), 0.5, self.training)",
        "self.down(functional.dropout(torch.tanh(self.up(x)), 0.5, self.training))",
    )
    .replace("model.seed = 3", 'model.seed = 3 + mesh.get_local_rank("tp")')
    .replace(
        "Drop the same numbers of the same activations on all ranks.",
        "Drop others on each rank, which has other activations.",
    )
)

TERMS = DROPPED.replace(
    """        x = Sum.apply(self.down(torch.tanh(self.up(x))), self.group)
        torch.manual_seed(self.seed)
        return functional.dropout(x, 0.5, self.training)
""",
    """        x = self.down(torch.tanh(self.up(x)))
        torch.manual_seed(self.seed)
        return Sum.apply(functional.dropout(x, 0.5, self.training), self.group)
""",
).replace("Drop the same numbers of the same activations on all ranks.", "Drop the same numbers of all terms of a sum.")

ROWS = '''
from torch.nn.parallel import DistributedDataParallel
BATCH_AXES = ("dp",)


class MLP(nn.Module):
    seed = 3

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x):
        if self.training:
            torch.manual_seed(self.seed)
        return self.down(functional.dropout(torch.tanh(self.up(x)), 0.25, self.training))


def build():
    return MLP()


def parallelize(model, mesh):
    """Seed every rank by its coordinate."""
    model.seed = 3 + mesh.get_local_rank("dp")
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def batch():
    return torch.randn(24, 8)

'''

RECOMPUTED = FSDP.replace(
    "self.down(torch.tanh(self.up(x)))",
    """torch.utils.checkpoint.checkpoint(
            lambda y: self.down(functional.dropout(torch.tanh(self.up(y)), 0.2, self.training)), x, use_reentrant=False
        )""",
).replace("class MLP", "import torch.utils.checkpoint\n\n\nclass MLP")

CASES = (
    Bug(
        "one dropout mask for the rows of all ranks",
        "dp=2",
        ROWS,
        (('3 + mesh.get_local_rank("dp")', "3"),),
        ("identical-shards",),
        ("dp", "mask", "seed"),
    ),
    Healthy("dropout that backward draws again", "fsdp=2", RECOMPUTED),
    Healthy("one dropout mask on all terms of a sum", "tp=2", TERMS),
    Bug(
        "different dropout masks on copies",
        "tp=2",
        DROPPED,
        (("    model.seed = 3", '    model.seed = 3 + mesh.get_local_rank("tp")'),),
        ("unreplicated", "unreduced-output", "wrong-value"),
        ("tp", "dropout|random|seed|mask"),
    ),
    Bug(
        "equal dropout masks on different activations",
        "tp=2",
        INNER,
        (('3 + mesh.get_local_rank("tp")', "3"),),
        ("identical-shards", "wrong-value"),
        ("tp", "dropout|random|seed|mask"),
    ),
    Healthy(
        "dropout under FSDP",
        "fsdp=2",
        FSDP.replace("torch.tanh(self.up(x))", "functional.dropout(torch.tanh(self.up(x)), 0.5, self.training)"),
    ),
)
