"""Programs of `step_cases`: a loss, a training step and an optimizer, on their own and right."""

from __future__ import annotations

SHARDED = """
def build():
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 6))


def parallelize(model, mesh):
    fully_shard(model, mesh=mesh)

"""
"""A model that FSDP2 shards."""

REGRESSION = """
def build():
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 6))


def parallelize(model, mesh):
    pass


def batch():
    return torch.randn(8, 8), torch.randn(8, 6)


def loss(model, batch):
    x, target = batch
    return (model(x) - target).square().mean()
"""
"""A model that every rank has whole, and its loss."""

MASKED = (
    """
AXES = BATCH_AXES = ("fsdp",)

"""
    + SHARDED
    + """
def batch():
    keep = torch.rand(8, 5) > 0.4
    keep[:4] |= torch.rand(4, 5) > 0.3
    return torch.randn(8, 5, 8), torch.randn(8, 5, 6), keep.float()


def errors(model, batch):
    x, target, keep = batch
    return (model(x) - target).square().mean(-1) * keep


def loss(model, batch):
    return errors(model, batch).sum() / batch[2].sum()


def step(model, batch, mesh):
    count = batch[2].sum()
    dist.all_reduce(count, group=mesh.get_group("fsdp"))
    value = errors(model, batch).sum() / count
    value = value * mesh["fsdp"].size()
    value.backward()
    return value
"""
)

VOCABULARY = """
AXES = ("tp",)
WORDS = 24


class Speaker(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(16, 12), nn.Linear(12, WORDS, bias=False)

    def forward(self, x):
        return self.head(self.body(x).relu())


def build():
    return Speaker()


def parallelize(model, mesh):
    parallelize_module(model, mesh["tp"], {"head": ColwiseParallel(output_layouts=Shard(-1))})


def batch():
    return torch.randn(10, 16), torch.randint(WORDS, (10,))


def loss(model, batch):
    x, words = batch
    return F.cross_entropy(model(x), words)


def step(model, batch, mesh):
    x, words = batch
    group = mesh.get_group("tp")
    logits = model(x)
    size = logits.shape[-1]
    start = mesh.get_local_rank("tp") * size
    top = logits.detach().amax(-1, keepdim=True)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    logits = logits - top
    normal = Sum.apply(logits.exp().sum(-1), group).log()
    is_here = (words >= start) & (words < start + size)
    chosen = logits.gather(-1, (words - start).clamp(0, size - 1)[:, None])[:, 0]
    chosen = Sum.apply(chosen.masked_fill(~is_here, 0), group)
    value = (normal - chosen).mean()
    value.backward()
    return value
"""

DISTILLED = """
AXES = ("tp",)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(16, 12), nn.Linear(12, 32, bias=False)

    def forward(self, x):
        return self.head(self.body(x).relu())


def build():
    return Model()


def parallelize(model, mesh):
    parallelize_module(model, mesh["tp"], {"head": ColwiseParallel(output_layouts=Shard(-1))})


def batch():
    return torch.randn(10, 16), torch.randn(10, 32)


def distance(features, target, width):
    energy = (features - target).square().sum(-1)
    return energy.mean() / width


def loss(model, batch):
    x, target = batch
    features = model(x)
    return distance(features, target, features.shape[-1])


def step(model, batch, mesh):
    x, target = batch
    features = model(x)
    width = features.shape[-1]
    target = target.chunk(mesh["tp"].size(), -1)[mesh.get_local_rank("tp")]
    value = distance(features, target, width * mesh["tp"].size())
    value = Sum.apply(value, mesh.get_group("tp"))
    value.backward()
    return value
"""

TOWERS = """
AXES = BATCH_AXES = ("fsdp",)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(12, 16), nn.Linear(12, 16)

    def forward(self, a, b):
        return F.normalize(self.left(a), dim=-1), F.normalize(self.right(b), dim=-1)


def build():
    return Towers()


def parallelize(model, mesh):
    fully_shard(model, mesh=mesh)


def batch():
    a = torch.randn(12, 12)
    return a, a + 0.2 * torch.randn(12, 12)


def loss(model, batch):
    left, right = model(*batch)
    return F.cross_entropy(left @ right.T / 0.2, torch.arange(len(left)))


def step(model, batch, mesh):
    group = mesh.get_group("fsdp")
    left, right = model(*batch)
    everyone = Gather.apply(right, group)
    labels = torch.arange(len(left)) + dist.get_rank(group) * len(left)
    scores = left @ everyone.T / 0.2
    value = F.cross_entropy(scores, labels)
    value.backward()
    return value
"""

BY_HAND = (
    """
AXES = BATCH_AXES = ("dp",)
SCALE = 64.0

"""
    + REGRESSION
    + """

@torch.no_grad()
def unscale(model):
    for p in model.parameters():
        p.grad.div_(SCALE)


@torch.no_grad()
def average(model, group):
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad /= dist.get_world_size(group)


def step(model, batch, mesh):
    value = loss(model, batch)
    (value * SCALE).backward()
    average(model, mesh.get_group("dp"))
    unscale(model)
    return value
"""
)

MICRO = (
    """
AXES = BATCH_AXES = ("fsdp",)
MICRO = 2

"""
    + SHARDED
    + """
def batch():
    return torch.randn(8, 8), torch.randn(8, 6)


def loss(model, batch):
    x, target = batch
    return (model(x) - target).square().mean()


def step(model, batch, mesh):
    total = 0
    for x, target in zip(*(part.chunk(MICRO) for part in batch)):
        value = loss(model, (x, target)) / MICRO
        value.backward()
        total = total + value.detach()
    for p in model.parameters():
        p.grad.to_local().mul_(1.0)
    return total
"""
)

CLIPPED = (
    """
AXES = BATCH_AXES = ("fsdp",)
LIMIT = 0.05


class Clipped(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        total = 0
        for p in self.param_groups[0]["params"]:
            local = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            total = total + local.pow(2).sum()
        if isinstance(p.grad, DTensor):
            dist.all_reduce(total, group=p.device_mesh.get_group())
        norm = total.sqrt()
        for p in self.param_groups[0]["params"]:
            p.grad.mul_((LIMIT / norm).clamp(max=1))
        return super().step(closure)

"""
    + SHARDED
    + """
def batch():
    return torch.randn(8, 8)


def optimizer(model, mesh):
    return Clipped(model.parameters(), lr=0.5)
"""
)

TRUSTED = """
AXES = BATCH_AXES = ("fsdp",)


def local_of(x):
    return x.to_local() if isinstance(x, DTensor) else x


def norm_of(part, mesh):
    square = part.square().sum()
    if mesh is not None:
        dist.all_reduce(square, group=mesh.get_group())
    return square.sqrt()


class Lars(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                mesh = p.device_mesh if isinstance(p, DTensor) else None
                weight, grad = local_of(p), local_of(p.grad)
                trust = norm_of(weight, mesh) / norm_of(grad, mesh)
                weight.add_(grad * trust, alpha=-group["lr"])


def build():
    return nn.Sequential(nn.Linear(8, 24, bias=False), nn.Tanh(), nn.Linear(24, 6, bias=False))


def parallelize(model, mesh):
    fully_shard(model, mesh=mesh)


def batch():
    return torch.randn(8, 8)


def optimizer(model, mesh):
    return Lars(model.parameters(), lr=0.1)
"""

CENTERED = """
AXES = BATCH_AXES = ("fsdp",)


class Centered(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                grad, weight, mesh = p.grad, p, None
                if isinstance(p, DTensor):
                    grad, weight, mesh = grad.to_local(), p.to_local(), p.device_mesh
                center = grad.sum(0) / p.shape[0]
                if mesh is not None:
                    dist.all_reduce(center, group=mesh.get_group())
                update = (grad - center).tanh()
                weight.sub_(update, alpha=group["lr"])


def build():
    return nn.Sequential(nn.Linear(8, 24, bias=False), nn.Tanh(), nn.Linear(24, 6, bias=False))


def parallelize(model, mesh):
    fully_shard(model, mesh=mesh)


def batch():
    return torch.randn(8, 8)


def optimizer(model, mesh):
    return Centered(model.parameters(), lr=0.1)
"""

BUCKETS = (
    """
AXES = BATCH_AXES = ("dp",)

"""
    + REGRESSION
    + """

@torch.no_grad()
def reduce(grads, group):
    flat = torch._utils._flatten_dense_tensors(grads)
    dist.all_reduce(flat, group=group)
    for grad, part in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads)):
        grad.copy_(part / dist.get_world_size(group))


def step(model, batch, mesh):
    value = loss(model, batch)
    value.backward()
    pairs, waiting = mesh.get_group("dp"), []
    for p in model.parameters():
        waiting.append(p.grad)
        if len(waiting) == 3:
            reduce(waiting, pairs)
            waiting = []
    if waiting:
        reduce(waiting, pairs)
    return value
"""
)

TWO_AXES = (
    """
AXES = BATCH_AXES = ("replica", "dp")

"""
    + REGRESSION
    + """

def step(model, batch, mesh):
    value = loss(model, batch)
    value.backward()
    for p in model.parameters():
        for axis in AXES:
            dist.all_reduce(p.grad, group=mesh.get_group(axis))
        p.grad.div_(mesh.size())
    return value
"""
)

SCALED = """
AXES = ("tp",)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.mesh = nn.Parameter(torch.rand(12)), None

    def forward(self, x):
        if self.mesh is None:
            return x * self.scale
        x = DTensor.from_local(x, self.mesh, [Replicate()]).redistribute(placements=[Shard(0)]).to_local()
        x = x * self.scale.to_local(grad_placements=[Partial()])
        return DTensor.from_local(x, self.mesh, [Shard(0)]).full_tensor()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.scaled, self.last = nn.Linear(8, 12), Scaled(), nn.Linear(12, 6)

    def forward(self, x):
        return self.last(self.scaled(self.first(x)).tanh())


def build():
    return Model()


def parallelize(model, mesh):
    scaled = model.scaled
    scaled.mesh = mesh["tp"]
    scaled.scale = nn.Parameter(distribute_tensor(scaled.scale.detach(), mesh["tp"], [Replicate()]))


def batch():
    return torch.randn(8, 8)
"""
