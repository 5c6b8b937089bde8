"""Heads, slopes and positions of another rank, which meet the rank's own part in attention."""

from __future__ import annotations

from tests.bugs.case import Bug

HEADS = '''
SIZE, DIM, WORDS = 4, 16, 6


class Attention(nn.Module):
    """Eight heads of queries, two of keys and values, and a slope of each head for the distance."""

    group, rank, size = None, 0, 1

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(DIM, 8 * SIZE, bias=False)
        self.key, self.value = (nn.Linear(DIM, 2 * SIZE, bias=False) for _ in range(2))
        self.out = nn.Linear(8 * SIZE, DIM, bias=False)
        self.register_buffer("slopes", torch.rand(8))

    def shared_heads(self):
        if self.size < 2:
            return slice(0, 2)
        head = self.rank // (self.size // 2)
        return slice(head, head + 1)

    def own_slopes(self, number):
        first = self.rank * number
        return self.slopes[first : first + number]

    def forward(self, x):
        if self.group is not None:
            x = Copy.apply(x, self.group)
        query = self.query(x).view(WORDS, -1, SIZE).transpose(0, 1)
        key, value = (part(x).view(WORDS, 2, SIZE).transpose(0, 1) for part in (self.key, self.value))
        key, value = key[self.shared_heads()], value[self.shared_heads()]
        times = len(query) // len(key)
        key, value = key.repeat_interleave(times, 0), value.repeat_interleave(times, 0)
        distance = torch.arange(WORDS) - torch.arange(WORDS)[:, None]
        scores = query @ key.transpose(1, 2) / 2 + self.own_slopes(len(query))[:, None, None] * distance
        made = self.out((scores.softmax(-1) @ value).transpose(0, 1).reshape(WORDS, -1))
        return made if self.group is None else Sum.apply(made, self.group)


def build():
    return Attention()


def parallelize(model, mesh):
    model.query.weight = own(model.query.weight, mesh)
    model.out.weight = own(model.out.weight, mesh, 1)
    model.group, model.rank, model.size = mesh.get_group("tp"), mesh.get_local_rank("tp"), mesh["tp"].size()


def batch():
    return torch.randn(WORDS, DIM)


def step(model, batch, mesh):
    loss = model(batch).square().mean()
    loss.backward()
    for part in (model.key, model.value):
        distributed.all_reduce(part.weight.grad, group=mesh.get_group("tp"))
    return loss

'''

CHOSEN = """
DIM, SIZE, HEADS, KEYS = 16, 4, 8, 2


class Attention(nn.Module):
    group, first = None, 0

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(DIM, HEADS * SIZE, bias=False)
        self.key, self.value = (nn.Linear(DIM, KEYS * SIZE, bias=False) for _ in range(2))
        self.out = nn.Linear(HEADS * SIZE, DIM, bias=False)

    def forward(self, x):
        given = x if self.group is None else Copy.apply(x, self.group)
        query, key, value = (
            part(given).unflatten(-1, (-1, SIZE)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        number = query.shape[1]
        chosen = (torch.arange(number) + self.first * number) * KEYS // HEADS
        made = functional.scaled_dot_product_attention(query, key[:, chosen], value[:, chosen], is_causal=True)
        made = self.out(made.transpose(1, 2).flatten(2))
        return x + (made if self.group is None else Sum.apply(made, self.group))


def build():
    return nn.Sequential(nn.Linear(DIM, DIM), Attention())


def parallelize(model, mesh):
    attention = model[1]
    attention.query.weight = own(attention.query.weight, mesh)
    attention.out.weight = own(attention.out.weight, mesh, 1)
    attention.group, attention.first = mesh.get_group("tp"), mesh.get_local_rank("tp")


def batch():
    return torch.randn(2, 5, DIM)


def step(model, batch, mesh):
    loss = model(batch).square().mean()
    loss.backward()
    for part in (model[1].key, model[1].value):
        distributed.all_reduce(part.weight.grad, group=mesh.get_group("tp"))
    return loss

"""

ROTARY = """
DIM, WORDS = 16, 12


def gathered(part, mesh):
    return DTensor.from_local(part, mesh, (Shard(0),)).full_tensor(grad_placements=(Partial(),))


class Attention(nn.Module):
    mesh = None

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.register_buffer("angles", torch.rand(WORDS, DIM))

    def first(self, number):
        return 0 if self.mesh is None else self.mesh.get_local_rank() * number

    def turned(self, x, positions):
        return x * torch.cos(positions[:, None] * 0.3) + x.roll(1, -1) * self.own_angles(len(x))

    def own_angles(self, number):
        return self.angles[self.first(number) : self.first(number) + number]

    def forward(self, x, positions):
        query, key = self.turned(self.query(x), positions), self.turned(self.key(x), positions)
        value = self.value(x)
        if self.mesh is not None:
            key, value = gathered(key, self.mesh), gathered(value, self.mesh)
        return torch.softmax(query @ key.T, -1) @ value


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.out = Attention(), nn.Linear(DIM, 8, bias=False)

    def forward(self, x, positions=None):
        if positions is None:
            positions = torch.arange(len(x))
        return self.out(x + self.attention(x, positions))


def build():
    return Model()


def parallelize(model, mesh):
    model.attention.mesh = mesh["cp"]


def batch():
    return torch.randn(WORDS, DIM)


def step(model, batch, mesh):
    rank, size = mesh.get_local_rank("cp"), mesh["cp"].size()
    x = batch.chunk(size)[rank]
    loss = model(x, torch.arange(rank * len(x), rank * len(x) + len(x))).square().mean()
    loss.backward()
    whole = loss.detach().clone()
    for number in (whole, *(parameter.grad for parameter in model.parameters())):
        distributed.all_reduce(number, group=mesh.get_group("cp"))
        number.div_(size)
    return whole


def whole_output(part, mesh):
    return gathered(part, mesh["cp"])

"""

PEERS = """
BATCH_AXES = ("dp",)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.first(x))))


def build():
    return Model()


def parallelize(model, mesh):
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])


def batch():
    return torch.randn(16, 8)

"""


def _bug(name: str, program: str, edit: tuple[str, str], words: tuple[str, ...], mesh: str = "tp=4") -> Bug:
    never = ("sizes, offsets and indices", "joins the results of all_gather", "each rank's own keys")
    return Bug(name, mesh, program, (edit,), ("wrong-value",), words, never, with_lines=True)


LOCAL = "chosen = torch.arange(number) * KEYS // number"

CASES = (
    _bug(
        "rows of its own for each tensor-parallel rank",
        PEERS,
        ('BATCH_AXES = ("dp",)', 'BATCH_AXES = ("dp", "tp")'),
        ("Ranks along tp are given different rows", "features of up"),
        "dp=2,tp=2",
    ),
    _bug(
        "heads of keys by the remainder of the rank",
        HEADS,
        ("self.rank // (self.size // 2)", "self.rank % 2"),
        ("ranks 1-2 another rank's part", "shared_heads"),
    ),
    _bug(
        "the first head of keys on every rank",
        HEADS,
        ("self.rank // (self.size // 2)", "0"),
        ("first on all ranks", "shared_heads"),
    ),
    _bug(
        "slopes that begin at the first head on every rank",
        HEADS,
        ("first = self.rank * number", "first = 0"),
        ("first on all ranks", "slopes"),
    ),
    _bug(
        "slopes in the reverse order of ranks",
        HEADS,
        ("first = self.rank * number", "first = (self.size - 1 - self.rank) * number"),
        ("the rank's own part", "slopes"),
    ),
    _bug(
        "key heads chosen by the number of the query head on the rank",
        CHOSEN,
        ("chosen = (torch.arange(number) + self.first * number) * KEYS // HEADS", LOCAL),
        ("chosen = torch.arange", "counted from the rank's first", "add the rank's first number"),
    ),
    _bug(
        "key heads that each rank repeats to its own number of heads",
        CHOSEN,
        ("key[:, chosen], value[:, chosen], is", "*(x.repeat_interleave(number // KEYS, 1) for x in (key, value)), is"),
        ("all ranks take the same slices", "repeat_interleave"),
        "tp=2",
    ),
    _bug(
        "positions that a model counts itself",
        ROTARY,
        ("model(x, torch.arange(rank * len(x), rank * len(x) + len(x)))", "model(x)"),
        ("positions = torch.arange", "first on all ranks"),
        "cp=2",
    ),
    _bug(
        "angles of the first words on every rank",
        ROTARY,
        ("self.mesh.get_local_rank() * number", "0"),
        ("first on all ranks", "angles"),
        "cp=2",
    ),
)
