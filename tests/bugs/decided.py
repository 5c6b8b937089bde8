"""Bugs with several likely causes, of which something that ran in the step decides: a sum, a cast, a second run."""

from __future__ import annotations

from tests.bugs.case import Bug, Healthy

ZERO = """
def build(): return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4, bias=False))
def batch(): return torch.randn(8, 6)
class Divided(torch.optim.SGD):
    def __init__(self, weights, mesh):
        self.weights, self.mesh = list(weights), mesh
        super().__init__(self.weights[mesh.get_local_rank() :: mesh.size()], lr=0.1)
    def step(self):
        super().step()
        for at, weight in enumerate(self.weights):
            distributed.broadcast(weight.data, src=at % self.mesh.size())
def parallelize(model, mesh): model.mesh = mesh
def step(model, x, mesh):
    loss = model(x.chunk(mesh.size())[mesh.get_local_rank()]).square().mean()
    loss.backward()
    whole = loss.detach().clone()
    for number in (whole, *(weight.grad for weight in model.parameters())):
        distributed.all_reduce(number)
        number.div_(mesh.size())
    return whole
def optimizer(model, mesh):
    is_whole = not hasattr(model, "mesh")
    return torch.optim.SGD(model.parameters(), lr=0.1) if is_whole else Divided(model.parameters(), mesh)
def whole_output(part, mesh): return DTensor.from_local(part, mesh, [Shard(0)]).full_tensor()
"""

EIGHT_BITS = """
class Rounded(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 12))
        self.mesh = None
    def forward(self, x):
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        largest = weight.detach().abs().amax()
        if self.mesh is not None:
            distributed.all_reduce(largest, distributed.ReduceOp.MAX, self.mesh.get_group())
        scale = 448 / largest
        cast = (weight.detach() * scale).to(torch.float8_e4m3fn).to(weight.dtype) / scale
        return functional.linear(x, weight + (cast - weight.detach()))
def build(): return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), Rounded())
def batch(): return torch.randn(8, 6)
def parallelize(model, mesh):
    model[2].mesh = mesh
    model[2].weight = nn.Parameter(distribute_tensor(model[2].weight.detach(), mesh, [Shard(0)]))
def whole_output(part, mesh): return DTensor.from_local(part, mesh, [Shard(1)]).full_tensor()
def loss(model, x): return model(x).square().mean()
def step(model, x, mesh):
    out = model(x)
    square = all_reduce(out.square().mean(), group=mesh.get_group()) / mesh.size()
    (out.square().mean() / mesh.size()).backward()
    for weight in model[0].parameters():
        distributed.all_reduce(weight.grad, group=mesh.get_group())
    return square.detach()
"""

CENTERED = """
BATCH_AXES = ("dp",)
class Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.clone()
        distributed.all_reduce(x, group=group)
        return x / distributed.get_world_size(group)
    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        distributed.all_reduce(grad, group=ctx.group)
        return grad / distributed.get_world_size(ctx.group), None
class Centered(nn.Module):
    mesh = None
    def forward(self, x):
        mean, square = x.mean(0), x.square().mean(0)
        if self.mesh is not None:
            mean, square = (Mean.apply(one, self.mesh.get_group()) for one in (mean, square))
        return (x - mean) * torch.rsqrt(square - mean.square() + 1e-5)
def build():
    first = (nn.Linear(6, 8), Centered(), nn.Tanh())
    return nn.Sequential(*first, nn.Linear(8, 6), Centered(), nn.Tanh(), nn.Linear(6, 4))
def batch(): return torch.randn(8, 6) * torch.arange(1, 9)[:, None]
def parallelize(model, mesh):
    model[1].mesh = mesh
    model[4].mesh = mesh
    fully_shard(model, mesh=mesh)
def optimizer(model, mesh): return torch.optim.SGD(model.parameters(), lr=0.1)
"""

MICRO = """
def build(): return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
def batch(): return torch.randn(16, 6)
def parallelize(model, mesh): fully_shard(model, mesh=mesh)
def loss(model, x): return model(x).square().mean()
def step(model, x, mesh):
    total = 0.0
    for number, rows in enumerate(x.chunk(2)):
        model.SWITCH(number == 1)
        part = loss(model, rows) / 2
        part.backward()
        total = total + part.detach()
    return total
"""
SYNC = MICRO.replace("SWITCH", "set_requires_gradient_sync") + 'BATCH_AXES = ("fsdp",)\n'
REPLICAS = MICRO.replace("SWITCH", "set_requires_all_reduce") + 'BATCH_AXES = ("replicate", "shard")\n'

COUNTED = """
def shifted(ids): return functional.pad(ids[:, 1:], (0, 1), value=-100)
def build(): return nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
def batch(): return torch.randint(0, 20, (2, 12))
def loss(model, ids): return functional.cross_entropy(model(ids).flatten(0, 1), shifted(ids).flatten())
def parallelize(model, mesh): pass
def step(model, ids, mesh):
    part, labels = (one.chunk(2, 1)[mesh.get_local_rank()].contiguous() for one in (ids, shifted(ids)))
    count = (labels != -100).sum()
    distributed.all_reduce(count, group=mesh.get_group())
    own = functional.cross_entropy(model(part).flatten(0, 1), labels.flatten(), reduction="sum") / count
    own.backward()
    whole = own.detach().clone()
    for number in (whole, *(weight.grad for weight in model.parameters())):
        distributed.all_reduce(number, group=mesh.get_group())
    return whole
def whole_output(part, mesh): return DTensor.from_local(part, mesh, [Shard(1)]).full_tensor()
"""

ORTHOGONAL = """
BATCH_AXES = ("fsdp",)
def build(): return nn.Sequential(nn.Linear(12, 16, bias=False), nn.Tanh(), nn.Linear(16, 12, bias=False))
def batch(): return torch.randn(6, 12)
def parallelize(model, mesh): fully_shard(model, mesh=mesh)
def orthogonal(x):
    x = x / x.norm()
    for _ in range(5):
        s = x @ x.T
        x = 3.4445 * x + (2.0315 * s @ s - 4.775 * s) @ x
    return x
class Muon(torch.optim.Optimizer):
    def __init__(self, weights): super().__init__(weights, {"lr": 0.02})
    @torch.no_grad()
    def step(self):
        for weight in self.param_groups[0]["params"]:
            if isinstance(weight, DTensor):
                whole = orthogonal(weight.grad.full_tensor())
                own = distribute_tensor(whole, weight.device_mesh, weight.placements).to_local()
                weight.to_local().sub_(own, alpha=0.02)
            else:
                weight.sub_(orthogonal(weight.grad), alpha=0.02)
def optimizer(model, mesh): return Muon(model.parameters())
"""

GATHERED = """
BATCH_AXES = ("fsdp",)
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.rows = group, len(x)
        parts = [torch.empty_like(x) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)
    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        distributed.all_reduce(grad, group=ctx.group)
        first = distributed.get_rank(ctx.group) * ctx.rows
        return grad[first : first + ctx.rows], None
def own_in_all(x, group):
    parts = [torch.empty_like(x) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(parts, x.detach().contiguous(), group=group)
    parts[distributed.get_rank(group)] = x
    return torch.cat(parts)
class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(6, 8)
    def forward(self, x): return self.left(x), self.right(x)
def build(): return Pair()
def batch(): return torch.randn(8, 6)
def parallelize(model, mesh): fully_shard(model, mesh=mesh)
def loss(model, x):
    left, right = model(x)
    return functional.cross_entropy(left @ right.T, torch.arange(len(left)))
def step(model, x, mesh):
    left, right = model(x)
    labels = mesh.get_local_rank() * len(left) + torch.arange(len(left))
    value = functional.cross_entropy(left @ Gather.apply(right, mesh.get_group()).T, labels)
    value.backward()
    return value
"""

WIDTH = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 6)
    def forward(self, x):
        h = self.up(x).relu()
        h = h / 16
        return x + self.down(h)
def build(): return nn.Sequential(nn.Linear(6, 6), Block())
def batch(): return torch.randn(8, 6)
def parallelize(model, mesh):
    parallelize_module(model[1], mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
"""

CASES = (
    Bug(
        "a hidden layer divided by its local width",
        "tp=2",
        WIDTH,
        (("h / 16", "h / h.shape[-1]"),),
        ("wrong-scale",),
        ("divides by this rank's size of what tp splits", "case.py"),
        ("already the whole",),
        with_lines=True,
    ),
    Bug(
        "a hidden layer divided by the root of its local width",
        "tp=2",
        WIDTH,
        (("h / 16", "h / h.shape[-1] ** 0.5 / 4"),),
        ("wrong-scale",),
        ("divides by the root of this rank's size of what tp splits", "case.py"),
        ("averages", "the number of ranks"),
        with_lines=True,
    ),
    Bug(
        "rows of other ranks that get no gradient",
        "fsdp=2",
        GATHERED,
        (("Gather.apply(right", "own_in_all(right"),),
        ("wrong-value",),
        ("all_gather in case.py", "no backward"),
    ),
    Bug(
        "the last weight of ZeRO that nothing sends",
        "dp=2",
        ZERO,
        (("enumerate(self.weights)", "enumerate(self.weights[:-1])"),),
        ("write-not-applied",),
        ("sends this one", "broadcast"),
        ("before sharding",),
    ),
    Bug(
        "a float8 scale of each rank's part",
        "tp=2",
        EIGHT_BITS,
        (("model[2].mesh = mesh", "pass"),),
        ("wrong-value",),
        ("amax", "float8_e4m3fn"),
    ),
    Bug(
        "statistics of a rank's own rows",
        "dp=2",
        CENTERED,
        (("model[4].mesh = mesh", "pass"),),
        ("unreduced-output",),
        ("averages", "ReduceOp.AVG over dp"),
        ("wrong number",),
        with_lines=True,
    ),
    Bug(
        "a gradient sync that is never on in two micro-batches",
        "fsdp=2",
        SYNC,
        (("number == 1", "number == 2"),),
        ("unreduced-gradient",),
        ("set_requires_gradient_sync", "micro-batches"),
    ),
    Bug(
        "replicas that reduce the first micro-batch",
        "replicate=2,shard=2",
        REPLICAS,
        (("number == 1", "number == 0"),),
        ("wrong-value",),
        ("set_requires_all_reduce",),
        ("zero_grad",),
    ),
    Bug(
        "labels shifted after the cut beside a count of all",
        "cp=2",
        COUNTED,
        (("for one in (ids, shifted(ids)))", "for one in (ids, ids))\n    labels = shifted(part)"),),
        ("wrong-value",),
        ("shifts",),
        ("mean of their means",),
    ),
    Bug(
        "few singular values made alike on each rank's rows",
        "fsdp=2",
        ORTHOGONAL,
        (
            ("whole = orthogonal(weight.grad.full_tensor())", "own = orthogonal(weight.grad.to_local())"),
            ("                own = distribute_tensor(whole, weight.device_mesh, weight.placements).to_local()\n", ""),
        ),
        ("wrong-value",),
        ("whole matrix",),
        ("learning rate", "clipping"),
    ),
    Healthy(
        "a bias before a batch norm that Adam moves by noise",
        "dp=2",
        CENTERED.replace("SGD(model.parameters(), lr=0.1)", "Adam(model.parameters(), lr=0.1)"),
    ),
    Healthy(
        "a running mean of what is normalized already",
        "tp=2",
        """
def build():
    first = (nn.Linear(6, 8), nn.Linear(8, 6), nn.BatchNorm1d(6, affine=False), nn.BatchNorm1d(6))
    return nn.Sequential(*first, nn.Tanh(), nn.Linear(6, 4))
def batch(): return torch.randn(12, 6)
def parallelize(model, mesh): parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
def optimizer(model, mesh): return torch.optim.SGD(model.parameters(), lr=0.01)
""",
    ),
)
