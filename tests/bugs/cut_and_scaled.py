"""Backward that is cut in every layer, or scaled where the loss is made; weights of parts that don't meet."""

from __future__ import annotations

from tests.bugs.case import Bug, Healthy

LAYERS = """
class Layer(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8, bias=False)

    def forward(self, x):
        if self.group is None:
            return x + self.down(torch.sin(self.up(x)))
        h = torch.sin(self.up(Copy.apply(x, self.group)))
        return x + Sum.apply(self.down(h), self.group)


class Head(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8))

    def forward(self, x, wanted):
        if self.group is None:
            return (functional.linear(x, self.weight) - wanted).square().mean()
        rank, size = distributed.get_rank(self.group), distributed.get_world_size(self.group)
        own = functional.linear(Copy.apply(x, self.group), self.weight)
        return Sum.apply((own - wanted.chunk(size, -1)[rank]).square().sum(), self.group) / wanted.numel()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = Head()

    def forward(self, x, wanted):
        for layer in self.layers:
            x = layer(x)
        return self.head(x, wanted)


def build():
    return Model()


def parallelize(model, mesh):
    for layer in model.layers:
        layer.group = mesh.get_group("tp")
        layer.up.weight, layer.up.bias = own(layer.up.weight, mesh), own(layer.up.bias, mesh)
        layer.down.weight = own(layer.down.weight, mesh, 1)
    model.head.group = mesh.get_group("tp")
    model.head.weight = own(model.head.weight, mesh)


def batch():
    return torch.randn(4, 8), torch.randn(4, 6)


def loss(model, batch):
    return model(*batch)
"""

POOLED = """
BATCH_AXES = {"cp": 1}


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(torch.tanh(pooled(torch.tanh(self.up(x)).sum(1))))


def pooled(x):
    return all_reduce(x) if distributed.is_initialized() and distributed.get_world_size() > 1 else x


def build():
    return Pooled()


def parallelize(model, mesh):
    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("cp"))


def batch():
    return torch.randn(4, 8, 6)


def loss(model, inputs):
    return model(inputs).square().mean()
"""

REPLACED = """
class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8, bias=False)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Fused(nn.Module):
    def __init__(self, old, mesh):
        super().__init__()
        self.group = mesh.get_group("tp")
        self.gate_up = nn.Parameter(torch.cat([own(old.gate.weight, mesh), own(old.up.weight, mesh)]).detach())
        self.out = own(old.down.weight, mesh, 1)

    def forward(self, x):
        gate, up = functional.linear(Copy.apply(x, self.group), self.gate_up).chunk(2, -1)
        return Sum.apply(functional.linear(functional.silu(gate) * up, self.out), self.group)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.mlp = nn.Linear(5, 8), Gated()

    def forward(self, x):
        return self.mlp(self.first(x))


def build():
    return Model()


def parallelize(model, mesh):
    model.mlp = Fused(model.mlp, mesh)


def batch():
    return torch.randn(4, 5)
"""

KEPT = """
class Keeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, run, group, *weights):
        ctx.run, ctx.group, ctx.weights = run, group, weights
        ctx.save_for_backward(x if group is None else x.chunk(2, 1)[distributed.get_rank(group)].clone())
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if ctx.group is not None:
            parts = [torch.empty_like(x) for _ in range(2)]
            distributed.all_gather(parts, x, group=ctx.group)
            x = torch.cat(parts, 1)
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run(x)
        x_grad, *grads = torch.autograd.grad(out, (x, *ctx.weights), grad)
        return x_grad, None, None, *grads


class Block(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6, bias=False)

    def run(self, x):
        h = self.norm(x)
        if self.group is None:
            return x + self.down(torch.sin(self.up(h)))
        return x + Sum.apply(self.down(torch.sin(self.up(Copy.apply(h, self.group)))), self.group)

    def forward(self, x):
        return Keeping.apply(x, self.run, self.group, *self.parameters())


def build():
    return nn.Sequential(nn.Linear(3, 6), Block(), Block())


def parallelize(model, mesh):
    for block in (model[1], model[2]):
        block.group = mesh.get_group("tp")
        block.up.weight, block.up.bias = own(block.up.weight, mesh), own(block.up.bias, mesh)
        block.down.weight = own(block.down.weight, mesh, 1)


def batch():
    return torch.randn(4, 4, 3)
"""

TOKENS = """
class Keeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ids, run, group, *weights):
        ctx.run, ctx.group, ctx.weights = run, group, weights
        ctx.save_for_backward(x, ids if group is None else ids.chunk(2, 1)[distributed.get_rank(group)].clone())
        with torch.no_grad():
            return run(x, ids)

    @staticmethod
    def backward(ctx, grad):
        x, ids = ctx.saved_tensors
        if ctx.group is not None:
            parts = [torch.empty_like(ids) for _ in range(2)]
            distributed.all_gather(parts, ids, group=ctx.group)
            ids = torch.cat(parts, 1)
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run(x, ids)
        x_grad, *grads = torch.autograd.grad(out, (x, *ctx.weights), grad)
        return x_grad, None, None, None, *grads


class Block(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.kinds, self.up, self.down = nn.Embedding(9, 6), nn.Linear(6, 8), nn.Linear(8, 6, bias=False)

    def run(self, x, ids):
        h = x + self.kinds(ids)
        if self.group is None:
            return x + self.down(torch.sin(self.up(h)))
        return x + Sum.apply(self.down(torch.sin(self.up(Copy.apply(h, self.group)))), self.group)

    def forward(self, x, ids):
        return Keeping.apply(x, ids, self.run, self.group, *self.parameters())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block = nn.Linear(3, 6), Block()

    def forward(self, x, ids):
        return self.block(self.first(x), ids)


def build():
    return Model()


def parallelize(model, mesh):
    block = model.block
    block.group = mesh.get_group("tp")
    block.up.weight, block.up.bias = own(block.up.weight, mesh), own(block.up.bias, mesh)
    block.down.weight = own(block.down.weight, mesh, 1)


def batch():
    return torch.randn(4, 4, 3), torch.arange(16).view(4, 4) % 9


def loss(model, batch):
    return model(*batch).square().mean()
"""

TEACHER = """
from torch.utils.checkpoint import checkpoint



class Block(nn.Module):
    keeps, group = True, None

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6, bias=False)

    def run(self, x):
        if self.group is None:
            return x + self.down(torch.tanh(self.up(x)))
        return x + Sum.apply(self.down(torch.tanh(self.up(Copy.apply(x, self.group)))), self.group)

    def forward(self, x):
        if self.keeps or not torch.is_grad_enabled():
            return self.run(x)
        return checkpoint(self.run, x, use_reentrant=False)


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block, self.head = nn.Linear(4, 6), Block(), nn.Linear(6, 3)

    def encode(self, x):
        return self.head(self.block(self.first(x)))

    def forward(self, x, noise):
        with torch.no_grad():
            wanted = self.encode(x + noise)
        return (self.encode(x) - wanted).square().mean()


def build():
    return Student()


def parallelize(model, mesh):
    model.block.keeps, model.block.group = False, mesh.get_group("tp")
    model.block.up.weight, model.block.up.bias = own(model.block.up.weight, mesh), own(model.block.up.bias, mesh)
    model.block.down.weight = own(model.block.down.weight, mesh, 1)


def batch():
    return torch.randn(8, 4), torch.randn(8, 4)


def loss(model, batch):
    return model(*batch)
"""

COUNTED = """
from torch.utils.checkpoint import checkpoint


class Scaled(nn.Module):
    counts = False

    def __init__(self):
        super().__init__()
        self.runs = 0

    def forward(self, x):
        self.runs += self.counts
        return x * (1 + 0.5 * max(self.runs - 1, 0))


class Block(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.up, self.scaled, self.down = nn.Linear(6, 8), Scaled(), nn.Linear(8, 6, bias=False)

    def forward(self, x):
        if self.group is None:
            return x + self.down(torch.tanh(self.scaled(self.up(x))))
        return x + Sum.apply(self.down(torch.tanh(self.scaled(self.up(Copy.apply(x, self.group))))), self.group)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(3, 6), nn.ModuleList([Block(), Block()]), nn.Linear(6, 2)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.last(x)


def build():
    return Model()


def parallelize(model, mesh):
    for block in model.blocks:
        block.group = mesh.get_group("tp")
        block.up.weight, block.up.bias = own(block.up.weight, mesh), own(block.up.bias, mesh)
        block.down.weight = own(block.down.weight, mesh, 1)


def batch():
    return torch.randn(4, 3)
"""

OTHER_RANK = (
    "self.out = own(old.down.weight, mesh, 1)",
    "self.out = nn.Parameter(old.down.weight.detach().chunk(2, 1)[1 - mesh.get_local_rank()].clone())",
)
IN_OTHER_ORDER = REPLACED.replace(*OTHER_RANK).replace(
    "[own(old.gate.weight, mesh), own(old.up.weight, mesh)]",
    "[each.weight.chunk(2)[1 - mesh.get_local_rank()] for each in (old.gate, old.up)]",
)

CASES = (
    Bug(
        "each layer detaches what its first projection reads",
        "tp=2",
        LAYERS,
        (("self.up(Copy.apply(x, self.group))", "self.up(Copy.apply(x, self.group).detach())"),),
        ("wrong-value",),
        ("layers.1", "cuts the graph: nothing flows back"),
        ("module layers.0 is the first wrong",),
        with_lines=True,
    ),
    Bug(
        "the model itself detaches the sum of what ranks pool",
        "cp=2",
        POOLED,
        (("return all_reduce(x) if", "return all_reduce(x).detach() if"),),
        ("wrong-value",),
        ("cuts the graph: nothing flows back", "up.weight"),
        with_lines=True,
    ),
    Bug(
        "the head copies to ranks twice, so that its backward sums twice",
        "tp=2",
        LAYERS,
        (("own = functional.linear(Copy.apply(x", "own = functional.linear(Copy.apply(Copy.apply(x, self.group)"),),
        ("wrong-scale",),
        ("head is the first wrong module", "2 times", "once too often"),
        ("after backward",),
        with_lines=True,
    ),
    Bug(
        "a row-parallel layer averages its terms",
        "tp=2",
        LAYERS,
        (("Sum.apply(self.down(h), self.group)", "all_reduce(self.down(h), distributed.ReduceOp.AVG, self.group)"),),
        ("wrong-scale", "wrong-value"),
        ("averages over ranks 0-1 what are terms of a sum over tp", "op=ReduceOp.SUM"),
        ("a local size",),
        with_lines=True,
    ),
    Bug(
        "a replaced module has the columns of another rank",
        "tp=2",
        REPLACED,
        (OTHER_RANK,),
        ("misordered",),
        ("mlp.down.weight", "different order", "chunk"),
    ),
    Bug(
        "checkpointing puts the parts of what it kept together in another order",
        "tp=2",
        KEPT,
        (("x = torch.cat(parts, 1)", "x = torch.cat(parts[::-1], 1)"),),
        ("wrong-value",),
        ("backward runs 2.norm again", "is given other tensors than in forward", "put together again"),
        ("cuts the graph",),
    ),
    Bug(
        "checkpointing puts token ids together in another order",
        "tp=2",
        TOKENS,
        (("ids = torch.cat(parts, 1)", "ids = torch.cat(parts[::-1], 1)"),),
        ("wrong-value",),
        ("backward runs block.kinds again", "is given other tensors than in forward", "put together again"),
        ("returns something else",),
    ),
    Bug(
        "a checkpointed block, run without a graph for the teacher's output, lacks a sum in backward",
        "tp=2",
        TEACHER,
        (("self.up(Copy.apply(x, self.group))", "self.up(x)"),),
        ("wrong-value",),
        ("block is the first wrong module", "nothing sums a gradient"),
        ("again", "copies differ"),
    ),
    Bug(
        "a checkpointed module counts its runs",
        "tp=2",
        COUNTED,
        (('block.group = mesh.get_group("tp")', 'block.group, block.scaled.counts = mesh.get_group("tp"), True'),),
        ("wrong-value",),
        (
            "backward runs blocks.0.scaled again",
            "returns something else than in forward",
            "changes between the two runs",
        ),
        ("without a backward",),
    ),
    Healthy("a replaced module whose ranks are in another order", "tp=2", IN_OTHER_ORDER),
)
