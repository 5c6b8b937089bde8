"""Sequence parallel by functional collectives: biases and norms whose gradients are each rank's own."""

from __future__ import annotations

from tests.bugs.case import Bug

SEQUENCE = """
from torch.distributed import _functional_collectives as funcol

BATCH_AXES = {"tp": 1}


class Block(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x):
        h = self.norm(x)
        if self.group is not None:
            h = funcol.all_gather_tensor_autograd(h, 1, self.group)
        out = functional.linear(functional.gelu(self.up(h)), self.down.weight)
        if self.group is not None:
            out = funcol.reduce_scatter_tensor_autograd(out, "sum", 1, self.group)
        return x + out + self.down.bias


def build():
    model = nn.Sequential(Block(), Block())
    for block in model:
        nn.init.normal_(block.norm.weight, 1, 0.2)
        nn.init.normal_(block.norm.bias)
    return model


def parallelize(model, mesh):
    rank, size = mesh["tp"].get_local_rank(), mesh["tp"].size()
    for block in model:
        block.group = mesh.get_group("tp")
        block.up.weight = nn.Parameter(block.up.weight.detach().chunk(size)[rank].clone())
        block.up.bias = nn.Parameter(block.up.bias.detach().chunk(size)[rank].clone())
        block.down.weight = nn.Parameter(block.down.weight.detach().chunk(size, 1)[rank].clone())


def batch():
    return torch.randn(2, 12, 16)


def step(model, x, mesh):
    loss = model(x).square().mean() / mesh["tp"].size()
    loss.backward()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("down.bias"):
            distributed.all_reduce(parameter.grad, group=mesh.get_group("tp"))
    loss = loss.detach()
    distributed.all_reduce(loss, group=mesh.get_group("tp"))
    return loss

"""

PLANNED = """
from torch.distributed.tensor.parallel import SequenceParallel

BATCH_AXES = ("dp",)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(16, 16), nn.Linear(16, 16)
        self.block = Block()

    def forward(self, x):
        return self.out(self.block(self.inp(x)))


def build():
    return Net()


def parallelize(model, mesh):
    plan = {
        "inp": ColwiseParallel(output_layouts=Shard(1)),
        "block.norm": SequenceParallel(),
        "block.up": ColwiseParallel(input_layouts=Shard(1)),
        "block.down": RowwiseParallel(output_layouts=Shard(1)),
        "out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])


def batch():
    return torch.randn(4, 8, 16)


def loss(model, batch):
    return model(batch).square().mean()

"""

BY_HAND = (
    PLANNED.replace('        "block.norm": SequenceParallel(),\n', "")
    + """
def step(model, batch, mesh):
    value = loss(model, batch)
    value.backward()
    distributed.all_reduce(model.block.norm.weight.grad.to_local(), group=mesh.get_group("tp"))
    return value
"""
)

GATHERED = """
BATCH_AXES = {}


class Tokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        total = grad.contiguous().clone()
        return total.chunk(distributed.get_world_size(ctx.group), 1)[distributed.get_rank(ctx.group)], None


class Model(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)), nn.Linear(16, 8)

    def forward(self, x):
        if self.group is None:
            return self.head(self.body(x))
        own = x.chunk(distributed.get_world_size(self.group), 1)[distributed.get_rank(self.group)]
        return self.head(Tokens.apply(self.body(own), self.group))


def build():
    return Model()


def parallelize(model, mesh):
    model.group = mesh.get_group("tp")


def batch():
    return torch.randn(3, 12, 16)


def step(model, x, mesh):
    loss = model(x).square().mean()
    loss.backward()
    for parameter in model.body.parameters():
        distributed.all_reduce(parameter.grad, group=mesh.get_group("tp"))
    return loss.detach()

"""

CASES = (
    Bug(
        "a norm that the plan leaves out under sequence parallel",
        "dp=2,tp=2",
        PLANNED,
        (('        "block.norm": SequenceParallel(),\n', ""),),
        ("unreduced-gradient",),
        ('put "norm": SequenceParallel() into the plan', "grad.to_local()", "get_group('tp')"),
        ("group has one rank", "wrap the parameter"),
    ),
    Bug(
        "a gradient that is summed over the wrong group after backward",
        "dp=2,tp=2",
        BY_HAND,
        (
            (
                'weight.grad.to_local(), group=mesh.get_group("tp")',
                'weight.grad.to_local(), group=mesh.get_group("dp")',
            ),
        ),
        ("wrong-value",),
        ("mixes the shards", "reduce over tp instead of dp"),
        ("look for a collective without a backward",),
        with_lines=True,
    ),
    Bug(
        "a gradient that nothing sums by hand under FSDP2",
        "dp=2,tp=2",
        BY_HAND,
        (('    distributed.all_reduce(model.block.norm.weight.grad.to_local(), group=mesh.get_group("tp"))\n', ""),),
        ("unreduced-gradient",),
        ("grad.to_local()", "get_group('tp')"),
        ("group has one rank",),
    ),
    Bug(
        "a gather between two modules whose backward sums what every rank has whole",
        "tp=2",
        GATHERED,
        (
            (
                "        total = grad.contiguous().clone()\n",
                "        total = grad.contiguous().clone()\n        distributed.all_reduce(total, group=ctx.group)\n",
            ),
        ),
        ("wrong-scale",),
        ("the code between body and head sums over tp",),
        ("The backward of body",),
    ),
    Bug(
        "the gradient of a row-parallel bias not summed under sequence parallel",
        "tp=2",
        SEQUENCE,
        (('if "norm" in name or name.endswith("down.bias"):', 'if "norm" in name:'),),
        ("unreduced-gradient",),
        ("down.bias", "over tp", "SUM"),
    ),
    Bug(
        "a bias added before the reduce-scatter",
        "tp=2",
        SEQUENCE,
        (
            ("self.down.weight)\n", "self.down.weight, self.down.bias)\n"),
            ("x + out + self.down.bias", "x + out"),
        ),
        ("wrong-scale",),
        ("bias", "twice|2 times|on every rank|each rank"),
    ),
    Bug(
        "gradients of norms averaged under sequence parallel",
        "tp=2",
        SEQUENCE,
        (
            (
                "distributed.all_reduce(parameter.grad, group",
                "distributed.all_reduce(parameter.grad, op=distributed.ReduceOp.AVG, group",
            ),
        ),
        ("wrong-scale",),
        ("1/2", "SUM"),
    ),
)
