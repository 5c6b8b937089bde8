"""Vocabularies in shards: logits that stay in parts, paddings, ties, words of other shards."""

from __future__ import annotations

from tests.bugs.case import Bug

EMBEDDED = """
WORDS = 16


class Net(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        if self.group is None:
            return self.head(torch.tanh(self.body(self.embed(ids))))
        per = self.embed.weight.shape[0]
        local = ids - distributed.get_rank(self.group) * per
        outside = (local < 0) | (local >= per)
        h = self.embed(local.masked_fill(outside, 0)).masked_fill(outside[..., None], 0.0)
        h = torch.tanh(self.body(Sum.apply(h, self.group)))
        return self.head(Copy.apply(h, self.group))


def build():
    return Net()


def parallelize(model, mesh):
    rank, size = mesh["tp"].get_local_rank(), mesh["tp"].size()
    part = nn.Parameter(model.embed.weight.detach().chunk(size)[rank].clone())
    model.embed.weight = model.head.weight = part
    model.group = mesh.get_group("tp")


def batch():
    return torch.randint(WORDS, (3, 7)), torch.randint(WORDS, (3, 7))


def loss(model, batch):
    ids, targets = batch
    logits = model(ids)
    if model.group is None:
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    per = logits.shape[-1]
    largest = logits.detach().amax(-1, keepdim=True)
    distributed.all_reduce(largest, op=distributed.ReduceOp.MAX, group=model.group)
    shifted = logits - largest
    total = Sum.apply(shifted.exp().sum(-1), model.group)
    local = targets - distributed.get_rank(model.group) * per
    outside = (local < 0) | (local >= per)
    picked = shifted.gather(-1, local.masked_fill(outside, 0)[..., None])[..., 0].masked_fill(outside, 0.0)
    return (total.log() - Sum.apply(picked, model.group)).mean()

"""

OWN_LOSS = (
    EMBEDDED[: EMBEDDED.index("    per = logits.shape[-1]\n")]
    + """    return CrossEntropy.apply(logits.flatten(0, 1), targets.flatten(), model.group)


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, group):
        peak = logits.amax(-1, keepdim=True)
        distributed.all_reduce(peak, op=distributed.ReduceOp.MAX, group=group)
        powers = (logits - peak).exp()
        total = powers.sum(-1, keepdim=True)
        distributed.all_reduce(total, group=group)
        local = targets - distributed.get_rank(group) * logits.shape[-1]
        outside = (local < 0) | (local >= logits.shape[-1])
        local = local.masked_fill(outside, 0)[:, None]
        picked = (logits - peak).gather(-1, local)[:, 0].masked_fill(outside, 0.0)
        distributed.all_reduce(picked, group=group)
        ctx.save_for_backward(powers / total, local, outside)
        return (total.log()[:, 0] - picked).mean()

    @staticmethod
    def backward(ctx, grad):
        softmax, local, outside = ctx.saved_tensors
        softmax = softmax.scatter_add(-1, local, outside[:, None].to(softmax) - 1.0)
        return softmax * grad / len(softmax), None, None

"""
)

MASKED = (
    EMBEDDED.replace("WORDS = 16", "WORDS = 13")
    .replace(
        "    part = nn.Parameter(model.embed.weight.detach().chunk",
        "    whole = functional.pad(model.embed.weight.detach(), (0, 0, 0, -WORDS % size))\n"
        "    part = nn.Parameter(whole.chunk",
    )
    .replace(
        "    per = logits.shape[-1]\n",
        "    per = logits.shape[-1]\n"
        "    real = torch.arange(per) + distributed.get_rank(model.group) * per < WORDS\n"
        "    logits = logits.masked_fill(~real, -1e30)\n",
    )
)

GATHERED = """
WORDS = 13


class Net(nn.Module):
    group, words = None, WORDS

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS, bias=False)

    def forward(self, ids):
        if self.group is None:
            return self.head(torch.tanh(self.body(self.embed(ids))))
        rank, size = distributed.get_rank(self.group), distributed.get_world_size(self.group)
        per = self.embed.weight.shape[0]
        local = ids - rank * per
        own = (local >= 0) & (local < per)
        h = self.embed(local.clamp(0, per - 1)) * own[:, None]
        h = Sum.apply(h, self.group)
        logits = self.head(Copy.apply(torch.tanh(self.body(h)), self.group))
        return All.apply(logits, self.group)[:, :WORDS]


class All(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, grad):
        size, rank = distributed.get_world_size(ctx.group), distributed.get_rank(ctx.group)
        return grad.chunk(size, -1)[rank], None


def build():
    return Net()


def padded(weight, rank, size):
    rows = -(-WORDS // size) * size
    whole = torch.cat([weight.detach(), weight.new_zeros(rows - WORDS, weight.shape[1])])
    return nn.Parameter(whole.chunk(size)[rank].clone())


def parallelize(model, mesh):
    rank, size = mesh["tp"].get_local_rank(), mesh["tp"].size()
    model.embed.weight = padded(model.embed.weight, rank, size)
    model.head.weight = padded(model.head.weight, rank, size)
    model.group = mesh.get_group("tp")


def batch():
    return torch.randint(WORDS, (20,)), torch.randint(WORDS, (20,))


def loss(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])

"""

LABELLED = """
WORDS = 13


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS, bias=False)

    def forward(self, ids):
        return self.head(torch.tanh(self.body(self.embed(ids))))[..., :WORDS]


def build():
    return Net()


def pad(weight, size):
    return nn.Parameter(functional.pad(weight.detach(), (0, 0, 0, -WORDS % size)))


def parallelize(model, mesh):
    size = mesh["tp"].size()
    model.embed.weight = pad(model.embed.weight, size)
    model.head.weight = pad(model.head.weight, size)
    model.embed.num_embeddings = model.head.out_features = len(model.embed.weight)
    parallelize_module(model, mesh["tp"], {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    })


def batch():
    return torch.randint(WORDS, (20,)), torch.randint(WORDS, (20,))


def loss(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])

"""

PADDED_INDEX = """
WORDS = 24


class Embedding(nn.Module):
    def __init__(self, weight, mesh):
        super().__init__()
        self.group, rank = mesh.get_group(), mesh.get_local_rank()
        self.begin = rank * WORDS // mesh.size()
        self.weight = nn.Parameter(weight.chunk(mesh.size())[rank].clone())

    def forward(self, ids):
        local = ids - self.begin
        outside = (local < 0) | (local >= len(self.weight))
        padding = 0 if self.begin == 0 else None
        h = functional.embedding(local.masked_fill(outside, 1), self.weight, padding_idx=padding)
        return Sum.apply(h.masked_fill(outside[..., None], 0.0), self.group)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8, padding_idx=0)
        self.head = nn.Linear(8, 4)

    def forward(self, ids):
        return self.head(torch.tanh(self.embed(ids)))


def build():
    return Net()


def parallelize(model, mesh):
    model.embed = Embedding(model.embed.weight.detach(), mesh)


def batch():
    return torch.arange(48).view(4, 12) % WORDS

"""

IN_MODEL = """
WORDS, PADDED = 13, 16


class Net(nn.Module):
    group, first = None, 0

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, PADDED, bias=False)

    def forward(self, x, labels):
        x = torch.tanh(self.body(x))
        if self.group is None:
            return functional.cross_entropy(self.head(x)[:, :WORDS], labels, reduction="none")
        logits = self.head(Copy.apply(x, self.group))
        words = torch.arange(self.first, self.first + logits.shape[-1])
        logits = logits.masked_fill(words >= WORDS, -1e9)
        largest = logits.detach().amax(-1)
        distributed.all_reduce(largest, op=distributed.ReduceOp.MAX, group=self.group)
        total = Sum.apply((logits - largest[:, None]).exp().sum(-1), self.group)
        chosen = Sum.apply(logits.masked_fill(words != labels[:, None], 0.0).sum(-1), self.group)
        return total.log() + largest - chosen


def build():
    return Net()


def parallelize(model, mesh):
    model.head.weight = own(model.head.weight, mesh)
    model.group, model.first = mesh.get_group("tp"), mesh.get_local_rank("tp") * (PADDED // mesh["tp"].size())


def batch():
    return torch.randn(12, 8), torch.randint(WORDS, (12,))


def loss(model, batch):
    return model(*batch).mean()

"""
BY_POWERS = IN_MODEL.replace(
    "total = Sum.apply((logits - largest[:, None]).exp().sum(-1), self.group)",
    "total = Sum.apply((torch.logsumexp(logits, -1) - largest).exp(), self.group)",
)
AFTERWARDS = (
    IN_MODEL.replace("self.head = nn.Linear(8, PADDED, bias=False)", "self.head = nn.Linear(8, WORDS, bias=False)")
    .replace("self.head(x)[:, :WORDS], labels", "self.head(x), labels")
    .replace("logits = self.head(Copy.apply(x, self.group))", "logits = Copy.apply(x, self.group) @ self.head.weight.T")
    .replace(
        "model.head.weight = own(model.head.weight, mesh)",
        "whole = functional.pad(model.head.weight.detach(), (0, 0, 0, PADDED - WORDS))\n"
        "    model.head.weight = own(nn.Parameter(whole), mesh)",
    )
)

CASES = (
    *(
        Bug(
            f"padding that a model's own loss counts in {what}",
            mesh,
            program,
            (("        logits = logits.masked_fill(words >= WORDS, -1e9)\n", ""),),
            ("wrong-value",),
            ("elements 13 to 15", "counts the padding"),
            never=("sizes, offsets and indices",),
            with_lines=True,
        )
        for what, mesh, program in (
            ("a sum", "tp=4", IN_MODEL),
            ("a logarithm of powers", "tp=2", BY_POWERS),
            ("a sum, and sharding adds", "tp=2", AFTERWARDS),
        )
    ),
    Bug(
        "padding_idx counted in each rank's own rows",
        "tp=2",
        PADDED_INDEX,
        (("0 if self.begin == 0 else None", "0"),),
        ("wrong-value",),
        ("embed.weight", "slice 12", "zero on rank 1", "padding_idx"),
        never=("same part", "get_local_rank"),
    ),
    Bug(
        "rows of other ranks' words that are not masked",
        "tp=2",
        EMBEDDED,
        ((".masked_fill(outside[..., None], 0.0)", ""),),
        ("wrong-value",),
        ("embed", "doesn't have", "masked_fill"),
        with_lines=True,
    ),
    Bug(
        "a head cut apart from its embedding",
        "tp=2",
        EMBEDDED,
        (
            (
                "model.embed.weight = model.head.weight = part",
                "model.embed.weight, model.head.weight = part, nn.Parameter(part.detach().clone())",
            ),
        ),
        ("untied",),
        ("embed",),
    ),
    Bug(
        "a softmax with each rank's own maximum",
        "tp=2",
        EMBEDDED,
        (("    distributed.all_reduce(largest, op=distributed.ReduceOp.MAX, group=model.group)\n", ""),),
        ("wrong-value",),
        ("maximum|largest logit",),
        never=("label it",),
    ),
    *(
        Bug(
            f"padding that a softmax over shards counts{how}",
            "tp=2",
            program,
            (("    logits = logits.masked_fill(~real, -1e30)\n", ""),),
            ("wrong-value",),
            (f"padded from 13 to {length}", "counts the padding"),
            never=("label it", "mean of means"),
        )
        for how, program, length in (
            ("", MASKED, 14),
            (", to a multiple of 8", MASKED.replace("-WORDS % size", "-WORDS % 8"), 16),
        )
    ),
    Bug(
        "padding that is gathered with the words",
        "tp=2",
        GATHERED,
        (("[:, :WORDS]", ""),),
        ("wrong-value", "wrong-shape"),
        ("padded from 13 to 14", "cut"),
    ),
    Bug(
        "padding of a DTensor that is not cut off",
        "tp=2",
        LABELLED,
        (("[..., :WORDS]", ""),),
        ("wrong-value", "wrong-shape"),
        ("padded from 13 to 14", "cut"),
        never=("from_local",),
    ),
    Bug(
        "a softmax relative to the largest logit of each rank's own words",
        "tp=2",
        OWN_LOSS,
        (("        distributed.all_reduce(peak, op=distributed.ReduceOp.MAX, group=group)\n", ""),),
        ("wrong-value", "wrong-scalar"),
        ("largest logit of its own classes", "with ReduceOp.MAX"),
        never=("sum of its own",),
    ),
    Bug(
        "a softmax divided by the sum of each rank's own words in its backward",
        "tp=2",
        OWN_LOSS,
        (
            (
                "        ctx.save_for_backward(powers / total, local, outside)\n",
                "        ctx.save_for_backward(powers / powers.sum(-1, keepdim=True), local, outside)\n",
            ),
        ),
        ("wrong-value",),
        ("divided by the sum of its own classes' exponentials", "all_reduce each row's sum"),
        never=("largest logit",),
    ),
    Bug(
        "a backward that takes other ranks' labels for the first word",
        "tp=2",
        OWN_LOSS,
        (("outside[:, None].to(softmax) - 1.0", "-torch.ones_like(local).to(softmax)"),),
        ("wrong-value",),
        ("whose label another rank has", "does not mask labels"),
        never=("softmax is",),
    ),
)
