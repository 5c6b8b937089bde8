"""Arguments of modules that are no tensors of floating point: ids of documents, masks, positions, numbers and lists."""

from __future__ import annotations

from tests.bugs.case import Bug, Healthy

DOCUMENTS = '''
BATCH_AXES = {"cp": 1}


class Gather(torch.autograd.Function):
    """All ranks' parts of dim 1; backward sums over ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        distributed.all_reduce(grad, group=ctx.group)
        return grad.chunk(distributed.get_world_size(ctx.group), 1)[distributed.get_rank(ctx.group)], None


def gathered(x, group):
    return x if group is None else Gather.apply(x, group)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, documents, positions, window, lengths, group):
        query, key = self.query(x), gathered(self.key(x), group)
        first = 0 if group is None else distributed.get_rank(group) * x.shape[1]
        rows, columns = first + positions, torch.arange(key.shape[1])
        same = documents[:, :, None] == gathered(documents, group)[:, None, :]
        mask = same & (rows[:, None] >= columns) & (rows[:, None] - columns < window)
        scores = (query @ key.transpose(1, 2)).masked_fill(~mask, float("-inf")) / lengths[0]
        return self.out(scores.softmax(-1) @ key)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.group = None
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, tokens):
        documents = (tokens == 0).long().cumsum(1)
        if self.group is not None:
            documents = documents + before(documents[:, -1:], self.group)
        x, positions = self.embed(tokens), torch.arange(tokens.shape[1])
        for layer in self.layers:
            x = x + layer(x, documents, positions, 6, [2, tokens.shape[1]], self.group)
        return x


def before(counts, group):
    """The documents that begin on the ranks before."""
    parts = gathered(counts, group)
    return parts[:, : distributed.get_rank(group)].sum(1, keepdim=True)


def build():
    return Model()


def parallelize(model, mesh):
    model.group = mesh.get_group("cp")


def batch():
    tokens = torch.randint(1, 12, (2, 16))
    tokens[:, ::5] = 0
    return tokens


def loss(model, tokens):
    return model(tokens).square().mean()


def step(model, tokens, mesh):
    value = loss(model, tokens)
    value.backward()
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad, op=distributed.ReduceOp.AVG, group=mesh.get_group("cp"))
    return value.detach()

'''
COUNTED = "            documents = documents + before(documents[:, -1:], self.group)\n"
OFFSET = "first = 0 if group is None else distributed.get_rank(group) * x.shape[1]"
IN_BLOCKS = DOCUMENTS.replace("(Attention() for", "(Block() for").replace(
    "class Model(nn.Module):",
    """class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()

    def forward(self, x, docs, positions, window, lengths, group):
        return self.attn(x, docs, positions, window, lengths, group)


class Model(nn.Module):""",
)

STRETCHED = """
BATCH_AXES = {"cp": 1}


class Rotary(nn.Module):
    def forward(self, positions, length):
        base = 10.0 * max(1.0, length / 8) ** 1.5
        angles = positions[:, None] * base ** -(torch.arange(4) / 4)
        return angles.cos(), angles.sin()


class Model(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.into, self.rotary, self.out = nn.Linear(5, 8), Rotary(), nn.Linear(8, 3)

    def forward(self, x):
        h, size = self.into(x), 1 if self.group is None else distributed.get_world_size(self.group)
        first = 0 if self.group is None else distributed.get_rank(self.group) * x.shape[1]
        cos, sin = self.rotary(first + torch.arange(x.shape[1]), x.shape[1] * size)
        even, odd = h.chunk(2, -1)
        return self.out(torch.cat((even * cos - odd * sin, even * sin + odd * cos), -1).tanh())


def build():
    return Model()


def parallelize(model, mesh):
    model.group = mesh.get_group("cp")

    def average(weight):
        distributed.all_reduce(weight.grad, group=model.group)
        weight.grad /= mesh["cp"].size()

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(average)


def batch():
    return torch.randn(2, 16, 5)
"""
"""Angles that depend on the length of the whole sequence, of which each rank has a part."""

WINDOWS = """
AXES = STAGE_AXES = ("pp",)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8)

    def forward(self, x, window=None):
        q, k, v = self.qkv(x).chunk(3, -1)
        at = torch.arange(x.shape[1])
        mask = at[:, None] >= at
        if window is not None:
            mask = mask & (at[:, None] - at < window)
        return x + self.out(functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Layer() for number in range(6)})

    def forward(self, x):
        for number, layer in self.layers.items():
            x = layer(x, 3 if int(number) % 2 == EVEN else None)
        return x


EVEN = 0


def build():
    return Model()


def parallelize(model, mesh):
    for number in [number for number in model.layers if int(number) // 3 != mesh.get_local_rank()]:
        del model.layers[number]


def stages(model, mesh):
    return {mesh.get_local_rank(): model}


def batch():
    return torch.randn(4, 7, 8)


def step(model, x, mesh):
    if mesh.get_local_rank() == 0:
        output = model(x)
        distributed.send(output.detach(), 1)
        grad = torch.empty_like(output)
        distributed.recv(grad, 1)
        output.backward(grad)
        value = x.new_zeros(())
    else:
        given = torch.empty_like(x)
        distributed.recv(given, 0)
        value = model(given.requires_grad_()).square().mean()
        value.backward()
        distributed.send(given.grad, 0)
        value = value.detach()
    distributed.broadcast(value, 1)
    return value
"""
ENUMERATED = "number, layer in self.layers.items()", "number, layer in enumerate(self.layers.values())"

COUNTED = """
class Block(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6, bias=False)

    def forward(self, x, parts=None):
        if parts is None:
            return x + self.down(torch.tanh(self.up(x)))
        h = torch.tanh(self.up(Copy.apply(x, self.group)))
        return x + Sum.apply(self.down(h), self.group)


class Model(nn.Module):
    parts = None

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x):
        return self.second(self.first(x, self.parts), self.parts)


def build():
    return Model()


def parallelize(model, mesh):
    model.parts = mesh.size()
    for block in (model.first, model.second):
        block.group = mesh.get_group("tp")
        block.up.weight, block.up.bias = own(block.up.weight, mesh), own(block.up.bias, mesh)
        block.down.weight = own(block.down.weight, mesh, 1)


def batch():
    return torch.randn(5, 6)
"""
"""Modules that are given the number of ranks, and by it take the branch that reduces."""

CASES = (
    Bug(
        "documents counted from each rank's own first one",
        "cp=2",
        DOCUMENTS,
        ((COUNTED, "            pass\n"),),
        ("wrong-value",),
        ("documents", "ranks before have counted", "cumsum"),
        never=("gets the right inputs", "wrong order or scale"),
        with_lines=True,
    ),
    Bug(
        "documents that a block around the attention calls by another name",
        "cp=2",
        IN_BLOCKS,
        ((COUNTED, "            pass\n"),),
        ("wrong-value",),
        ("The `docs` that layers.0 is given", "ranks before have counted"),
        with_lines=True,
    ),
    Bug(
        "documents counted over three ranks, and only the rank before is added",
        "cp=4",
        DOCUMENTS,
        (
            (
                "parts[:, : distributed.get_rank(group)]",
                "parts[:, max(distributed.get_rank(group) - 1, 0) : distributed.get_rank(group)]",
            ),
        ),
        ("wrong-value",),
        ("documents",),
        never=("gets the right inputs", "wrong order or scale"),
        with_lines=True,
    ),
    Bug(
        "a mask from each rank's own first token beside positions that are each rank's own",
        "cp=2",
        DOCUMENTS,
        ((OFFSET, "first = 0"),),
        ("wrong-value",),
        ("positions|offset|mask|first|begin|start",),
        never=("given positions", "ranks before have counted"),
        with_lines=True,
    ),
    Bug(
        "a window of the rank's own part",
        "cp=2",
        DOCUMENTS,
        (("positions, 6, ", "positions, 6 if self.group is None else 3, "),),
        ("wrong-value",),
        ("window differs|argument 3|3.0 for 6|3 for 6",),
        never=("gets the right inputs", "wrong order or scale"),
        with_lines=True,
    ),
    Bug(
        "angles that are stretched for the length of a rank's own part",
        "cp=2",
        STRETCHED,
        (("x.shape[1] * size)", "x.shape[1])"),),
        ("wrong-value",),
        ("may be made of `length`", "pass the `length` of the whole"),
        with_lines=True,
    ),
    Bug(
        "angles of another base, where each rank is told the length of the whole",
        "cp=2",
        STRETCHED,
        (("base = 10.0 *", "base = (10.0 if positions[0] == 0 and len(positions) == 16 else 30.0) *"),),
        ("wrong-value",),
        ("rotary|rpow|argument",),
        never=("`length`",),
        with_lines=True,
    ),
    Bug(
        "a list with another number",
        "cp=2",
        DOCUMENTS,
        (
            (
                "[2, tokens.shape[1]]",
                "[2 if self.group is None else 2 + distributed.get_rank(self.group), tokens.shape[1]]",
            ),
        ),
        ("wrong-value",),
        ("lengths|3 for 2|argument",),
        never=("gets the right inputs", "wrong order or scale"),
        with_lines=True,
    ),
    Bug(
        "windows by the layer's number in its stage, where the whole model has none",
        "pp=2",
        WINDOWS,
        (ENUMERATED,),
        ("wrong-value",),
        ("`window` that layers.3 is given", "3 for none", "from the whole model"),
        ("keys", "positions", "gather"),
        with_lines=True,
    ),
    Bug(
        "no window by the layer's number in its stage, where the whole model has one",
        "pp=2",
        WINDOWS.replace("EVEN = 0", "EVEN = 1"),
        (ENUMERATED,),
        ("wrong-value",),
        ("`window` that layers.3 is given", "none for 3", "from the whole model"),
        ("keys", "positions", "gather"),
        with_lines=True,
    ),
    Bug(
        "no sum in modules that only ranks give the number of parts",
        "tp=2",
        COUNTED,
        (("Sum.apply(self.down(h), self.group)", "self.down(h)"),),
        ("unreduced-output",),
        ("one term of a sum over tp", "all_reduce the result of linear"),
        ("The `parts` that first is given", "from the whole model"),
        with_lines=True,
    ),
    Healthy("positions and lengths of each rank's own part", "cp=4", DOCUMENTS),
)
