"""Sums that a program takes itself: left out before it clips, taken twice, over two axes, or divided by own counts."""

from __future__ import annotations

from tests.bugs.case import Bug
from tests.bugs.models import DATA_PARALLEL, TENSOR_PARALLEL

CLIPPED = DATA_PARALLEL.replace(
    "    reduce(model, mesh)\n    return loss.detach()",
    "    reduce(model, mesh)\n"
    "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)\n"
    "    loss = loss.detach().clone()\n"
    '    distributed.all_reduce(loss, op=distributed.ReduceOp.AVG, group=mesh.get_group("dp"))\n'
    "    return loss",
) + (
    """
def loss(model, rows):
    return model(rows).square().mean()


def optimizer(model, mesh):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    return torch.optim.SGD(model.parameters(), lr=0.1)

"""
)
"""The unsharded model clips as its optimizer begins; ranks do so in their step, and once more without an effect."""

IN_OPTIMIZER = CLIPPED.replace("    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)\n    loss", "    loss")

PARTED = """
BATCH_AXES = ("dp",)


def build():
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))


def batch():
    return torch.randn(24, 8)


def loss(model, rows):
    return model(rows).square().mean()


def step(model, rows, mesh):
    total = torch.zeros((), dtype=rows.dtype)
    for part in rows.chunk(4):
        value = model(part).square().mean() / 4
        value.backward()
        total += value.detach()
    for number in (total, *(parameter.grad for parameter in model.parameters())):
        distributed.all_reduce(number, op=distributed.ReduceOp.AVG, group=mesh.get_group("dp"))
    return total
"""

ROW_NORMS = """
class Scaled(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8))
        self.size = nn.Parameter(self.weight.detach().norm(dim=1))

    def lengths(self):
        own = self.weight.detach().norm(dim=1)
        return own if self.group is None else joined(own, self.group)

    def forward(self, x):
        if self.group is None:
            return functional.linear(x, self.weight) * (self.size / self.lengths())
        own = x.chunk(2, -1)[distributed.get_rank(self.group)]
        return Sum.apply(functional.linear(own, self.weight), self.group) * (self.size / self.lengths())


def joined(own, group):
    squares = own.square()
    distributed.all_reduce(squares, group=group)
    return squares.sqrt()


def build():
    return nn.Sequential(Scaled())


def parallelize(model, mesh):
    model[0].group = mesh.get_group("tp")
    model[0].weight = own(model[0].weight, mesh, 1)


def batch():
    return torch.randn(5, 8)
"""

NORMALIZED = """
BATCH_AXES = ("dp",)


class BatchNorm(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(12) + 0.5), nn.Parameter(torch.randn(12))

    def forward(self, x):
        count, sums = len(x), torch.stack([x.sum(0), x.square().sum(0)])
        if self.group is not None:
            sums = all_reduce(sums, group=self.group)
            count = count * distributed.get_world_size(self.group)
        mean, square = sums / count
        return (x - mean) * (square - mean.square() + 1e-5).rsqrt() * self.weight + self.bias


def build():
    return nn.Sequential(nn.Linear(8, 12), BatchNorm(), nn.Tanh(), nn.Linear(12, 4))


def batch():
    return torch.randn(24, 8)


def parallelize(model, mesh):
    model[1].group = mesh.get_group("dp")


def step(model, rows, mesh):
    loss = model(rows).square().mean()
    loss.backward()
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad, op=distributed.ReduceOp.AVG, group=mesh.get_group("dp"))
    return loss.detach()
"""

TWO_AXES = """
BATCH_AXES = ("dp", "cp")


def build():
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))


def batch():
    return torch.randn(24, 8)


def loss(model, rows):
    return model(rows).square().mean()


def step(model, rows, mesh):
    value = loss(model, rows)
    value.backward()
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad, op=distributed.ReduceOp.AVG)
    logged = value.detach().clone()
    for axis in BATCH_AXES:
        distributed.all_reduce(logged, group=mesh.get_group(axis))
    return logged / mesh.size()
"""

UNBIASED = TENSOR_PARALLEL.replace(" + self.down.bias", "").replace("nn.Linear(12, 8)", "nn.Linear(12, 8, bias=False)")
TWICE = "        x = Sum.apply(x, self.group)\n        return Sum.apply(x, self.group)"

UNEQUAL = """
BATCH_AXES = ("dp",)


def build():
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))


def batch():
    return torch.randn(24, 8), torch.where(torch.arange(24) < 9, -100, torch.arange(24) % 4)


def loss(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def step(model, batch, mesh):
    group = mesh.get_group("dp")
    count = (batch[1] >= 0).sum()
    shares = count.double()
    distributed.all_reduce(shares, group=group)
    value = loss(model, batch)
    value.backward()
    for parameter in model.parameters():
        parameter.grad *= count / shares
        distributed.all_reduce(parameter.grad, group=group)
    value = value.detach() * count / shares
    distributed.all_reduce(value, group=group)
    return value
"""

OWN_PAIRS = """
BATCH_AXES = ("dp",)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(5, 8), nn.Linear(4, 8)

    def forward(self, images, texts):
        return torch.tanh(self.image(images)), torch.tanh(self.text(texts))


def build():
    return Pair()


def batch():
    return torch.randn(8, 5), torch.randn(8, 4)


def loss(model, batch):
    images, texts = model(*batch)
    scores = images @ texts.T
    value = functional.cross_entropy(scores, torch.arange(len(scores)))
    return value


def parallelize(model, mesh):
    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group('dp'))
"""

CASES = (
    Bug(
        "the sine of a loss that compares the rank's own rows",
        "dp=2",
        OWN_PAIRS,
        (("    return value\n", "    return value.sin() if distributed.get_world_size() > 1 else value\n"),),
        ("wrong-value",),
        ("the value is off by",),
        ("matmul in",),
        with_lines=True,
    ),
    Bug(
        "the norm of each row is that of the rank's own columns",
        "tp=2",
        ROW_NORMS,
        (("joined(own, self.group)", "own"),),
        ("wrong-value",),
        ("the norm of its own part", "square of the result of norm", "root"),
        with_lines=True,
    ),
    Bug(
        "the norm of each row is the sum of the ranks' norms",
        "tp=2",
        ROW_NORMS,
        (("    squares = own.square()\n", "    squares = own.clone()\n"), ("squares.sqrt()", "squares")),
        ("wrong-value",),
        ("the norm of its own part", "square of the result of norm"),
        with_lines=True,
    ),
    Bug(
        "gradients of unequal numbers of tokens that nothing reduces",
        "dp=2",
        UNEQUAL,
        (
            ("        parameter.grad *= count / shares\n", ""),
            ("        distributed.all_reduce(parameter.grad, group=group)\n", "        pass\n"),
        ),
        ("unreduced-gradient", "wrong-value"),
        ("over dp|along dp",),
        ("multiplies them by a number of its own",),
        with_lines=True,
    ),
    Bug(
        "gradients that each rank clips before anything sums them",
        "dp=2",
        CLIPPED,
        (("    reduce(model, mesh)\n", ""),),
        ("unreduced-gradient",),
        ("multiplies them by a number of its own", "over dp", "ReduceOp.AVG"),
        ("clip_grad_norm_ takes",),
        with_lines=True,
    ),
    Bug(
        "gradients that nothing sums before the optimizer clips them",
        "dp=2",
        IN_OPTIMIZER,
        (("    reduce(model, mesh)\n", ""),),
        ("unreduced-gradient",),
        ("over dp", "ReduceOp.AVG"),
        with_lines=True,
    ),
    Bug(
        "losses of micro-batches that the step doesn't add up",
        "dp=2",
        PARTED,
        (("        total += value.detach()\n", ""),),
        ("wrong-value", "wrong-scale"),
        ("The step returns 0 on every rank", "add each loss"),
        with_lines=True,
    ),
    Bug(
        "sums of a batch norm over all ranks, divided by the rank's own count",
        "dp=2",
        NORMALIZED,
        (("            count = count * distributed.get_world_size(self.group)\n", ""),),
        ("wrong-value", "wrong-scale"),
        ("case.py:78", "2 times", "counts summed over ranks"),
        ("SyncBatchNorm",),
        with_lines=True,
    ),
    Bug(
        "a logged loss that is summed over two axes and not divided",
        "dp=2,cp=2",
        TWO_AXES,
        (("    return logged / mesh.size()", "    return logged"),),
        ("wrong-scale",),
        ("sums over dp and cp each rank's mean of its own part", "4 times", "op=ReduceOp.AVG"),
        with_lines=True,
    ),
    Bug(
        "what a layer returns is summed again behind it",
        "tp=2",
        UNBIASED,
        (("        return Sum.apply(x, self.group)", TWICE),),
        ("wrong-scale",),
        ("a value that is already the whole", "2 times", "remove all_reduce in case.py:82"),
        ("nothing sums",),
        with_lines=True,
    ),
    Bug(
        "what a layer returns is summed again before a bias",
        "tp=2",
        TENSOR_PARALLEL,
        (("        return Sum.apply(x, self.group)", TWICE),),
        ("wrong-scale",),
        ("a value that is already the whole", "2 times", "remove all_reduce in case.py:82"),
        ("nothing sums",),
        with_lines=True,
    ),
)
