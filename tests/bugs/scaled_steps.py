"""Optimizers and clipping that take the norm of a shard, or of copies."""

from __future__ import annotations

from tests.bugs.case import Bug
from tests.bugs.models import BLOCK_BY_HAND

CLIPPED = (
    BLOCK_BY_HAND
    + """

def build():
    return nn.Sequential(Block(), Block())


def cut(name):
    return name.endswith(("up.weight", "up.bias", "down.weight"))


def parallelize(model, mesh):
    rank, size = mesh["tp"].get_local_rank(), mesh["tp"].size()
    for block in model:
        block.group = mesh.get_group("tp")
        block.up.weight = nn.Parameter(block.up.weight.detach().chunk(size)[rank].clone())
        block.up.bias = nn.Parameter(block.up.bias.detach().chunk(size)[rank].clone())
        block.down.weight = nn.Parameter(block.down.weight.detach().chunk(size, 1)[rank].clone())
    model.group = mesh.get_group("tp")


def batch():
    return torch.randn(6, 8)


def optimizer(model, mesh):
    group = getattr(model, "group", None)
    squares = torch.zeros((), dtype=next(model.parameters()).dtype)
    whole = torch.zeros_like(squares)
    for name, parameter in model.named_parameters():
        if cut(name):
            squares += parameter.grad.square().sum()
        else:
            whole += parameter.grad.square().sum()
    if group is not None:
        distributed.all_reduce(squares, group=group)
    norm = (squares + whole).sqrt()
    for parameter in model.parameters():
        parameter.grad *= (0.01 / norm).clamp(max=1.0)
    return torch.optim.SGD(model.parameters(), lr=0.1)

"""
)

TRUSTED = """
BATCH_AXES = ("fsdp",)


def build():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def parallelize(model, mesh):
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def batch():
    return torch.randn(16, 8)


class Lars(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                weight, grad = parameter, parameter.grad
                trust = norm(weight) / norm(grad)
                local(weight).sub_(group["lr"] * trust * local(grad))


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def norm(tensor):
    value = tensor.norm()
    return value.full_tensor() if isinstance(value, DTensor) else value


def optimizer(model, mesh):
    return Lars(model.parameters(), 0.01)

"""

CASES = (
    Bug(
        "copies counted on every rank of a norm to clip by",
        "tp=2",
        CLIPPED,
        (("            whole += parameter", "            squares += parameter"),),
        ("wrong-value",),
        ("copies", "norm.weight", "counts each copy"),
    ),
    Bug(
        "gradients clipped by the norm of each rank's own part of hand-cut layers",
        "tp=2",
        CLIPPED,
        (("        distributed.all_reduce(squares, group=group)", "        pass"),),
        ("wrong-scale", "unreplicated"),
        ("norm", "own"),
    ),
    Bug(
        "a trust ratio of each rank's shard",
        "fsdp=2",
        TRUSTED,
        (
            (
                ("    value = tensor.norm()\n    return value.full_tensor() if isinstance(value, DTensor) else value"),
                "    return local(tensor).norm()",
            ),
        ),
        ("wrong-scale", "wrong-value"),
        ("norm", "LARS"),
        never=("learning rate",),
    ),
)
