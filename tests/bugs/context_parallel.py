"""Context parallel: tokens, positions, labels and keys that do not go together."""

from __future__ import annotations

from tests.bugs.case import Bug, Healthy

TOKENS = '''
TOKENS, NONE = 24, -100


class Attention(nn.Module):
    """One causal head over the whole sequence; ranks gather keys and values."""

    group = None

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 8)
        self.query = nn.Linear(8, 8, bias=False)
        self.value = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 10, bias=False)

    def forward(self, x, positions):
        x = x + self.embed(positions)
        query, value = self.query(x), self.value(x)
        keys, values, at = (self.gathered(part) for part in (x, value, positions))
        mask = at <= positions[:, None]
        return self.head(functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask))

    def gathered(self, part):
        if self.group is None:
            return part
        if not part.is_floating_point():
            parts = [torch.empty_like(part) for _ in range(distributed.get_world_size(self.group))]
            distributed.all_gather(parts, part, group=self.group)
            return torch.cat(parts)
        return Gather.apply(part, self.group)


class Gather(torch.autograd.Function):
    """All ranks' parts, one after the other; backward sums, and each rank takes its own."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        distributed.all_reduce(grad, group=ctx.group)
        return grad.chunk(distributed.get_world_size(ctx.group))[distributed.get_rank(ctx.group)], None


def build():
    return Attention()


def parallelize(model, mesh):
    model.group = mesh.get_group("cp")


def batch():
    labels = torch.randint(10, (TOKENS,))
    labels[:3] = NONE
    return torch.randn(TOKENS, 8), labels


def own_positions(mesh):
    """Return a chunk from the head and one from the tail."""
    rank, size = mesh.get_local_rank("cp"), mesh["cp"].size()
    chunks = torch.arange(TOKENS).chunk(2 * size)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))


def positions_of_tokens(mesh):
    return own_positions(mesh)


def positions_of_labels(mesh):
    return own_positions(mesh)


def loss(model, batch):
    rows, labels = batch
    return functional.cross_entropy(model(rows, torch.arange(TOKENS)), after(labels), ignore_index=NONE)


def after(labels):
    """Return for every position the label of the next, and none for the last."""
    return torch.cat((labels[1:], labels.new_full((1,), NONE)))


def labels_of(labels, mesh):
    """Shift the labels of the whole sequence, and take this rank's."""
    return after(labels)[positions_of_labels(mesh)]


def count_of(labels, mesh):
    count = (labels != NONE).sum()
    distributed.all_reduce(count, group=mesh.get_group("cp"))
    return count


def step(model, batch, mesh):
    """Divide by the number of labels of all ranks, and sum losses and gradients over cp."""
    rows, labels = batch
    labels = labels_of(labels, mesh)
    logits = model(rows[own_positions(mesh)], positions_of_tokens(mesh))
    total = functional.cross_entropy(logits, labels, ignore_index=NONE, reduction="sum")
    loss = total / count_of(labels, mesh)
    loss.backward()
    loss = loss.detach().clone()
    for number in (loss, *(parameter.grad for parameter in model.parameters())):
        distributed.all_reduce(number, group=mesh.get_group("cp"))
    return loss


def whole_output(part, mesh):
    """Put the tokens back in order."""
    parts = [torch.empty_like(part) for _ in range(mesh["cp"].size())]
    distributed.all_gather(parts, part.contiguous(), group=mesh.get_group("cp"))
    orders = [torch.empty_like(own_positions(mesh)) for _ in parts]
    distributed.all_gather(orders, own_positions(mesh), group=mesh.get_group("cp"))
    return torch.cat(parts)[torch.cat(orders).argsort()]

'''

SAID = (
    TOKENS
    + """
def sequence(mesh):
    return {"tokens": own_positions(mesh), "positions": positions_of_tokens(mesh), "labels": positions_of_labels(mesh)}

"""
)
OF_TOKENS = """def positions_of_tokens(mesh):
    return own_positions(mesh)
"""
RESTARTED = OF_TOKENS.replace("own_positions(mesh)", 'torch.arange(TOKENS // mesh["cp"].size())')
PLAIN = 'torch.arange(TOKENS).chunk(mesh["cp"].size())[mesh.get_local_rank("cp")]'

RESTORED = SAID.replace(
    "        mask = at <= positions[:, None]\n",
    "        if self.group is not None:\n"
    "            back = at.argsort()\n"
    "            keys, values, at = keys[back], values[back], at[back]\n"
    "        mask = at <= positions[:, None]\n",
)

ADAPTERS = """
class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(8, 8), nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return torch.tanh(self.base(x)) + self.up(self.down(x))


class Zigzag(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        rank, size = distributed.get_rank(group), distributed.get_world_size(group)
        ctx.group, parts = group, x.chunk(2 * size, 1)
        return torch.cat([parts[rank], parts[-1 - rank]], 1)

    @staticmethod
    def backward(ctx, grad):
        return grad * 1, None


class Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        size = distributed.get_world_size(group)
        ctx.group, every = group, [torch.empty_like(x) for _ in range(size)]
        distributed.all_gather(every, x.contiguous(), group=group)
        parts = [part.chunk(2, 1) for part in every]
        return torch.cat([first for first, _ in parts] + [last for _, last in reversed(parts)], 1)

    @staticmethod
    def backward(ctx, grad):
        return Zigzag.apply(grad, ctx.group), None


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1


class Model(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.first, self.second = Adapted(), Adapted()

    def forward(self, x):
        if self.group is None:
            return self.second(self.first(x))
        return Whole.apply(self.second(Scaled.apply(self.first(Zigzag.apply(x, self.group)))), self.group)


AXES = ("cp",)


def build():
    return Model()


def summed(grad):
    grad = grad.clone()
    distributed.all_reduce(grad)
    return grad


def parallelize(model, mesh):
    model.group = mesh.get_group("cp")
    for parameter in model.parameters():
        parameter.register_hook(summed)


def batch():
    return torch.randn(2, 8, 8)
"""
"""Outputs of zeros, which are right in any order, and whose gradients are in the order of the rows."""

CASES = (
    Bug(
        "a factor on the way back between adapters that begin with zeros, and rows in a zigzag",
        "cp=2",
        ADAPTERS,
        (("        return grad * 1\n", "        return grad * 1.5\n"),),
        ("wrong-scale",),
        ("3/2",),
        ("different order", "position 2"),
        with_lines=True,
    ),
    *(
        Bug(
            f"{moved} that stay in the order in which they were gathered",
            "cp=2",
            RESTORED,
            ((f"{moved}[back]", moved),),
            ("wrong-value",),
            (f"gets the {moved} in another order", f"put {moved} into the order of the others"),
            never=("puts the right slices in the wrong order",),
            with_lines=True,
        )
        for moved in ("values", "keys")
    ),
    Bug(
        "a mask that counts keys in the order in which they were gathered",
        "cp=2",
        SAID,
        (("mask = at <= positions[:, None]", "mask = torch.arange(len(at)) <= positions[:, None]"),),
        ("wrong-value",),
        ("keys 0-5, 18-23, 6-17 of the whole", "takes them as 0-23", "positions in the same way as the keys"),
        with_lines=True,
    ),
    Bug(
        "a mask that counts a rank's queries from 0",
        "cp=2",
        SAID,
        (("mask = at <= positions[:, None]", "mask = at <= torch.arange(len(positions))[:, None]"),),
        ("wrong-value",),
        ("queries 0-5, 18-23 of the whole", "takes them as 0-11"),
        with_lines=True,
    ),
    Bug(
        "positions that start again on every rank",
        "cp=2",
        SAID,
        ((OF_TOKENS, RESTARTED),),
        ("sequence-order",),
        ("positions", "from 0"),
    ),
    Bug(
        "positions that start again, of which nothing is said",
        "cp=2",
        TOKENS,
        ((OF_TOKENS, RESTARTED),),
        ("sequence-order", "wrong-value"),
        ("position|embed", "start|order|sequence"),
    ),
    Bug(
        "positions in plain order beside tokens in head-tail order",
        "cp=2",
        SAID,
        ((OF_TOKENS, OF_TOKENS.replace("own_positions(mesh)", PLAIN)),),
        ("sequence-order",),
        ("positions", "head"),
    ),
    Bug(
        "labels in plain order beside tokens in head-tail order",
        "cp=2",
        SAID,
        (
            (
                "def positions_of_labels(mesh):\n    return own_positions(mesh)",
                f"def positions_of_labels(mesh):\n    return {PLAIN}",
            ),
        ),
        ("sequence-order",),
        ("labels", "head"),
    ),
    Bug(
        "labels in plain order, of which nothing is said",
        "cp=2",
        TOKENS,
        (
            (
                "def positions_of_labels(mesh):\n    return own_positions(mesh)",
                f"def positions_of_labels(mesh):\n    return {PLAIN}",
            ),
        ),
        ("sequence-order", "wrong-value"),
        ("label", "order"),
    ),
    Bug(
        "labels shifted after they were cut",
        "cp=2",
        TOKENS,
        (("return after(labels)[positions_of_labels(mesh)]", "return after(labels[positions_of_labels(mesh)])"),),
        ("sequence-order", "wrong-value"),
        ("label", "shift"),
    ),
    Bug(
        "positions off by one",
        "cp=2",
        SAID,
        ((OF_TOKENS, OF_TOKENS.replace("own_positions(mesh)", "(own_positions(mesh) + 1).clamp(max=TOKENS - 1)")),),
        ("sequence-order",),
        ("positions", "offset|off by|by 1|by one"),
        ("Context parallel reorders its buffers",),
    ),
    Bug(
        "keys that were not gathered",
        "cp=2",
        TOKENS,
        (("        if self.group is None:\n            return part\n", "        return part\n"),),
        ("wrong-value", "unreduced-output"),
        ("gather|keys|other ranks|each rank's own",),
    ),
    Bug(
        "losses divided by each rank's own count of labels",
        "cp=2",
        TOKENS,
        (('    distributed.all_reduce(count, group=mesh.get_group("cp"))\n', "    count = count * 2\n"),),
        ("wrong-value", "wrong-scale"),
        ("mean|means", "unequal|count"),
    ),
    Bug(
        "losses and gradients averaged over cp",
        "cp=2",
        TOKENS,
        (("    return loss\n\n\ndef whole_output", "        number /= 2\n    return loss\n\n\ndef whole_output"),),
        ("wrong-scale",),
        ("1/2", "cp"),
    ),
    Bug(
        "gradients not summed over cp",
        "cp=2",
        TOKENS,
        (("(loss, *(parameter.grad for parameter in model.parameters()))", "(loss,)"),),
        ("unreduced-gradient",),
        ("cp", "SUM"),
    ),
    Bug(
        "gradients of gathered keys not summed",
        "cp=2",
        TOKENS,
        (
            (
                "        distributed.all_reduce(grad, group=ctx.group)\n        return grad.chunk",
                "        return grad.chunk",
            ),
        ),
        ("wrong-value", "unreduced-gradient"),
        ("backward|gather", "value|query|embed"),
    ),
    Healthy("positions and labels in head-tail order", "cp=2", SAID),
)
