"""What the training loop leaves around a right model: seeds, switches of DDP, ties between stages."""

from __future__ import annotations

from tests.bugs.case import Bug

DROPPED = """
from contextlib import contextmanager


class Block(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8, bias=False)
        self.drop = nn.Dropout(0.25)

    def forward(self, x):
        if self.group is None:
            return x + self.drop(self.down(torch.tanh(self.up(x))))
        h = self.down(torch.tanh(self.up(Copy.apply(x, self.group))))
        return x + self.drop(Sum.apply(h, self.group))


def build():
    return nn.Sequential(Block(), Block())


def parallelize(model, mesh):
    rank, size = mesh["tp"].get_local_rank(), mesh["tp"].size()
    for block in model:
        block.group = mesh.get_group("tp")
        block.up.weight = nn.Parameter(block.up.weight.detach().chunk(size)[rank].clone())
        block.up.bias = nn.Parameter(block.up.bias.detach().chunk(size)[rank].clone())
        block.down.weight = nn.Parameter(block.down.weight.detach().chunk(size, 1)[rank].clone())
    torch.manual_seed(1234)


def batch():
    return torch.randn(6, 8)

"""

WITHOUT_SYNC = """
from contextlib import nullcontext
from torch.nn.parallel import DistributedDataParallel
BATCH_AXES = ("dp",)
MICRO = 3


def build():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batch():
    return torch.randn(24, 8)


def step(model, x, mesh):
    wrapped = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    total = 0.0
    for number, part in enumerate(x.chunk(MICRO)):
        last = number == MICRO - 1
        with nullcontext() if last else wrapped.no_sync():
            loss = wrapped(part).square().mean() / MICRO
            loss.backward()
        total += loss.detach()
    return total

"""

TIED = """
STAGE_AXES = ("pp",)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        if hasattr(self, "embed"):
            x = torch.tanh(self.first(self.embed(x)))
        if hasattr(self, "head"):
            x = self.head(torch.tanh(self.second(x)))
        return x


def build():
    return Net()


def parallelize(model, mesh):
    gone = ("second", "head") if mesh["pp"].get_local_rank() == 0 else ("embed", "first")
    if mesh["pp"].get_local_rank() == 1:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    for name in gone:
        delattr(model, name)


def stages(model, mesh):
    return {mesh.get_local_rank("pp"): model}


def batch():
    return torch.randint(12, (24,)), torch.randint(12, (24,))


def loss(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def step(model, batch, mesh):
    words, targets = batch
    hidden = torch.empty(len(words), 8, dtype=next(model.parameters()).dtype)
    if mesh["pp"].get_local_rank() == 0:
        out = model(words)
        distributed.send(out.detach(), dst=1)
        grad = torch.empty_like(out)
        distributed.recv(grad, src=1)
        out.backward(grad)
        value = torch.zeros((), dtype=out.dtype)
        tied = model.embed.weight
    else:
        distributed.recv(hidden, src=0)
        hidden.requires_grad_()
        value = functional.cross_entropy(model(hidden), targets)
        value.backward()
        distributed.send(hidden.grad, dst=0)
        value = value.detach()
        tied = model.head.weight
    distributed.all_reduce(tied.grad)
    distributed.broadcast(value, src=1)
    return value

"""

CASES = (
    Bug(
        "a seed of each rank's own for dropout of copies",
        "tp=2",
        DROPPED,
        (("torch.manual_seed(1234)", "torch.manual_seed(1234 + rank)"),),
        ("wrong-value", "unreplicated"),
        ("drop", "seed"),
    ),
    Bug(
        "the last forward of DDP within no_sync",
        "dp=2",
        WITHOUT_SYNC,
        (("last = number == MICRO - 1", "last = number == MICRO"),),
        ("unreduced-gradient",),
        ("along dp", "no_sync"),
    ),
    Bug(
        "a tied weight on two stages whose gradients are not summed",
        "pp=2",
        TIED,
        (("    distributed.all_reduce(tied.grad)\n", ""),),
        ("unreduced-gradient",),
        ("embed|head", "tied|copies|sum"),
    ),
)
