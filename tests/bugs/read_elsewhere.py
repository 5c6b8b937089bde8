"""Numbers read where they don't belong: another call's mask, labels of the whole, scores without a way back."""

from __future__ import annotations

from tests.bugs.case import Bug, Healthy

VOCABULARY = """
class Words(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.up, self.head = nn.Linear(5, 8), nn.Linear(8, 12, bias=False)

    def forward(self, x, labels):
        h = torch.tanh(self.up(x))
        if self.group is None:
            return functional.cross_entropy(self.head(h), labels)
        logits = self.head(Copy.apply(h, self.group))
        first = distributed.get_rank(self.group) * logits.shape[-1]
        top = logits.detach().amax(-1)
        distributed.all_reduce(top, op=distributed.ReduceOp.MAX, group=self.group)
        logits = logits - top[:, None]
        total = Sum.apply(logits.exp().sum(-1), self.group)
        own = labels - first
        picked = picked_from(logits, labels, own, first)
        return (total.log() - Sum.apply(picked, self.group)).mean()


def picked_from(logits, labels, own, first):
    inside = (own >= 0) & (own < logits.shape[-1])
    return logits.gather(-1, own.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0] * inside


def build():
    return Words()


def parallelize(model, mesh):
    model.group = mesh.get_group("tp")
    model.head.weight = own(model.head.weight, mesh)


def batch():
    return torch.randn(8, 5), torch.arange(8) * 3 % 12


def loss(model, batch):
    return model(*batch)
"""

BY_REMAINDER = VOCABULARY.replace(
    "own.clamp(0, logits.shape[-1] - 1)[:, None]", "labels.remainder(logits.shape[-1])[:, None]"
)

PICKED_ROWS = (
    VOCABULARY.replace("self.head(Copy.apply(h, self.group))", "self.head(Copy.apply(h, self.group))[where]")
    .replace("cross_entropy(self.head(h), labels)", "cross_entropy(self.head(h)[where], labels)")
    .replace("def forward(self, x, labels)", "def forward(self, x, labels, where)")
    .replace("torch.arange(8) * 3 % 12", "torch.arange(5) * 5 % 12, torch.tensor([0, 2, 5, 7, 6])")
)

GATHERED_MAXIMA = VOCABULARY.replace(
    """        top = logits.detach().amax(-1)
        distributed.all_reduce(top, op=distributed.ReduceOp.MAX, group=self.group)
""",
    """        top = logits.amax(-1).clone()
        tops = [torch.empty_like(top) for _ in range(2)]
        distributed.all_gather(tops, top, group=self.group)
        top = torch.stack(tops).amax(0)
""",
).replace(
    "def picked_from",
    """class Flipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.flip(0)


def picked_from""",
)

EXPERTS = """
BATCH_AXES = {"ep": 0}


def exchanged(x, group):
    out = torch.empty_like(x)
    distributed.all_to_all_single(out, x.contiguous(), group=group)
    return out


class Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return exchanged(x, group)

    @staticmethod
    def backward(ctx, grad):
        return exchanged(grad, ctx.group), None


class Experts(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 1)
        self.experts = nn.ModuleDict({str(number): nn.Linear(6, 6, bias=False) for number in range(2)})

    def forward(self, x):
        score = torch.sigmoid(self.gate(x))
        if self.group is None:
            halves = [self.experts[str(at % 2)](part) for at, part in enumerate(x.chunk(4))]
            return x + score * torch.cat(halves)
        rows, scores = Swap.apply(x, self.group), Swap.apply(score, self.group)
        (expert,) = self.experts.values()
        return x + Swap.apply(expert(rows) * scores, self.group)


def build():
    return nn.Sequential(nn.Linear(4, 6), Experts())


def parallelize(model, mesh):
    model[1].group = mesh.get_group("ep")
    del model[1].experts[str(1 - mesh.get_local_rank("ep"))]


def batch():
    return torch.randn(8, 4)


def step(model, rows, mesh):
    loss = model(rows).square().mean()
    loss.backward()
    for name, weight in model.named_parameters():
        if "experts" in name:
            weight.grad /= 2
        elif weight.grad is not None:
            distributed.all_reduce(weight.grad, op=distributed.ReduceOp.AVG)
    return loss.detach()
"""

PIPELINE = """
AXES = STAGE_AXES = ("pp",)


class Attention(nn.Module):
    kept = None

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)

    def mask(self, lengths, size):
        if self.kept is None or NEW:
            self.kept = (torch.arange(size) < lengths[:, None])[:, None]
        return self.kept

    def forward(self, x, lengths):
        q, k, v = self.qkv(x).chunk(3, -1)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(lengths, x.shape[1]))
        return x + self.out(out)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Attention() for number in range(2)})

    def forward(self, x, lengths):
        for layer in self.layers.values():
            x = layer(x, lengths)
        return x


NEW = True


def build():
    return Model()


def parallelize(model, mesh):
    del model.layers[str(1 - mesh.get_local_rank())]


def stages(model, mesh):
    return {mesh.get_local_rank(): model}


def batch():
    return torch.randn(4, 5, 6), torch.tensor([5, 2, 3, 4]), torch.randn(4, 5, 6)


def loss(model, batch):
    x, lengths, wanted = batch
    return functional.mse_loss(model(x, lengths), wanted)


def step(model, batch, mesh):
    kept, total = [], batch[0].new_zeros(())
    for x, lengths, wanted in zip(*(each.chunk(2) for each in batch)):
        if mesh.get_local_rank() == 0:
            kept.append(model(x, lengths))
            distributed.send(kept[-1].detach(), 1)
        else:
            given = torch.empty_like(x)
            distributed.recv(given, 0)
            value = functional.mse_loss(model(given.requires_grad_(), lengths), wanted) / 2
            kept.append((given, value))
            total = total + value.detach()
    for one in kept:
        if mesh.get_local_rank() == 0:
            grad = torch.empty_like(one)
            distributed.recv(grad, 1)
            one.backward(grad)
        else:
            one[1].backward()
            distributed.send(one[0].grad, 0)
    distributed.broadcast(total, 1)
    return total
"""

NORMED = (
    PIPELINE[: PIPELINE.index("class Attention")]
    + """class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.mean = torch.zeros(8)

    def forward(self, x, lengths):
        h = self.up(x)
        self.mean = self.mean * 0.9 + h.detach().mean((0, 1)) * 0.1
        return x + self.down(torch.tanh(h / h.std(-1, keepdim=True)))


"""
    + PIPELINE[PIPELINE.index("class Model") :]
)

CASES = (
    Bug(
        "labels of the whole vocabulary pick in a rank's part",
        "tp=2",
        VOCABULARY,
        (("own = labels - first", "own = labels"),),
        ("wrong-value",),
        ("the place where the part begins is not taken from them", "gather", "times 6"),
        with_lines=True,
    ),
    Bug(
        "scores go to the experts by a collective without a backward",
        "ep=2",
        EXPERTS,
        (("Swap.apply(score, self.group)", "exchanged(score, self.group)"),),
        ("wrong-value",),
        ("all_to_all_single", "cuts the graph", "torch.autograd.Function"),
        never=("remove all_to_all_single",),
        with_lines=True,
    ),
    Bug(
        "a mask that is kept from the first micro-batch",
        "pp=2",
        PIPELINE,
        (("NEW = True", "NEW = False"),),
        ("wrong-value",),
        ("reads in call 2", "made in call 1", "in every call"),
        with_lines=True,
    ),
    Bug(
        "statistics of a micro-batch, beside a running mean",
        "pp=2",
        NORMED,
        (("h.std(-1, keepdim=True)", "h.std((0, 1))"),),
        ("wrong-value",),
        ("layers.0 goes wrong although its inputs are right",),
        ("earlier call",),
        with_lines=True,
    ),
    Bug(
        "logits of rows that are picked are changed",
        "tp=2",
        PICKED_ROWS,
        (("logits = logits - top[:, None]", "logits = torch.sin(logits) - top[:, None]"),),
        ("wrong-value",),
        ("returns a wrong result",),
        ("place where the part begins",),
        with_lines=True,
    ),
    Bug(
        "a function of the user's flips the gradient of logits, whose maxima are gathered",
        "tp=2",
        GATHERED_MAXIMA,
        (
            (
                "logits = self.head(Copy.apply(h, self.group))",
                "logits = Flipped.apply(self.head(Copy.apply(h, self.group)))",
            ),
        ),
        ("wrong-value",),
        ("gets a right gradient and sends back a wrong one",),
        ("cuts the graph",),
        with_lines=True,
    ),
    Healthy("labels that pick by their remainder, and are masked", "tp=2", BY_REMAINDER),
)
