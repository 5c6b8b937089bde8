"""Tensor parallel backward: sums missing, taken twice, or over ranks with other heads."""

from __future__ import annotations

from tests.bugs.case import Bug, Healthy
from tests.bugs.models import TENSOR_PARALLEL

KEY_HEADS = (
    TENSOR_PARALLEL
    + '''
class Attention(nn.Module):
    """Four query heads and two key heads on four ranks: two ranks share a key head."""

    group = None

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8, bias=False)
        self.k = nn.Linear(8, 4, bias=False)
        self.o = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        if self.group is not None:
            x = Copy.apply(x, self.group)
        q, k = (layer(x).unflatten(-1, (-1, 2)) for layer in (self.q, self.k))
        k = k.repeat_interleave(q.shape[-2] // k.shape[-2], -2)
        out = self.o(torch.tanh(q * k).flatten(-2))
        return out if self.group is None else Sum.apply(out, self.group)


def build():
    return Attention()


def parallelize(model, mesh):
    rank, size = mesh.get_local_rank("tp"), mesh["tp"].size()
    model.q.weight = own(model.q.weight, mesh)
    model.o.weight = own(model.o.weight, mesh, 1)
    head = rank * 2 // size
    model.k.weight = nn.Parameter(model.k.weight.detach().chunk(2)[head].clone())
    model.group = mesh.get_group("tp")


def step(model, rows, mesh):
    loss = model(rows).square().mean()
    loss.backward()
    share(model, mesh)
    return loss.detach()


def share(model, mesh):
    """Sum the gradient of a key head over the ranks that have it."""
    both = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
    distributed.all_reduce(model.k.weight.grad, group=both[mesh.get_local_rank("tp") // 2])

'''
)

FROZEN = TENSOR_PARALLEL.replace(
    "    model.group = mesh", "    model.norm.weight.requires_grad_(True)\n    model.group = mesh"
)

CASES = (
    Bug(
        "a parameter frozen on one rank",
        "tp=2",
        FROZEN,
        (("requires_grad_(True)", 'requires_grad_(mesh.get_local_rank("tp") == 0)'),),
        ("unreduced-gradient", "incomplete", "unreplicated"),
        ("norm.weight", "rank 1", "None"),
    ),
    Bug(
        "the backward of a row-parallel sum taken over ranks again",
        "tp=4",
        TENSOR_PARALLEL,
        (("return Sum.apply(x, self.group)", "return all_reduce(x, group=self.group)"),),
        ("wrong-scale",),
        ("tp", "4 times", "backward|torch.distributed.nn"),
        ("over tp with ReduceOp.AVG",),
    ),
    Bug(
        "no sum of gradients before column-parallel layers",
        "tp=2",
        TENSOR_PARALLEL,
        (("        x = Copy.apply(x, self.group)\n", ""),),
        ("unreduced-gradient",),
        ("over tp", "norm."),
    ),
    Bug(
        "a row-parallel sum that nothing flows back through",
        "tp=2",
        TENSOR_PARALLEL,
        (
            (
                "        return Sum.apply(x, self.group) + self.down.bias",
                "        parts = [torch.empty_like(x) for _ in range(2)]\n"
                "        distributed.all_gather(parts, x.detach(), group=self.group)\n"
                "        return sum(parts) + self.down.bias",
            ),
        ),
        ("wrong-value", "unreduced-gradient", "incomplete"),
        ("None|cut", "up.weight|norm."),
    ),
    Bug(
        "key heads on wrong ranks",
        "tp=4",
        KEY_HEADS,
        (
            ("head = rank * 2 // size", "head = rank % 2"),
            ("[0, 1]", "[0, 2]"),
            ("[2, 3]", "[1, 3]"),
            ('mesh.get_local_rank("tp") // 2', 'mesh.get_local_rank("tp") % 2'),
        ),
        ("misordered", "wrong-value"),
        ("k.weight", "head|another order|in turn|other ranks|rank"),
        ("compare the outputs module by module",),
    ),
    Bug(
        "gradients of shared key heads not summed",
        "tp=4",
        KEY_HEADS,
        (("    share(model, mesh)\n", ""),),
        ("unreduced-gradient",),
        ("k.weight", "SUM"),
    ),
    Bug(
        "gradients of shared key heads summed over all ranks",
        "tp=4",
        KEY_HEADS,
        (('group=both[mesh.get_local_rank("tp") // 2]', 'group=mesh.get_group("tp")'),),
        ("wrong-value", "wrong-scale"),
        ("k.weight", "different parts|splits"),
    ),
    Healthy(
        "a parameter frozen on every rank",
        "tp=2",
        FROZEN.replace("requires_grad_(True)", "requires_grad_(False)")
        + """
def build():
    model = MLP()
    model.norm.weight.requires_grad_(False)
    return model
""",
    ),
)
