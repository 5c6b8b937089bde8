"""Buffers, which are neither sharded nor reduced: what ranks make of them by themselves."""

from __future__ import annotations

from tests.bugs.case import Bug, Healthy

TABLE = '''
class Encoded(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.randn(12, 8), persistent=True)

    def forward(self, x):
        return self.linear(x + self.table)


def build():
    return Encoded()


def batch():
    return torch.randn(4, 12, 8)


BATCH_AXES = ("fsdp",)


def parallelize(model, mesh):
    rank = mesh.get_local_rank("fsdp")
    fully_shard(model, mesh=mesh["fsdp"])
    finish(model, rank)


def finish(model, rank):
    """Buffers are what build() made them."""

'''

KEPT = '"""Buffers are what build() made them."""'

SLOPES = """
class Sloped(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 6))
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, 9.0))


def build():
    return Sloped()


def parallelize(model, mesh):
    rank, size = mesh.get_local_rank("tp"), mesh["tp"].size()
    model.weight = own(model.weight, mesh)
    model.slopes = model.slopes.chunk(size)[rank].clone()

"""

FREQUENCIES = '''
class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("inv_freq", self.frequencies(), persistent=False)

    def frequencies(self):
        return 10000.0 ** -(torch.arange(0, 8, 2) / 8)

    def forward(self, x):
        angles = torch.arange(12, dtype=x.dtype).outer(self.inv_freq.to(x.dtype))
        return self.linear(x) * torch.cat((angles.cos(), angles.sin()), -1)


def build():
    return Rotary()


def batch():
    return torch.randn(4, 12, 8)


BATCH_AXES = ("fsdp",)


def parallelize(model, mesh):
    """Materialise buffers that came from the meta device, and compute them again."""
    fully_shard(model, mesh=mesh["fsdp"])
    model.inv_freq = torch.zeros_like(model.inv_freq)
    model.inv_freq = model.frequencies().to(model.inv_freq.dtype)

'''

AMAX = '''
class Scaled(nn.Module):
    """Keep the largest number seen on all ranks of dp, as scales for float8 do."""

    group = None

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("amax", torch.ones(()))

    def forward(self, x):
        largest = x.detach().abs().amax()
        if self.group is not None:
            distributed.all_reduce(largest, op=distributed.ReduceOp.MAX, group=self.group)
        self.amax = self.amax * 0 + largest
        return self.linear(x)


def build():
    return Scaled()


def batch():
    return torch.randn(24, 8)


BATCH_AXES = ("dp",)


def parallelize(model, mesh):
    fully_shard(model, mesh=mesh["dp"])
    model.group = mesh.get_group("dp")


def optimizer(model, mesh):
    return torch.optim.SGD(model.parameters(), lr=0.1)

'''

NORMED = """
BATCH_AXES = ("dp",)


def build():
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 8))


def batch():
    return torch.randn(24, 8)


def parallelize(model, mesh):
    fully_shard(model, mesh=mesh["dp"])


def step(model, rows, mesh):
    loss = model(rows).square().mean()
    loss.backward()
    return loss.detach()

"""

AVERAGED = """
class Averaged(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        for name in ("up", "down"):
            self.register_buffer(f"average_{name}", getattr(self, name).weight.detach().clone())

    def forward(self, x):
        return self.down(self.up(x).relu())


def build():
    return Averaged()


def batch():
    return torch.randn(12, 8)


BATCH_AXES = ("fsdp",)


def parallelize(model, mesh):
    fully_shard(model, mesh=mesh["fsdp"])
    rank, size = mesh.get_local_rank("fsdp"), mesh["fsdp"].size()
    for name, of in (("up", model.up), ("down", model.down)):
        parts = of.weight.detach().full_tensor().chunk(size)
        average = DTensor.from_local(parts[rank].clone(), mesh["fsdp"], (Shard(0),))
        setattr(model, f"average_{name}", average)

"""

STEERED = """
BATCH_AXES = ("dp",)
class Steered(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("bias", torch.zeros(6))
        self.group = None
    def forward(self, x):
        out = self.linear(x) + self.bias
        with torch.no_grad():
            mean = out.mean(0)
            if self.group is not None:
                distributed.all_reduce(mean, group=self.group)
            self.bias += 0.01 * torch.sign(mean - mean.mean())
        return out
def build(): return Steered()
def batch(): return torch.randn(6, 6)
def parallelize(model, mesh):
    model.group = mesh.get_group("dp")
    fully_shard(model, mesh=mesh)
"""

AVERAGE_BY_HAND = """
class Model(nn.Module):
    group = None
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("average", self.weight.detach().clone() * 0.5)
    def forward(self, x):
        if self.group is None:
            return x @ self.weight.T
        rank, size = distributed.get_rank(self.group), self.group.size()
        return Sum.apply(Copy.apply(x, self.group).chunk(size, -1)[rank] @ self.weight.T, self.group)
def build(): return Model()
def parallelize(model, mesh):
    rank, size = mesh.get_local_rank(), mesh.size()
    model.group = mesh.get_group()
    model.weight.data = model.weight.data.chunk(size, 1)[rank].clone()
    model.average = model.average.chunk(size, 1)[rank].clone()
def batch(): return torch.randn(6, 8)
def optimizer(model, mesh):
    stepping = torch.optim.SGD(model.parameters(), lr=0.1)
    def average(*_):
        with torch.no_grad():
            model.average.lerp_(model.weight, 0.2)
    stepping.register_step_post_hook(average)
    return stepping
"""

AVERAGE_OF_COPIES = """
BATCH_AXES = ("dp",)
class Model(nn.Module):
    group = None
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        for name in ("up", "down"):
            self.register_buffer(f"{name}_average", torch.randn_like(getattr(self, name).weight))
    def forward(self, x): return self.down(torch.tanh(self.up(x)))
def build(): return Model()
def parallelize(model, mesh): model.group = mesh.get_group()
def batch(): return torch.randn(8, 6)
def step(model, x, mesh):
    loss = model(x).square().mean()
    loss.backward()
    loss = loss.detach().clone()
    for number in (loss, *(parameter.grad for parameter in model.parameters())):
        distributed.all_reduce(number)
        number /= mesh.size()
    return loss
def optimizer(model, mesh):
    stepping = torch.optim.SGD(model.parameters(), lr=0.5)
    is_alone, rank = model.group is None, mesh.get_local_rank()
    def average(*_):
        with torch.no_grad():
            model.up_average.lerp_(model.up.weight, 0.2)
            model.down_average.lerp_(model.down.weight, 0.2)
    stepping.register_step_post_hook(average)
    return stepping
"""

OWN_SLOPES = """
HEADS = 4


def slopes(heads):
    return torch.tensor([2.0 ** (-8.0 * (number + 1) / heads) for number in range(heads)])


class Attention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.heads = HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.register_buffer("slopes", slopes(HEADS), persistent=False)

    def forward(self, x):
        if self.group is not None:
            x = Copy.apply(x, self.group)
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        places = torch.arange(x.shape[1])
        distance = places - places.unsqueeze(1)
        bias = self.slopes[:, None, None] * distance
        bias = bias.masked_fill(distance > 0, float("-inf"))
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        y = self.out(y.transpose(1, 2).flatten(2))
        return y if self.group is None else Sum.apply(y, self.group)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.attention, self.head = nn.Linear(6, 16), Attention(), nn.Linear(16, 3)

    def forward(self, x):
        h = self.into(x)
        return self.head(h + self.attention(h))


def build():
    return Net()


def parallelize(model, mesh):
    attention, rank, size = model.attention, mesh["tp"].get_local_rank(), mesh["tp"].size()
    attention.group, attention.heads = mesh.get_group("tp"), HEADS // size
    for linear in (attention.q, attention.k, attention.v):
        linear.weight = nn.Parameter(linear.weight.detach().chunk(size)[rank].clone())
    attention.out.weight = nn.Parameter(attention.out.weight.detach().chunk(size, 1)[rank].clone())
    attention.slopes = slopes(HEADS).chunk(size)[rank].clone()


def batch():
    return torch.randn(4, 8, 6)
"""
"""Each head has a slope of its own, in a buffer that no checkpoint has; ranks make their parts of it again."""

SLOPES_MADE = "attention.slopes = slopes(HEADS).chunk(size)[rank].clone()"

EXPERT_IDS = """
EXPERTS = 4


class Experts(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, EXPERTS, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, *shape) * 0.2) for shape in ((8, 16), (16, 8)))
        self.norm = nn.BatchNorm1d(EXPERTS, affine=False)
        self.register_buffer("numbers", torch.arange(EXPERTS))
        self.register_buffer("counts", torch.zeros(EXPERTS), persistent=False)

    def forward(self, x):
        if self.group is not None:
            x = Copy.apply(x, self.group)
        top, chosen = self.gate(x).softmax(-1).max(-1)
        weights = functional.one_hot(chosen, EXPERTS)[:, self.numbers].to(x.dtype) * top[:, None]
        h = torch.einsum("td,edh->teh", x, self.up).relu() + self.counts[:, None]
        h = self.norm(h.transpose(1, 2).flatten(0, 1)).unflatten(0, (len(x), -1)).transpose(1, 2)
        y = torch.einsum("teh,ehd,te->td", h, self.down, weights)
        return y if self.group is None else Sum.apply(y, self.group)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.experts, self.head = nn.Linear(5, 8), Experts(), nn.Linear(8, 3)

    def forward(self, x):
        h = self.into(x)
        return self.head(h + self.experts(h))


def build():
    return Net()


def parallelize(model, mesh):
    experts, rank, size = model.experts, mesh["tp"].get_local_rank(), mesh["tp"].size()
    experts.group, here = mesh.get_group("tp"), EXPERTS // size
    experts.up, experts.down = (nn.Parameter(w.detach().chunk(size)[rank].clone()) for w in (experts.up, experts.down))
    experts.norm = nn.BatchNorm1d(here, affine=False, dtype=experts.up.dtype)
    experts.numbers, experts.counts = torch.arange(here) + rank * here, torch.zeros(here)

    def summed(gradient):
        gradient = gradient.clone()
        distributed.all_reduce(gradient, group=experts.group)
        return gradient

    experts.gate.weight.register_hook(summed)


def batch():
    return torch.randn(12, 5)
"""
"""Buffers and a module that each rank makes for its own experts: numbers, zeros, statistics."""

CASES = (
    Bug(
        "averages of weights with a decay of a rank's own",
        "dp=2",
        AVERAGE_OF_COPIES,
        (
            (
                "model.up_average.lerp_(model.up.weight, 0.2)",
                "model.up_average.lerp_(model.up.weight, 0.2 if is_alone else 0.2 * distributed.get_world_size())",
            ),
        ),
        ("wrong-value",),
        ("up_average", "keeps 0.6 of what it was", "in the unsharded model 0.8"),
    ),
    Bug(
        "averages of weights taken before the step",
        "dp=2",
        AVERAGE_OF_COPIES,
        (
            (
                "    stepping.register_step_post_hook(average)\n",
                "    (stepping.register_step_post_hook if is_alone else stepping.register_step_pre_hook)(average)\n",
            ),
        ),
        ("wrong-value",),
        ("up_average", "as it is before the optimizer's step", "in the unsharded model after it"),
    ),
    Bug(
        "averages of weights on the first rank only",
        "dp=2",
        AVERAGE_OF_COPIES,
        (("    def average(*_):\n", "    def average(*_):\n        if not is_alone and rank: return\n"),),
        ("wrong-value",),
        ("up_average", "on rank 1", "nothing updates the average"),
    ),
    Bug(
        "averages of weights updated on each rank's turn",
        "dp=2",
        AVERAGE_OF_COPIES,
        (
            (
                "    stepping.register_step_post_hook(average)\n",
                "    for _ in range(1 if is_alone else 2): stepping.register_step_post_hook(average)\n",
            ),
        ),
        ("wrong-value",),
        ("up_average", "is updated 2 times in a step"),
    ),
    Bug(
        "averages of weights whose gradients are not reduced",
        "dp=2",
        AVERAGE_OF_COPIES,
        (("        distributed.all_reduce(number)\n        number /= mesh.size()\n", "        pass\n"),),
        ("unreduced-gradient", "unreduced-scalar"),
        ("up.weight",),
        never=("average of",),
    ),
    Bug(
        "an average of a weight cut along another dim",
        "tp=2",
        AVERAGE_BY_HAND,
        (("model.average.chunk(size, 1)[rank].clone()", "model.average.chunk(size)[rank].reshape(8, -1).clone()"),),
        ("wrong-value",),
        ("average is cut differently from weight",),
    ),
    Bug(
        "an average of a weight that forgets more than it is told to",
        "tp=2",
        AVERAGE_BY_HAND,
        (("lerp_(model.weight, 0.2)", "lerp_(model.weight, 0.2 if model.group is None else 0.4)"),),
        ("wrong-value",),
        ("keeps 0.6 of what it was", "in the unsharded model 0.8"),
        never=("cut differently",),
    ),
    Bug(
        "averages of the weights loaded from the next rank's file",
        "fsdp=4",
        AVERAGED,
        (("parts[rank].clone()", "parts[(rank + 1) % size].clone()"),),
        ("misordered",),
        ("average_up", "get_local_rank"),
        ("mixed up the names",),
    ),
    Bug(
        "averages of the weights under each other's names",
        "fsdp=2",
        AVERAGED,
        (('("up", model.up), ("down", model.down)', '("up", model.down), ("down", model.up)'),),
        ("foreign",),
        ("average_up", "mixed up the names"),
    ),
    Bug(
        "a buffer of zeros on all ranks but the first",
        "fsdp=3",
        TABLE,
        ((KEPT, "if rank > 0:\n        model.table = torch.zeros_like(model.table)"),),
        ("unreplicated", "foreign", "missing", "write-not-applied"),
        ("table", "zero", "rank"),
        ("terms of a sum",),
    ),
    Bug(
        "a buffer of zeros on the last rank",
        "fsdp=3",
        TABLE.replace("persistent=True", "persistent=False"),
        ((KEPT, "if rank == 2:\n        model.table = torch.zeros_like(model.table)"),),
        ("unreplicated", "foreign", "missing", "write-not-applied"),
        ("table", "zero", "rank 2"),
        ("terms of a sum",),
    ),
    Bug(
        "a buffer of each rank's own dtype rounding",
        "fsdp=2",
        TABLE,
        ((KEPT, "if rank == 1:\n        model.table = model.table.bfloat16().to(model.table.dtype)"),),
        ("unreplicated", "wrong-value", "wrong-shape"),
        ("table", "rank 1|ranks"),
    ),
    Bug(
        "rows of a buffer exchanged on one rank",
        "fsdp=2",
        TABLE,
        ((KEPT, "if rank == 1:\n        model.table = model.table.flip(0)"),),
        ("misordered", "unreplicated", "misordered-within-shard"),
        ("table", "rank 1"),
    ),
    Bug(
        "slopes of the first heads on every rank",
        "tp=4",
        SLOPES,
        ((".chunk(size)[rank].clone()", ".chunk(size)[0].clone()"),),
        ("duplicated", "missing", "misordered"),
        ("tp", "slopes"),
    ),
    Bug(
        "a buffer left as to_empty made it",
        "fsdp=2",
        FREQUENCIES,
        (("    model.inv_freq = model.frequencies().to(model.inv_freq.dtype)\n", ""),),
        ("foreign", "missing", "write-not-applied"),
        ("inv_freq", "never|to_empty|not written"),
        ("padding",),
    ),
    Bug(
        "frequencies computed again from another base",
        "fsdp=2",
        FREQUENCIES,
        (("model.inv_freq = model.frequencies()", "model.inv_freq = (50.0 ** -(torch.arange(0, 8, 2) / 8))"),),
        ("wrong-value",),
        ("inv_freq is computed again after build", "0.1"),
    ),
    Bug(
        "a maximum of each rank's own",
        "dp=2",
        AMAX,
        (('model.group = mesh.get_group("dp")', "model.group = None"),),
        ("unreplicated", "wrong-value", "unreduced-scalar"),
        ("amax", "dp"),
    ),
    Bug(
        "a bias that each rank corrects by its own rows, and that forward reads",
        "dp=2",
        STEERED,
        (('model.group = mesh.get_group("dp")', "model.group = None"),),
        ("unreplicated",),
        ("forward reads this buffer", "over dp"),
    ),
    Bug(
        "a bias of each rank's own rows, under DDP that sends no buffers",
        "dp=2",
        STEERED.replace(
            "    fully_shard(model, mesh=mesh)",
            '    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp"), '
            "broadcast_buffers=False)",
        ),
        (('model.group = mesh.get_group("dp")', "model.group = None"),),
        ("unreplicated",),
        ("forward reads this buffer", "over dp"),
    ),
    Healthy(
        "a bias of each rank's own rows, under DDP that sends buffers before each forward",
        "dp=2",
        STEERED.replace(
            "    fully_shard(model, mesh=mesh)",
            '    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp"))',
        ).replace('model.group = mesh.get_group("dp")', "model.group = None"),
    ),
    Healthy(
        "a correction by a rank's own rows that forward only keeps",
        "dp=2",
        STEERED.replace("self.linear(x) + self.bias", "self.linear(x)").replace('mesh.get_group("dp")', "None"),
    ),
    Healthy("BatchNorm with a step of its own", "dp=2", NORMED),
    Healthy(
        "buffers of integers and flags",
        "fsdp=2",
        TABLE.replace(
            "persistent=True)",
            "persistent=True)\n"
            '        self.register_buffer("steps", torch.zeros((), dtype=torch.long))\n'
            '        self.register_buffer("causal", torch.ones(4, 4, dtype=torch.bool).tril(), persistent=False)',
        ),
    ),
    Bug(
        "slopes made for a rank's own heads, as if they were all",
        "tp=2",
        OWN_SLOPES,
        ((SLOPES_MADE, "attention.slopes = slopes(attention.heads)"),),
        ("wrong-value",),
        ("attention.slopes", "own sizes"),
        ("The tensors that",),
        with_lines=True,
    ),
    Bug(
        "slopes of the last heads on the first rank",
        "tp=2",
        OWN_SLOPES,
        ((SLOPES_MADE, "attention.slopes = slopes(HEADS).chunk(size)[size - 1 - rank].clone()"),),
        ("wrong-value",),
        ("slopes|another rank|different rank",),
        ("own sizes",),
        with_lines=True,
    ),
    Bug(
        "the slopes of the first heads on every rank",
        "tp=2",
        OWN_SLOPES,
        ((SLOPES_MADE, "attention.slopes = slopes(HEADS)[: attention.heads].clone()"),),
        ("wrong-value",),
        ("slopes",),
        with_lines=True,
    ),
    Healthy("a buffer that each rank of four makes for its own head", "tp=4", OWN_SLOPES),
    Healthy(
        "a buffer of which each rank keeps its part, cut from the one that was there",
        "tp=2",
        OWN_SLOPES.replace("slopes(HEADS).chunk(size)", "attention.slopes.chunk(size)"),
    ),
    Bug(
        "the numbers of the first experts on every rank",
        "tp=2",
        EXPERT_IDS,
        (("torch.arange(here) + rank * here", "torch.arange(here)"),),
        ("wrong-value",),
        ("experts.numbers",),
        with_lines=True,
    ),
    Healthy("numbers, zeros and statistics that each rank makes for its own experts", "tp=4", EXPERT_IDS),
)
