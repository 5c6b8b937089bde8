"""Terms of a loss that modules keep beside what they return, and layers that are written by hand as a product."""

from __future__ import annotations

from tests.bugs.case import Bug, Healthy

BALANCED = """
AXES = BATCH_AXES = ("fsdp",)


def mean_over_ranks(x):
    if distributed.get_world_size() > 1:
        distributed.all_reduce(x)
        x /= distributed.get_world_size()
    return x


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.SiLU(), nn.Linear(12, 8)) for _ in range(4))

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        weight, chosen = probs.topk(2, dim=-1)
        picked = functional.one_hot(chosen, 4).to(x.dtype)
        load = mean_over_ranks(picked.sum(1).mean(0) / 2)
        self.term = (load * probs.mean(0)).sum()
        gates = (picked * weight[..., None]).sum(1)
        return sum(gates[:, at, None] * expert(x) for at, expert in enumerate(self.experts))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Experts() for _ in range(2)), nn.Linear(8, 5)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def build():
    return Model()


def parallelize(model, mesh):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def batch():
    return torch.randn(16, 8), torch.randint(5, (16,))


def loss(model, batch):
    x, labels = batch
    return functional.cross_entropy(model(x), labels) + 0.1 * sum(layer.term for layer in model.layers)
"""

SQUARED = BALANCED.replace(
    "        self.term = (load * probs.mean(0)).sum()\n", "        self.term = (load * probs.square().mean(0)).sum()\n"
)
WITH_LOGS = BALANCED.replace(
    "        gates = (", "        self.entropy = (probs * probs.log()).sum()\n        gates = ("
)

BY_HAND = """
class Block(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        if self.group is None:
            return x + self.down(torch.tanh(self.up(x)))
        h = torch.tanh(self.up(Copy.apply(x, self.group)))
        return x + Sum.apply(h @ self.down.weight.T, self.group) + self.down.bias


def build():
    return nn.Sequential(Block(), Block())


def parallelize(model, mesh):
    for block in model:
        block.group = mesh.get_group("tp")
        block.up.weight, block.up.bias = own(block.up.weight, mesh), own(block.up.bias, mesh)
        block.down.weight = own(block.down.weight, mesh, 1)


def batch():
    return torch.randn(5, 6)
"""
TURNED = BY_HAND.replace("h @ self.down.weight.T", "torch.matmul(h, self.down.weight.t())")
HOOKED = BALANCED.replace(
    "        fully_shard(layer, mesh=mesh)\n",
    "        layer.register_full_backward_hook(changed)\n        fully_shard(layer, mesh=mesh)\n",
).replace(
    "def build():",
    "def changed(module, given, _):\n    return tuple(grad if grad is None else grad * 1 for grad in given)\n\n\n"
    "def build():",
)
PRODUCT = "Sum.apply(h @ self.down.weight.T, self.group)"

CASES = (
    *(
        Bug(
            name,
            "fsdp=2",
            program,
            (("        distributed.all_reduce(x)\n", ""),),
            ("unreduced-output", "wrong-value"),
            ("mean_over_ranks", "Nothing sums", "over fsdp"),
            ("unequal numbers of tokens", "shifts or pads"),
            with_lines=True,
        )
        for name, program in (
            ("the load of experts in a term of the loss is not summed", BALANCED),
            ("the load is not summed, and the term has squares", SQUARED),
            ("the load is not summed, beside a number that no loss has", WITH_LOGS),
        )
    ),
    Bug(
        "the load is summed and not divided",
        "fsdp=2",
        BALANCED,
        (("        x /= distributed.get_world_size()\n", ""),),
        ("wrong-scale",),
        ("Term 2 of the loss's 3 terms", "2 times"),
        ("unequal numbers of tokens", "shifts or pads"),
        with_lines=True,
    ),
    Bug(
        "a hook changes what modules send back, which keep a right term of the loss",
        "fsdp=2",
        HOOKED,
        (("grad * 1 ", "grad.sin() "),),
        ("wrong-value",),
        ("layers.1 is the first wrong module", "gets the right gradient"),
        ("self.term", "averages", "all_reduce the result"),
        with_lines=True,
    ),
    Bug(
        "a product by hand that nothing sums",
        "tp=2",
        BY_HAND,
        ((PRODUCT, "h @ self.down.weight.T"),),
        ("unreduced-output",),
        ("matmul", "one term of a sum over tp", "all_reduce the result of matmul"),
        with_lines=True,
    ),
    Bug(
        "a product by hand that is averaged before the bias is added",
        "tp=2",
        BY_HAND,
        ((PRODUCT, f"{PRODUCT} / 2"),),
        ("wrong-value", "wrong-scale"),
        ("divides by the number of ranks along tp", "leave the number of ranks out"),
        ("gather or reduce",),
        with_lines=True,
    ),
    Bug(
        "a product by hand whose sum has the bias of every rank",
        "tp=2",
        TURNED,
        (
            (
                "Sum.apply(torch.matmul(h, self.down.weight.t()), self.group) + self.down.bias",
                "Sum.apply(torch.matmul(h, self.down.weight.t()) + self.down.bias, self.group)",
            ),
        ),
        ("wrong-scale",),
        ("Every rank along tp adds all of 0.down.bias", "after the sum over tp"),
        with_lines=True,
    ),
    Healthy("a term of the loss that is squared, with the load of all ranks", "fsdp=2", SQUARED),
    Healthy("a number that a module keeps and no loss has", "fsdp=2", WITH_LOGS),
    Healthy("a layer as a product by hand, and a transposed weight", "tp=2", TURNED),
)
