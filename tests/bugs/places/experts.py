"""Three layers of experts behind routers: expert parallel, and FSDP2 for the rest."""

from __future__ import annotations

from tests.bugs.places.fault import NOTHING, Fault, Program, spoiled

TEXT = '''
EXPERTS, FEATURES, LAYERS = 4, 6, 3
BATCH_AXES = ("fsdp", "ep")


class Experts(nn.Module):
    """Experts as one stack, of which a rank has a stretch."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, FEATURES, FEATURES))

    def forward(self, x, numbers):
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return torch.bmm(x[:, None], weight[numbers])[:, 0]


class Mixture(nn.Module):
    """A router, and experts: tokens travel to the rank that has theirs, and back."""

    group = None

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(FEATURES, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x):
        gate, chosen = self.router(x).softmax(-1).max(-1)
        if self.group is None:
            return self.experts(x, chosen) * gate[:, None]
        size = distributed.get_world_size(self.group)
        owner = chosen // (EXPERTS // size)
        order = owner.argsort(stable=True)
        sent = owner.bincount(minlength=size)
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent, group=self.group)
        to, of = sent.tolist(), received.tolist()
        numbers = chosen.new_empty(sum(of))
        distributed.all_to_all_single(numbers, chosen[order], of, to, group=self.group)
        arrived = self.exchanged(x[order], to, of)
        done = self.experts(arrived, self.local(numbers, size))
        back = self.exchanged(done, of, to)
        return self.put_back(self.weighted(back, gate, order), order)

    def exchanged(self, x, to, of):
        return Exchange.apply(x, to, of, self.group)

    def weighted(self, tokens, gate, order):
        return tokens * gate[order, None]

    def put_back(self, tokens, order):
        return tokens[order.argsort()]

    def local(self, numbers, size):
        return numbers % (EXPERTS // size)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.mix = nn.Linear(FEATURES, FEATURES)
        self.moe = Mixture()

    def forward(self, x):
        x = x + torch.tanh(self.mix(x))
        return x + self.moe(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Layer() for number in range(LAYERS)})
        self.head = nn.Linear(FEATURES, 5)

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)


def build():
    return Model()


def parallelize(model, mesh):
    for layer in model.layers.values():
        experts = layer.moe.experts
        experts.weight = nn.Parameter(distribute_tensor(experts.weight.detach(), mesh["ep"], [Shard(0)]))
        layer.moe.group = mesh.get_group("ep")
        fully_shard(experts, mesh=mesh["fsdp"])
    spoil(model.layers["1"].moe, mesh)
    fully_shard(model, mesh=mesh["fsdp", "ep"]._flatten("all"))


def spoil(moe, mesh):
    """Leave everything as it is."""


def batch():
    return torch.randn(48, FEATURES)


def step(model, rows, mesh):
    loss = model(rows).square().mean()
    loss.backward()
    for name, layer in model.layers.items():
        finish(layer.moe.experts, name, mesh)
    return loss.detach()


def finish(experts, name, mesh):
    """Tokens that arrived over ep were summed."""
    experts.weight.grad.to_local().div_(mesh["ep"].size())

'''

EXPERTS = Program("experts, EP + FSDP2", "fsdp=2,ep=2", TEXT)


FAULTS = (
    Fault(
        "tokens put back in another order",
        EXPERTS,
        spoiled("moe.put_back = lambda tokens, order: tokens[order]"),
        ("layers.1.moe",),
        ("order",),
    ),
    Fault(
        "weights of the router in another order than tokens",
        EXPERTS,
        spoiled("moe.weighted = lambda tokens, gate, order: tokens * gate[:, None]"),
        ("layers.1.moe",),
        ("moe",),
    ),
    Fault(
        "tokens sent to another expert of the rank",
        EXPERTS,
        spoiled("moe.local = lambda numbers, size: (numbers + 1) % (EXPERTS // size)"),
        ("layers.1.moe.experts", "layers.1.moe"),
        ("expert",),
    ),
    Fault(
        "an exchange that nothing flows back through",
        EXPERTS,
        (
            ("        arrived = self.exchanged(x[order], to, of)", "        arrived = self.sent(x[order], to, of)"),
            (
                "    def weighted(self",
                "    def sent(self, x, to, of):\n        return self.exchanged(x, to, of)\n\n    def weighted(self",
            ),
            (NOTHING, "    moe.sent = lambda x, to, of: moe.exchanged(x.detach(), to, of)\n"),
        ),
        ("layers.1.moe", "layers.1.moe.experts"),
        ("cut|detach|nothing flows back",),
    ),
    Fault(
        "tokens beyond a rank's capacity dropped",
        EXPERTS,
        spoiled(
            "moe.weighted = lambda tokens, gate, order: "
            "tokens * gate[order, None] * (torch.arange(len(tokens))[:, None] < 8)"
        ),
        ("layers.1.moe",),
        ("moe",),
    ),
    Fault(
        "gradients of one layer's experts not divided",
        EXPERTS,
        (("    experts.weight.grad.to_local().div_", "    name != '1' and experts.weight.grad.to_local().div_"),),
        ("layers.1.moe.experts",),
        ("2 times", "ep|fsdp"),
    ),
)
