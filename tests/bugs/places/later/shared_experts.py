"""Experts, each rank computing its own for all tokens, with a shared one beside them, summed over ep."""

from __future__ import annotations

from tests.bugs.places.fault import LAYERS_AND_HEAD, MEAN_OVER_DP, NOTHING, Fault, Program, spoiled

TEXT = (
    '''
BATCH_AXES = ("dp",)
EXPERTS, FEATURES, LAYERS = 4, 6, 3


class Mixture(nn.Module):
    """The two best experts of every token, weighted by gates that sum to 1, and a shared one."""

    group, first = None, 0

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(FEATURES, EXPERTS, bias=False)
        self.weight = nn.Parameter(torch.randn(EXPERTS, FEATURES, FEATURES) / 2)
        self.shared = nn.Linear(FEATURES, FEATURES)

    def forward(self, x):
        gates = self.gates(x)
        own = self.mixed(self.entered(x), self.weighed(gates)[..., self.first : self.first + len(self.weight)])
        return self.left(own) + self.shared(x)

    def gates(self, x):
        best, which = self.router(x).softmax(-1).topk(2)
        return torch.zeros(*x.shape[:-1], EXPERTS, dtype=x.dtype).scatter(-1, which, best / best.sum(-1, keepdim=True))

    def weighed(self, gates):
        return self.entered(gates)

    def mixed(self, x, gates):
        return torch.einsum("be,bf,efg->bg", gates, x, self.weight)

    def entered(self, x):
        return x if self.group is None else Copy.apply(x, self.group)

    def left(self, x):
        return x if self.group is None else Sum.apply(x, self.group)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix, self.moe = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, FEATURES), Mixture()

    def forward(self, x):
        x = x + torch.tanh(self.mix(x))
        return x + self.moe(self.norm(x))

'''
    + LAYERS_AND_HEAD
    + '''

def batch():
    return torch.randn(24, FEATURES)


def parallelize(model, mesh):
    for layer in model.layers:
        moe = layer.moe
        moe.weight = own(moe.weight, mesh, 0, "ep")
        moe.group, moe.first = mesh.get_group("ep"), mesh.get_local_rank("ep") * EXPERTS // mesh["ep"].size()
    spoil(model.layers[1].moe, mesh)


def spoil(moe, mesh):
    """Leave everything as it is."""

'''
    + MEAN_OVER_DP
)

SHARED = Program("experts beside a shared one, EP + DP", "dp=2,ep=2", TEXT)


FAULTS = (
    Fault(
        "a shared expert that every rank adds to the sum",
        SHARED,
        (
            ("        return self.left(own) + self.shared(x)\n", "        return self.joined(own, self.shared(x))\n"),
            (
                "    def gates(self, x):\n",
                "    def joined(self, own, shared):\n        return self.left(own) + shared\n\n"
                "    def gates(self, x):\n",
            ),
            (NOTHING, "    moe.joined = lambda own, shared: moe.left(own + shared)\n"),
        ),
        ("layers.1.moe",),
        ("ep", "moe"),
        ("not summed",),
    ),
    Fault(
        "gates that do not sum to 1",
        SHARED,
        spoiled("gates = moe.gates; moe.weighed = lambda x: moe.entered(x * (1 + moe.first) / 2)"),
        ("layers.1.moe",),
        ("moe",),
    ),
    Fault(
        "gates whose gradient is each rank's own",
        SHARED,
        spoiled("moe.weighed = lambda gates: gates"),
        ("layers.1.moe", "layers.1.moe.router"),
        ("ep", "sum"),
    ),
)
