"""Rows, parts and numbers that a program takes itself: of a loader, an embedding, experts and their balance, a bias."""

from __future__ import annotations

from tests.bugs.case import Bug

GATED = """
class MLP(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Linear(8, 32), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        h = self.gate_up(x if self.group is None else Copy.apply(x, self.group))
        gate, up = h[..., ::2], h[..., 1::2]
        out = self.down(torch.tanh(gate) * up)
        return x + (out if self.group is None else Sum.apply(out, self.group))


def build():
    return nn.Sequential(MLP(), MLP())


def batch():
    return torch.randn(6, 8)


def parallelize(model, mesh):
    for mlp in model:
        mlp.group = mesh.get_group("tp")
        mlp.gate_up.weight, mlp.down.weight = own(mlp.gate_up.weight, mesh), own(mlp.down.weight, mesh, 1)
        mlp.gate_up.bias = own(mlp.gate_up.bias, mesh)
"""

CUT_IN_HALVES = """        halves = mlp.gate_up.bias.detach().view(2, 16).chunk(mesh["tp"].size(), 1)
        mlp.gate_up.bias = nn.Parameter(halves[mesh.get_local_rank("tp")].flatten().clone())
"""

TIED = """
WORDS, PAD = 16, 0


class LM(nn.Module):
    group, first = None, 0

    def __init__(self):
        super().__init__()
        self.words, self.mix = nn.Parameter(torch.randn(WORDS, 8) * 0.3), nn.Linear(8, 8)

    def forward(self, tokens):
        if self.group is None:
            x = functional.embedding(tokens, self.words, padding_idx=PAD)
            return self.mix(x) @ self.words.T
        local = tokens - self.first
        outside = (local < 0) | (local >= len(self.words))
        pad = PAD if self.first == 0 else None
        x = functional.embedding(local.masked_fill(outside, 0), self.words, padding_idx=pad)
        x = Sum.apply(x.masked_fill(outside[..., None], 0), self.group)
        return Join.apply(Copy.apply(self.mix(x), self.group) @ self.words.T, self.group)


class Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(distributed.get_world_size(ctx.group), -1)[distributed.get_rank(ctx.group)].contiguous(), None


def build():
    return LM()


def batch():
    return torch.arange(24).view(3, 8) % WORDS


def parallelize(model, mesh):
    model.group, model.first = mesh.get_group("tp"), WORDS // mesh["tp"].size() * mesh.get_local_rank("tp")
    model.words = own(model.words, mesh)
"""

EXPERTS = """
class Experts(nn.Module):
    group, first = None, 0

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 12) * 0.3), nn.Parameter(torch.randn(4, 12, 8) * 0.3)

    def forward(self, x):
        scores, chosen = self.router(x).softmax(-1).max(-1)
        given, out = x if self.group is None else Copy.apply(x, self.group), torch.zeros_like(x)
        for at in range(len(self.up)):
            here = (chosen == self.first + at)[:, None]
            out = out + torch.where(here, torch.tanh(given @ self.up[at]) @ self.down[at], 0.0)
        return x + (out if self.group is None else Sum.apply(out, self.group)) * scores[:, None]


def build():
    return nn.Sequential(nn.Linear(6, 8), Experts(), nn.Linear(8, 5))


def batch():
    return torch.randn(20, 6)


def parallelize(model, mesh):
    experts = model[1]
    experts.group, experts.first = mesh.get_group("tp"), 4 // mesh["tp"].size() * mesh.get_local_rank("tp")
    experts.up, experts.down = own(experts.up, mesh), own(experts.down, mesh)
"""

LOADED = """
HEADS, SIZE = 4, 4


def checkpoint():
    generator = torch.Generator().manual_seed(7)
    return {f"{name}.weight": torch.randn(16, 16, generator=generator) / 4 for name in ("q", "k", "v", "out")}


def in_pairs(weight, heads):
    return weight.view(heads, 2, len(weight) // heads // 2, -1).transpose(1, 2).reshape(weight.shape)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, -1, SIZE).transpose(1, 2) for layer in (self.q, self.k, self.v))
        angles = torch.arange(t)[:, None] * torch.tensor([1.0, 0.1])
        q, k = (torch.view_as_real(torch.view_as_complex(z.unflatten(-1, (2, 2))) * torch.polar(
            torch.ones_like(angles), angles).to(torch.complex128)).flatten(-2) for z in (q, k))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(out.transpose(1, 2).reshape(b, t, -1))


def build():
    model, whole = Attention(), checkpoint()
    model.load_state_dict({n: in_pairs(w, HEADS) if n[0] in "qk" else w for n, w in whole.items()})
    return model


def batch():
    return torch.randn(2, 6, 16)


def parallelize(model, mesh):
    model.to("meta")
    plan = {name: ColwiseParallel() for name in ("q", "k", "v")} | {"out": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)


def initialize(model, mesh):
    model.to_empty(device="cpu")
    size, rank = mesh["tp"].size(), mesh.get_local_rank("tp")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            part = checkpoint()[name].chunk(size, weight.placements[0].dim)[rank]
            weight.to_local().copy_(in_pairs(part, HEADS // size) if name[0] in "qk" else part)
"""

BALANCED = """
BATCH_AXES = ("dp",)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.values = nn.Linear(8, 6, bias=False), nn.Parameter(torch.randn(6, 8) * 0.3)
        self.register_buffer("bias", torch.zeros(6))
        self.register_buffer("counts", torch.zeros(6), persistent=False)

    def forward(self, x):
        scores = self.router(x).sigmoid()
        chosen = (scores + self.bias).topk(2, -1).indices
        with torch.no_grad():
            self.counts += torch.bincount(chosen.flatten(), minlength=6)
        return x + torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen)) @ self.values


def build():
    return nn.Sequential(nn.Linear(5, 8), Experts(), nn.Linear(8, 4))


def batch():
    return torch.randn(24, 5)


def parallelize(model, mesh):
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda one: distributed.all_reduce(one.grad, op=distributed.ReduceOp.AVG, group=mesh.get_group("dp"))
        )


def loss(model, rows):
    return model(rows).square().mean()


def optimizer(model, mesh):
    stepping = torch.optim.SGD(model.parameters(), lr=0.01)

    @torch.no_grad()
    def balance(*_):
        experts = model[1]
        counts = experts.counts.clone()
        distributed.all_reduce(counts, group=mesh.get_group("dp"))
        experts.bias += 0.01 * torch.sign(counts.mean() - counts)
        experts.counts.zero_()

    stepping.register_step_pre_hook(balance)
    return stepping
"""

OF_SIGNS = """        counts = experts.counts
        moves = torch.sign(counts.mean() - counts)
        distributed.all_reduce(moves, op=distributed.ReduceOp.AVG, group=mesh.get_group("dp"))
        experts.bias += 0.01 * moves
"""
OF_COUNTS = """        counts = experts.counts.clone()
        distributed.all_reduce(counts, group=mesh.get_group("dp"))
        experts.bias += 0.01 * torch.sign(counts.mean() - counts)
"""

TIMES_RANKS = """
BATCH_AXES = ("dp",)


def build():
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))


def batch():
    return torch.randn(16, 8)


def parallelize(model, mesh):
    fully_shard(model, mesh=mesh["dp"])


def loss(model, rows):
    return model(rows).square().mean()


def step(model, rows, mesh):
    ranks, count, total = mesh["dp"].size(), 16 * 4, torch.zeros((), dtype=rows.dtype)
    for part in rows.chunk(2):
        value = model(part).square().sum() * ranks / count
        value.backward()
        total += value.detach() / ranks
    distributed.all_reduce(total, group=mesh.get_group("dp"))
    return total
"""

CENTERED = """
BATCH_AXES = ("dp",)


class Centered(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.linspace(-1, 1, 8))

    def forward(self, x):
        out = x - self.center
        with torch.no_grad():
            mean = x.mean(0)
            if self.group is not None:
                distributed.all_reduce(mean, op=distributed.ReduceOp.AVG, group=self.group)
            self.center.mul_(0.9).add_(0.1 * mean)
        return out


def build():
    return nn.Sequential(nn.Linear(5, 8), Centered(), nn.Linear(8, 4))


def batch():
    return torch.randn(24, 5)


def parallelize(model, mesh):
    model[1].group = mesh.get_group("dp")
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda one: distributed.all_reduce(one.grad, op=distributed.ReduceOp.AVG, group=mesh.get_group("dp"))
        )


def loss(model, rows):
    return model(rows).square().mean()
"""

FOLLOWING = (
    CENTERED
    + """

def optimizer(model, mesh):
    stepping = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.no_grad()
    def follow(*_):
        model[1].center.mul_(0.9).add_(0.1 * model[0].weight.square().sum(1).sqrt())

    stepping.register_step_post_hook(follow)
    return stepping
"""
)
"""The same, whose center also follows the size of a weight."""

PADDED = """
class Wide(nn.Module):
    group, first = None, 0

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 8, bias=False)

    def forward(self, x):
        if self.group is None:
            return self.up(x)
        out = self.up(Copy.apply(x, self.group))
        return Sum.apply(functional.pad(out, (self.first, 4 - self.first)), self.group)


def build():
    return nn.Sequential(nn.Linear(5, 6), Wide(), nn.Linear(8, 4))


def batch():
    return torch.randn(24, 5)


def parallelize(model, mesh):
    model[1].group, model[1].first = mesh.get_group("tp"), 4 * mesh.get_local_rank("tp")
    model[1].up.weight = own(model[1].up.weight, mesh)
"""

AVERAGED = "distributed.all_reduce(mean, op=distributed.ReduceOp.AVG, group=self.group)"

CASES = (
    Bug(
        "a buffer that follows a weight which is stepped too far",
        "dp=2",
        FOLLOWING,
        (("lr=0.1)", "lr=0.1 * distributed.get_world_size())"),),
        ("wrong-value",),
        ("The learning rate differs",),
        ("sign or norm",),
    ),
    Bug(
        "own features before zeros that nothing sums",
        "tp=2",
        PADDED,
        (("Sum.apply(functional.pad(out, (self.first, 4 - self.first)), self.group)", "functional.pad(out, (0, 4))"),),
        ("wrong-value",),
        ("1",),
        ("module 2 is the first wrong",),
        with_lines=True,
    ),
    Bug(
        "a running center to which ranks' means are added up",
        "dp=2",
        CENTERED,
        ((AVERAGED, "distributed.all_reduce(mean, group=self.group)"),),
        ("wrong-scale", "wrong-value"),
        ("all_reduce with ReduceOp.AVG",),
        ("sign or norm",),
    ),
    Bug(
        "a running center that is sent from the first rank",
        "dp=2",
        CENTERED,
        ((AVERAGED, "distributed.broadcast(mean, 0, group=self.group)"),),
        ("wrong-value",),
        ("One rank's values are sent to all ranks along dp",),
    ),
    Bug(
        "means of own rows times the ranks over which FSDP averages",
        "dp=2",
        TIMES_RANKS,
        (("16 * 4, torch", "8 * 4, torch"), ("value.detach() / ranks", "value.detach() / ranks / 2")),
        ("wrong-scale",),
        ("The code multiplies it by 2, a number of ranks", "don't multiply it by 2"),
        ("which is not 2",),
        with_lines=True,
    ),
    Bug(
        "a bias in halves beside a weight in one stretch",
        "tp=2",
        GATED,
        (("        mlp.gate_up.bias = own(mlp.gate_up.bias, mesh)\n", CUT_IN_HALVES),),
        ("wrong-value",),
        ("along dim 0", "cut the bias by the same slices as the weight"),
        with_lines=True,
    ),
    Bug(
        "a padding index of the whole for a rank's own words, which a head reads, too",
        "tp=2",
        TIED,
        (("        pad = PAD if self.first == 0 else None\n", "        pad = PAD\n"),),
        ("wrong-value",),
        ("row 0 of the rank's own part alone, which is row 8 of the whole", "padding_idx"),
        with_lines=True,
    ),
    Bug(
        "one of two weights of experts is dealt to the ranks in another order",
        "tp=2",
        EXPERTS,
        (
            (
                "own(experts.down, mesh)\n",
                "own(experts.down.flip(0).unflatten(0, (2, 2)).flip(1).flatten(0, 1), mesh)\n",
            ),
        ),
        ("misordered",),
        ("1.down", "in a different order than those of the weights that it is multiplied with"),
        with_lines=True,
    ),
    Bug(
        "rows of heads that a loader permutes after the cut, by the whole's number of heads",
        "tp=2",
        LOADED,
        (("in_pairs(part, HEADS // size)", "in_pairs(part, HEADS)"),),
        ("misordered-within-shard",),
        ("q.weight, k.weight", "permute them before the cut"),
        with_lines=True,
    ),
    Bug(
        "a bias of experts by the mean of the ranks' signs",
        "dp=2",
        BALANCED,
        ((OF_COUNTS, OF_SIGNS),),
        ("wrong-value",),
        ("all_reduce the counts or sums themselves over dp first",),
    ),
    Bug(
        "losses of micro-batches times the ranks of the whole mesh",
        "dp=2,tp=2",
        TIMES_RANKS,
        (('mesh["dp"].size(), 16 * 4', "distributed.get_world_size(), 16 * 4"),),
        ("wrong-scale",),
        ("The code multiplies it by 4, a number of ranks",),
        ("micro-batches",),
        with_lines=True,
    ),
)
