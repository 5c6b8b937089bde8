"""Layers that are split by hand: sums that are dropped or reach too many ranks, and parts that are joined wrongly."""

from __future__ import annotations

from tests.bugs.branches import BRANCHES
from tests.bugs.case import Bug, Healthy

FUNCTIONAL = """
from torch.distributed import _functional_collectives as funcol

BATCH_AXES = ("dp",)


def build():
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def batch():
    return torch.randn(12, 6)


def step(model, rows, mesh):
    loss = model(rows).square().mean()
    loss.backward()
    group = mesh.get_group("dp")
    with torch.no_grad():
        funcol.all_reduce(loss.detach(), "avg", group)
        for parameter in model.parameters():
            parameter.grad.copy_(funcol.all_reduce(parameter.grad, "avg", group))
    return loss.detach()

"""

ROWS = """
from torch.distributed import _functional_collectives as funcol


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        total = funcol.wait_tensor(funcol.all_reduce(x, "sum", group))
        return total.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Mlp(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 16, bias=False)
        self.down = nn.Linear(16, 6)

    def forward(self, x):
        if self.group is None:
            return x + self.down(self.up(x).tanh())
        y = functional.linear(self.up(Copy.apply(x, self.group)).tanh(), self.down.weight)
        y = Sum.apply(y, self.group)
        return x + y + self.down.bias


def build():
    return nn.Sequential(Mlp(), Mlp())


def parallelize(model, mesh):
    rank, size = mesh["tp"].get_local_rank(), mesh["tp"].size()
    for layer in model:
        layer.group = mesh.get_group("tp")
        layer.up.weight = nn.Parameter(layer.up.weight.detach().chunk(size)[rank].clone())
        layer.down.weight = nn.Parameter(layer.down.weight.detach().chunk(size, 1)[rank].clone())


def batch():
    return torch.randn(8, 6)

"""

UNSUMMED = """
class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.clone(), None
"""

CLIPPED_ROWS = (
    ROWS
    + """
class Clipped(torch.optim.SGD):
    group = None

    @torch.no_grad()
    def step(self, closure=None):
        weights = self.param_groups[0]["params"]
        square = torch.stack([p.grad.square().sum() for p in weights if p.ndim > 1]).sum()
        if self.group is not None:
            distributed.all_reduce(square, group=self.group)
        square += torch.stack([p.grad.square().sum() for p in weights if p.ndim < 2]).sum()
        for parameter in weights:
            parameter.grad.mul_((0.1 / square.sqrt()).clamp(max=1.0))
        super().step(closure)


def optimizer(model, mesh):
    optimizer = Clipped(model.parameters(), lr=0.2)
    optimizer.group = model[0].group
    return optimizer

"""
)

GAIN = (
    ROWS.replace(
        "        self.down = nn.Linear(16, 6)",
        "        self.down = nn.Linear(16, 6)\n        self.gain = nn.Parameter(torch.rand(6))",
    )
    .replace("self.down(self.up(x).tanh())", "self.down(self.up(x).tanh()) * self.gain")
    .replace("x + y + self.down.bias", "x + (y + self.down.bias) * self.gain")
)

DATA_BESIDE = (
    ROWS
    + """
BATCH_AXES = ("dp",)


def step(model, rows, mesh):
    loss = model(rows).square().mean()
    loss.backward()
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        parameter.grad /= mesh["dp"].size()
    return loss.detach()

"""
)

WITHOUT_RESIDUAL = (
    DATA_BESIDE.replace("x + self.down(", "self.down(")
    .replace("x + y + self.down.bias", "y")
    .replace("nn.Linear(16, 6)", "nn.Linear(16, 6, bias=False)")
)

COLUMNS = """
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        whole = part.new_empty(group.size(), *part.shape)
        distributed.all_gather_into_tensor(whole.flatten(0, 1), part.contiguous(), group=group)
        return whole.permute(1, 0, 2).reshape(part.shape[0], -1)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(ctx.group.size(), -1)[ctx.group.rank()].contiguous(), None


class Wide(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 16)
        self.down = nn.Linear(16, 4)

    def forward(self, x):
        if self.group is None:
            return self.down(functional.silu(self.up(x)))
        part = self.up(x)
        return self.down(functional.silu(Gather.apply(part, self.group)))


def build():
    return Wide()


def parallelize(model, mesh):
    rank, size = mesh["tp"].get_local_rank(), mesh["tp"].size()
    model.group = mesh.get_group("tp")
    for name, whole in (("weight", model.up.weight), ("bias", model.up.bias)):
        setattr(model.up, name, nn.Parameter(whole.detach().chunk(size)[rank].clone()))


def batch():
    return torch.randn(10, 6)

"""

HEADS = '''
class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, out = group, torch.empty_like(x)
        distributed.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = torch.empty_like(grad, memory_format=torch.contiguous_format)
        distributed.all_to_all_single(out, grad.contiguous(), group=ctx.group)
        return out, None


class Attention(nn.Module):
    """Ranks have parts of the sequence, and in attention parts of the heads."""

    group = None

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def spread(self, x):
        x = x.view(*x.shape[:2], 4, 4)
        if self.group is not None:
            size = self.group.size()
            x = x.view(x.shape[0], x.shape[1], size, -1, 4).permute(2, 0, 1, 3, 4)
            x = Exchange.apply(x.contiguous(), self.group).permute(1, 0, 2, 3, 4).flatten(1, 2)
        return x.transpose(1, 2)

    def forward(self, x):
        q, k, v = self.spread(self.q(x)), self.spread(self.k(x)), self.spread(self.v(x))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        if self.group is not None:
            seen = seen.unflatten(1, (self.group.size(), -1)).transpose(0, 1).contiguous()
            seen = Exchange.apply(seen, self.group)
            seen = seen.permute(1, 2, 0, 3, 4).flatten(2, 3)
        return self.o(seen.flatten(2))


def build():
    return Attention()


def parallelize(model, mesh):
    model.group = mesh.get_group("cp")


def batch():
    return torch.randn(2, 12, 16)


def step(model, rows, mesh):
    part = model(rows.chunk(mesh["cp"].size(), 1)[mesh.get_local_rank("cp")])
    loss = part.square().mean()
    loss.backward()
    whole = loss.detach().clone()
    for number in (whole, *(parameter.grad for parameter in model.parameters())):
        distributed.all_reduce(number, group=mesh.get_group("cp"))
        number /= mesh["cp"].size()
    return whole


def whole_output(part, mesh):
    return DTensor.from_local(part, mesh["cp"], (Shard(1),)).full_tensor(grad_placements=(Partial(),))

'''

GROUPED = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.o = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.k, self.v = nn.Linear(16, 8, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (-1, 2)).transpose(1, 2) for part in (self.q, self.k, self.v))
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        seen = functional.scaled_dot_product_attention(q, k, v)
        return self.o(seen.transpose(1, 2).flatten(2))


def build():
    return Attention()


def parallelize(model, mesh):
    plan = {name: ColwiseParallel() for name in ("q", "k", "v")}
    parallelize_module(model, mesh["tp"], plan | {"o": RowwiseParallel()})


def batch():
    return torch.randn(2, 5, 16)

"""

CASES = (
    Bug(
        "key heads repeated as a block on each rank",
        "tp=2",
        GROUPED,
        (
            (
                "part.repeat_interleave(q.shape[1] // part.shape[1], 1)",
                "part.repeat(1, q.shape[1] // part.shape[1], 1, 1)",
            ),
        ),
        ("wrong-value",),
        ("repeat_interleave", "dim 1", "case.py"),
        ("gather or reduce",),
        with_lines=True,
    ),
    Bug(
        "a functional sum of gradients whose result is dropped",
        "dp=2",
        FUNCTIONAL,
        (
            (
                'parameter.grad.copy_(funcol.all_reduce(parameter.grad, "avg", group))',
                'funcol.all_reduce(parameter.grad, "avg", group)',
            ),
        ),
        ("unreduced-gradient",),
        ("all_reduce in case.py", "nothing reads", "over dp"),
        ("outside what", "group of one rank"),
    ),
    Bug(
        "a functional sum of terms that is waited for and dropped",
        "tp=2",
        ROWS,
        (
            (
                '        total = funcol.wait_tensor(funcol.all_reduce(x, "sum", group))\n        return total.clone()',
                '        funcol.wait_tensor(funcol.all_reduce(x, "sum", group))\n        return x.clone()',
            ),
        ),
        ("unreduced-output",),
        ("all_reduce in case.py", "nothing reads", "over tp"),
        with_lines=True,
    ),
    Bug(
        "a sum of copied gradients that is not written back",
        "dp=2",
        FUNCTIONAL,
        (
            (
                'parameter.grad.copy_(funcol.all_reduce(parameter.grad, "avg", group))',
                "distributed.all_reduce(parameter.grad.clone(), distributed.ReduceOp.AVG, group)",
            ),
        ),
        ("unreduced-gradient",),
        ("all_reduce in case.py", "sums a copy", "nothing reads the copy"),
        ("outside what", "in a new tensor"),
    ),
    Bug(
        "a sum of copied terms that is not handed on",
        "tp=2",
        ROWS,
        (
            (
                '        total = funcol.wait_tensor(funcol.all_reduce(x, "sum", group))\n        return total.clone()',
                "        total = x.clone()\n        distributed.all_reduce(total, group=group)\n        return x + 0",
            ),
        ),
        ("unreduced-output",),
        ("all_reduce in case.py", "sums a copy", "over tp"),
        with_lines=True,
    ),
    Bug(
        "terms summed over all ranks instead of tp",
        "dp=2,tp=2",
        DATA_BESIDE,
        (('funcol.all_reduce(x, "sum", group)', 'funcol.all_reduce(x, "sum", distributed.group.WORLD)'),),
        ("wrong-value",),
        ("over the group of tp",),
        ("leave tp out",),
        with_lines=True,
    ),
    Bug(
        "terms summed over all ranks, with tp outside",
        "tp=2,dp=2",
        DATA_BESIDE,
        (('funcol.all_reduce(x, "sum", group)', 'funcol.all_reduce(x, "sum", distributed.group.WORLD)'),),
        ("wrong-value",),
        ("over the group of tp",),
        ("leave tp out",),
        with_lines=True,
    ),
    Bug(
        "terms without a residual summed over all ranks",
        "dp=2,tp=2",
        WITHOUT_RESIDUAL,
        (('funcol.all_reduce(x, "sum", group)', 'funcol.all_reduce(x, "sum", distributed.group.WORLD)'),),
        ("wrong-value",),
        ("leave dp out",),
        ("leave tp out",),
        with_lines=True,
    ),
    Bug(
        "a residual added on every rank before the sum",
        "tp=2",
        ROWS,
        (
            (
                "        y = Sum.apply(y, self.group)\n        return x + y + self.down.bias",
                "        y = x + y\n        return Sum.apply(y, self.group) + self.down.bias",
            ),
        ),
        ("wrong-scale",),
        ("the input of 0", "before the sum"),
        ("nothing sums it",),
        with_lines=True,
    ),
    Bug(
        "no backward sum, and gradients clipped by their right norm",
        "tp=2",
        CLIPPED_ROWS,
        (("def batch():", f"{UNSUMMED}\n\ndef batch():"),),
        ("unreduced-gradient",),
        ("sends back each rank's own part", "over tp"),
        ("clips by",),
        with_lines=True,
    ),
    Bug(
        "a gain that the sharded forward leaves out",
        "tp=2",
        GAIN,
        (("(y + self.down.bias) * self.gain", "y + self.down.bias"),),
        ("wrong-value",),
        ("never uses 0.gain",),
        with_lines=True,
    ),
    Bug(
        "two branches without a backward sum",
        "tp=2",
        BRANCHES,
        (("a, m = Copy.apply(h, self.group), Copy.apply(h, self.group)", "a, m = h, h"),),
        ("unreduced-gradient",),
        ("over tp", "case.py", "in forward and all_reduces in backward"),
        ("outside what",),
        with_lines=True,
    ),
    Bug(
        "columns gathered along the rows",
        "tp=2",
        COLUMNS,
        (("whole.permute(1, 0, 2).reshape(part.shape[0], -1)", "whole.view(part.shape[0], -1)"),),
        ("wrong-value",),
        ("view", "case.py", "wrong order"),
        ("gather or reduce",),
        with_lines=True,
    ),
    Bug(
        "heads that come back with their ranks inside",
        "cp=2",
        HEADS,
        (("seen.permute(1, 2, 0, 3, 4).flatten(2, 3)", "seen.permute(1, 2, 3, 0, 4).flatten(2, 3)"),),
        ("wrong-value",),
        ("seen.permute(1, 2, 3, 0, 4)", "wrong order"),
        ("only its own keys", "expert"),
        with_lines=True,
    ),
    Bug(
        "tokens joined with their ranks inside",
        "cp=2",
        HEADS,
        ((".permute(1, 0, 2, 3, 4).flatten(1, 2)", ".permute(1, 2, 0, 3, 4).flatten(1, 2)"),),
        ("wrong-value",),
        ("wrong order", "case.py"),
        ("only its own keys", "expert"),
        with_lines=True,
    ),
    Healthy("a functional sum of a logged number is dropped", "dp=2", FUNCTIONAL),
)
