"""What is gathered, exchanged or cut on the way there, and does not come back, or meets the wrong part."""

from __future__ import annotations

from tests.bugs.case import Bug, Healthy
from tests.bugs.models import AVERAGED, DATA_PARALLEL, MLP

TOWERS = """
BATCH_AXES = ("dp",)


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(distributed.get_world_size())]
        distributed.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        distributed.all_reduce(grad)
        return grad.chunk(distributed.get_world_size())[distributed.get_rank()]


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(6, 5), nn.Linear(7, 5)

    def forward(self, image, text):
        return functional.normalize(self.image(image), dim=-1), functional.normalize(self.text(text), dim=-1)


def build():
    return Towers()


def batch():
    return torch.randn(12, 6), torch.randn(12, 7)


def loss(model, batch):
    image, text = model(*batch)
    return functional.cross_entropy(5 * image @ text.T, torch.arange(len(image)))


def step(model, batch, mesh):
    image, text = model(*batch)
    labels = torch.arange(len(image)) + mesh.get_local_rank("dp") * len(image)
    loss = functional.cross_entropy(5 * image @ Gather.apply(text).T, labels)
    loss.backward()
    loss = loss.detach().clone()
    for number in (loss, *(parameter.grad for parameter in model.parameters())):
        distributed.all_reduce(number)
        number /= distributed.get_world_size()
    return loss

"""

KEYS = (
    """
BATCH_AXES = {"cp": 1}


class Attention(nn.Module):
    mesh = None

    def __init__(self):
        super().__init__()
        self.query, self.both = nn.Linear(8, 8, bias=False), nn.Linear(8, 16, bias=False)

    def forward(self, x):
        query, both = self.query(x), self.both(x)
        if self.mesh is not None:
            both = DTensor.from_local(both, self.mesh, (Shard(1),), run_check=False)
            both = both.full_tensor(grad_placements=(Partial(),))
        return functional.scaled_dot_product_attention(query, *both.chunk(2, -1))


def build():
    return nn.Sequential(nn.Linear(8, 8), Attention())


def parallelize(model, mesh):
    model[1].mesh = mesh["cp"]


def batch():
    return torch.randn(2, 12, 8)

"""
    + AVERAGED
)

HEADS = """
class Attention(nn.Module):
    group, first = None, 0

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Parameter(torch.randn(8, 4, 16) / 4), nn.Parameter(torch.randn(2, 4, 16) / 4)
        self.o = nn.Parameter(torch.randn(16, 8, 4) / 4)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, 9.0))

    def forward(self, x):
        x = x if self.group is None else Copy.apply(x, self.group)
        q, k = (torch.einsum("btd,hed->bhte", x, weight) for weight in (self.q, self.k))
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        at = torch.arange(q.shape[2])
        distance = at[:, None] - at
        slopes = self.slopes[self.first : self.first + q.shape[1]].view(-1, 1, 1)
        bias = (-slopes * distance).masked_fill(distance < 0, float("-inf"))
        out = torch.einsum("bhte,dhe->btd", (q @ k.mT + bias).softmax(-1) @ k, self.o)
        return out if self.group is None else Sum.apply(out, self.group)


def build():
    return nn.Sequential(nn.Linear(16, 16), Attention())


def shared(mesh):
    return mesh.get_local_rank("tp") // 2


def parallelize(model, mesh):
    heads = model[1]
    heads.q, heads.o = own(heads.q, mesh), own(heads.o, mesh, 1)
    heads.k = nn.Parameter(heads.k.detach()[shared(mesh)][None].clone())
    heads.group, heads.first = mesh.get_group("tp"), mesh.get_local_rank("tp") * 2
    sharing = mesh.mesh.view(2, -1).tolist()
    heads.sharing, _ = distributed.new_subgroups_by_enumeration(sharing)


def step(model, rows, mesh):
    loss = model(rows).square().mean()
    loss.backward()
    distributed.all_reduce(model[1].k.grad, group=model[1].sharing)
    return loss.detach()


def batch():
    return torch.randn(2, 6, 16)

"""

EXPERTS = """
BATCH_AXES = ("ep",)


class Experts(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.router, self.scale = nn.Linear(8, 4, bias=False), nn.Parameter(torch.randn(4, 8))

    def forward(self, x):
        weight, expert = self.router(x).softmax(-1).max(-1)
        if self.group is None:
            return x * self.scale[expert] * weight[:, None]
        size, rank = distributed.get_world_size(self.group), distributed.get_rank(self.group)
        order = expert.argsort(stable=True)
        sent = (expert // len(self.scale)).bincount(minlength=size)
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent, group=self.group)
        to, of = sent.tolist(), received.tolist()
        numbers = expert.new_empty(sum(of))
        distributed.all_to_all_single(numbers, expert[order], of, to, group=self.group)
        there = Exchange.apply(x[order], of, to, self.group)
        done = there * self.scale[numbers - rank * len(self.scale)]
        back = Exchange.apply(done, to, of, self.group)
        return back[order.argsort()] * weight[:, None]


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, of, to, group):
        ctx.sizes = to, of, group
        result = x.new_empty(sum(of), x.shape[1])
        distributed.all_to_all_single(result, x.contiguous(), of, to, group=group)
        return result

    @staticmethod
    def backward(ctx, grad):
        return Exchange.forward(ctx, grad, *ctx.sizes), None, None, None


def build():
    return nn.Sequential(nn.Linear(8, 8), Experts())


def parallelize(model, mesh):
    rank, size = mesh.get_local_rank("ep"), mesh.size()
    model[1].scale = nn.Parameter(model[1].scale.detach().chunk(size)[rank].clone())
    model[1].group = mesh.get_group("ep")


def step(model, rows, mesh):
    loss = model(rows).square().mean()
    loss.backward()
    loss = loss.detach().clone()
    for number in (loss, *(parameter.grad for parameter in model.parameters())):
        if number is not model[1].scale.grad:
            distributed.all_reduce(number)
        number /= mesh.size()
    return loss


def batch():
    return torch.randn(20, 8)

"""

STRETCHES = (
    DATA_PARALLEL
    + """
class Stretches(torch.optim.Optimizer):
    def __init__(self, parameters, group):
        super().__init__(parameters, {"lr": 0.5})
        self.group, self.size, self.rank = group, distributed.get_world_size(group), distributed.get_rank(group)

    @torch.no_grad()
    def step(self):
        weights = self.param_groups[0]["params"]
        flat = torch.cat([weight.grad.flatten() for weight in weights])
        part = -(-len(flat) // self.size)
        own = functional.pad(flat, (0, part * self.size - len(flat)))[self.rank * part :][:part].clone()
        squares = own.square().sum()
        distributed.all_reduce(squares, group=self.group)
        own *= (0.1 / squares.sqrt()).clamp(max=1.0)
        parts = [torch.empty_like(own) for _ in range(self.size)]
        distributed.all_gather(parts, own, group=self.group)
        steps, at = torch.cat(parts), 0
        for weight in weights:
            weight.sub_(steps[at : at + weight.numel()].view_as(weight), alpha=0.5)
            at += weight.numel()


def build():
    model = MLP()
    model.down = nn.Linear(12, 5)
    return model


def optimizer(model, mesh):
    return Stretches(model.parameters(), mesh.get_group("dp"))

"""
)

VOLUMES = (
    '''
BATCH_AXES = {"rows": 2}


class Mean(torch.autograd.Function):
    """The mean over ranks, each of which uses it for its own rows."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, x = group, x.clone()
        distributed.all_reduce(x, group=group)
        return x / distributed.get_world_size(group)

    @staticmethod
    def backward(ctx, grad):
        return Mean.forward(ctx, grad, ctx.group), None


class Norm(nn.Module):
    group = None

    def mean(self, x):
        x = x.mean((2, 3, 4), keepdim=True)
        return x if self.group is None else Mean.apply(x, self.group)

    def forward(self, x):
        groups = x.unflatten(1, (2, 4))
        mean = self.mean(groups)
        spread = self.mean((groups - mean).square())
        return ((groups - mean) * torch.rsqrt(spread + 1e-5)).flatten(1, 2)


def build():
    return nn.Sequential(nn.Conv2d(3, 8, 1), Norm())


def parallelize(model, mesh):
    model[1].group = mesh.get_group("rows")


def batch():
    return torch.randn(2, 3, 12, 6)

'''
    + AVERAGED
)

TIED = """
BATCH_AXES = ("dp",)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


def build():
    return Tied()


def parallelize(model, mesh):
    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def batch():
    return torch.randint(20, (8, 4))

"""

LOGGED = (
    MLP
    + """
BATCH_AXES = ("dp",)


def parallelize(model, mesh):
    fully_shard(model, mesh=mesh["dp"])


def log(model, batch, loss):
    squares, count = torch.zeros(()), 0
    for weight in model.parameters():
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        squares = squares + local.detach().square().sum()
        count += weight.numel()
    if isinstance(weight, DTensor):
        distributed.all_reduce(squares)
    return {"rms": (squares / count).sqrt().item()}

"""
)

ZEROS = (
    """
BATCH_AXES = {"sp": 0}


class Positions(nn.Module):
    factor = 1.0

    def __init__(self):
        super().__init__()
        self.weight, self.table = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.randn(6))

    def forward(self, x):
        return self.factor * self.weight * x * self.table


def build():
    return nn.Sequential(Positions(), nn.Linear(6, 6))


def parallelize(model, mesh):
    model[0].factor = 1.0


def batch():
    return torch.randn(8, 6)

"""
    + AVERAGED
)

CASES = (
    Bug(
        "gathered texts whose gradients are not summed",
        "dp=3",
        TOWERS,
        (("        distributed.all_reduce(grad)\n", ""),),
        ("wrong-value",),
        ("gathers over dp", "reduce_scatter", "Gather.apply"),
        with_lines=True,
    ),
    Bug(
        "full_tensor of keys without grad_placements",
        "cp=2",
        KEYS,
        (("full_tensor(grad_placements=(Partial(),))", "full_tensor()"),),
        ("wrong-value",),
        ("gathers over cp", "grad_placements"),
        with_lines=True,
    ),
    Bug(
        "key heads dealt out to ranks by the remainder",
        "tp=4",
        HEADS,
        (('mesh.get_local_rank("tp") // 2', 'mesh.get_local_rank("tp") % 2'),),
        ("wrong-value",),
        ("1.k", "another rank's part", "remainder"),
        ("given another input",),
        with_lines=True,
    ),
    Bug(
        "slopes of the first heads in a bias with infinities",
        "tp=2",
        HEADS.replace(
            "    heads.k = nn.Parameter(heads.k.detach()[shared(mesh)][None].clone())",
            "    heads.k = own(heads.k, mesh)",
        ).replace("* 2\n", "* 4\n"),
        (("self.slopes[self.first : self.first + q.shape[1]]", "self.slopes[: q.shape[1]]"),),
        ("wrong-value",),
        ("slopes", "rank's own offset"),
        with_lines=True,
    ),
    Bug(
        "rows of experts put back by the order that sorted them",
        "ep=4",
        EXPERTS,
        (("back[order.argsort()]", "back[order]"),),
        ("wrong-value",),
        ("the same index that sorts them", "order.argsort()"),
        with_lines=True,
    ),
    Bug(
        "a padded stretch clipped by its own norm",
        "dp=2",
        STRETCHES,
        (("        distributed.all_reduce(squares, group=self.group)\n", ""),),
        ("wrong-value",),
        ("own.square().sum()", "Nothing sums"),
        ("parameter group",),
        with_lines=True,
    ),
    Bug(
        "a spread of groups about each rank's own mean",
        "rows=3",
        VOLUMES,
        (("(groups - mean).square()", "(groups - groups.mean((2, 3, 4), keepdim=True)).square()"),),
        ("unreduced-output", "wrong-value"),
        ("mean of its own part", "groups.mean"),
        ("wrong order",),
        with_lines=True,
    ),
    Bug(
        "a logged root mean square over a shard's count",
        "dp=3",
        LOGGED,
        (("count += weight.numel()", "count += local.numel()"),),
        ("unreduced-scalar", "wrong-value", "wrong-scale"),
        ("own elements", "numel()"),
    ),
    Bug(
        "a module with a weight of one number that returns zeros on one rank",
        "sp=2",
        ZEROS,
        (("model[0].factor = 1.0", "model[0].factor = float(mesh.get_local_rank())"),),
        ("wrong-value",),
        ("0 in every element",),
        with_lines=True,
    ),
    Healthy("tied weights under DDP", "dp=2", TIED),
    Healthy("gathered texts whose gradients are summed", "dp=2", TOWERS),
)
