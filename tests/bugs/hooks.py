"""Programs that use hooks in ways of their own."""

from __future__ import annotations

from tests.bugs.case import Bug, Healthy
from tests.bugs.models import FSDP, MLP, TENSOR_PARALLEL

SHARED = """
from torch.utils.checkpoint import checkpoint

AXES = BATCH_AXES = ("dp",)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return x + self.down(functional.silu(self.up(self.norm(x))))


class Net(nn.Module):
    reentrant = None

    def __init__(self):
        super().__init__()
        self.into, self.block, self.head = nn.Linear(6, 8), Block(), nn.Linear(8, 3)

    def forward(self, x):
        x = self.into(x)
        for _ in range(3):
            x = self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.head(x)


def build():
    return Net()


def summed(grad):
    grad = grad.clone()
    distributed.all_reduce(grad)
    return grad


def parallelize(model, mesh):
    model.reentrant = False
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(lambda weight: distributed.all_reduce(weight.grad))


def batch():
    return torch.randn(8, 6)


def step(model, rows, mesh):
    loss = model(rows).square().mean()
    (loss / mesh.size()).backward()
    return loss.detach()
"""
"""A block that is used three times, under activation checkpointing, with hooks that sum gradients."""

CASES = (
    Healthy(
        "a batch that is a dict, of rows that do not divide",
        "fsdp=2",
        FSDP.replace("torch.randn(24, 8)", '{"x": torch.randn(25, 8)}'),
    ),
    Healthy(
        "a model that puts out a dict",
        "fsdp=2",
        FSDP
        + """
class Answering(MLP):
    def forward(self, x):
        return {"logits": super().forward(x), "hidden": None}


def build():
    return Answering()


def loss(model, rows):
    return model(rows)["logits"].abs().mean()
""",
    ),
    Healthy(
        "gradients clipped by the norm of all shards within the step",
        "fsdp=2",
        FSDP
        + """
def step(model, rows, mesh):
    loss = model(rows).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return loss.detach()
""",
    ),
    Healthy(
        "an all-reduce over replicas with the last micro-batch only",
        "replicate=2,fsdp=2",
        FSDP.replace('mesh["fsdp"]', "mesh").replace('("fsdp",)', '("replicate", "fsdp")')
        + """
def step(model, rows, mesh):
    total = torch.zeros((), dtype=rows.dtype)
    for number, part in enumerate(rows.chunk(2)):
        model.set_requires_all_reduce(number == 1)
        loss = model(part).square().mean() / 2
        loss.backward()
        total += loss.detach()
    return total
""",
    ),
    Healthy(
        "a tied embedding and head that FSDP keeps tied",
        "fsdp=2",
        """
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words):
        return self.head(torch.tanh(self.embed(words)))


BATCH_AXES = ("fsdp",)


def build():
    return Tied()


def parallelize(model, mesh):
    fully_shard(model, mesh=mesh["fsdp"])


def batch():
    return torch.randint(10, (24,))


def optimizer(model, mesh):
    return torch.optim.AdamW(model.parameters(), lr=0.01)
""",
    ),
    Healthy(
        "adapters beside frozen weights, added in build",
        "fsdp=2",
        FSDP
        + """
class Adapted(MLP):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.a = nn.Linear(8, 2, bias=False)
        self.b = nn.Linear(2, 8, bias=False)

    def forward(self, x):
        return super().forward(x) + self.b(self.a(x))


def build():
    return Adapted()


def optimizer(model, mesh):
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)
""",
    ),
    Healthy(
        "a layer that is recomputed in backward",
        "fsdp=2",
        FSDP
        + """
from torch.utils.checkpoint import checkpoint


class Recomputed(MLP):
    def forward(self, x):
        return self.down(checkpoint(lambda rows: torch.tanh(self.up(rows)), x, use_reentrant=False))


def build():
    return Recomputed()
""",
    ),
    Healthy(
        "a loss that is a DTensor",
        "tp=2",
        MLP
        + """
def parallelize(model, mesh):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(use_local_output=False)}
    parallelize_module(model, mesh["tp"], plan)
""",
    ),
    Healthy(
        "a log of numbers of several types",
        "tp=2",
        TENSOR_PARALLEL
        + """
def log(model, rows, loss):
    return {"rows": len(rows), "is_finite": bool(loss.isfinite()), "mean": loss.detach() / 2, "learning_rate": 1e-3}
""",
    ),
    Healthy(
        "fewer rows of weights than ranks",
        "fsdp=4",
        FSDP.replace("nn.Linear(8, 12)", "nn.Linear(8, 3)").replace("nn.Linear(12, 8)", "nn.Linear(3, 5)")
        + """
def optimizer(model, mesh):
    return torch.optim.AdamW(model.parameters(), lr=0.01)
""",
    ),
    Healthy(
        "weights that a schedule keeps still in its first step",
        "fsdp=2",
        FSDP
        + """
def optimizer(model, mesh):
    made = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.optim.lr_scheduler.LambdaLR(made, lambda number: number / 100)
    return made
""",
    ),
    Bug(
        "a hook that sums the gradients of a shared block after each of its uses",
        "dp=2",
        SHARED,
        (("model.reentrant = False", "model.reentrant = True"),),
        ("wrong-value",),
        ("once after each use|after each use of", "use_reentrant=False"),
    ),
    Healthy(
        "a hook that sums the gradients of a shared block's uses as they come",
        "dp=2",
        SHARED.replace("model.reentrant = False", "model.reentrant = True")
        .replace("register_post_accumulate_grad_hook", "register_hook")
        .replace("lambda weight: distributed.all_reduce(weight.grad)", "summed"),
    ),
)
