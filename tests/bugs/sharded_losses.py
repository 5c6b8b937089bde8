"""Losses over a vocabulary in shards, of several terms, and gradients reduced over two axes."""

from __future__ import annotations

from tests.bugs.case import Bug

SMOOTHED = """
WORDS = 12


class Net(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.head(h if self.group is None else Copy.apply(h, self.group))


def build():
    return Net()


def parallelize(model, mesh):
    rank, size = mesh["tp"].get_local_rank(), mesh["tp"].size()
    model.group = mesh.get_group("tp")
    model.head.weight = nn.Parameter(model.head.weight.detach().chunk(size)[rank].clone())
    model.head.bias = nn.Parameter(model.head.bias.detach().chunk(size)[rank].clone())


def batch():
    return torch.randn(16, 8), torch.randint(WORDS, (16,))


def loss(model, batch):
    x, y = batch
    logits = model(x)
    if model.group is None:
        return functional.cross_entropy(logits, y, label_smoothing=0.1)
    top = logits.detach().amax(-1, keepdim=True)
    distributed.all_reduce(top, op=distributed.ReduceOp.MAX, group=model.group)
    logits = logits - top
    log_total = Sum.apply(logits.exp().sum(-1), model.group).log()
    first = distributed.get_rank(model.group) * logits.shape[-1]
    own = (y >= first) & (y < first + logits.shape[-1])
    picked = Sum.apply(logits.gather(-1, ((y - first) * own)[:, None])[:, 0] * own, model.group)
    mean = Sum.apply(logits.sum(-1), model.group) / WORDS
    return (log_total - 0.9 * picked - 0.1 * mean).mean()

"""

EXTREMES = """
WORDS = 12


class Net(nn.Module):
    group, first = None, 0

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS)
        nn.init.normal_(self.head.weight)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.head(h if self.group is None else Copy.apply(h, self.group))


def build():
    return Net()


def parallelize(model, mesh):
    rank, size = mesh["tp"].get_local_rank(), mesh["tp"].size()
    model.group, model.first = mesh.get_group("tp"), rank * WORDS // size
    model.head.weight = nn.Parameter(model.head.weight.detach().chunk(size)[rank].clone())
    model.head.bias = nn.Parameter(model.head.bias.detach().chunk(size)[rank].clone())


def batch():
    return torch.randn(16, 8), torch.randint(WORDS, (16,))


def over(x, group, op):
    if group is not None:
        x = x.clone()
        distributed.all_reduce(x, op=op, group=group)
    return x


def summed(x, group):
    return x if group is None else Sum.apply(x, group)


def loss(model, batch):
    x, y = batch
    logits = model(x)
    scale = over(logits.detach().abs().min(-1).values, model.group, distributed.ReduceOp.MIN)
    top = over(logits.detach().amax(-1), model.group, distributed.ReduceOp.MAX)
    shifted = logits - top[:, None]
    log_total = summed(shifted.exp().sum(-1), model.group).log()
    own = (y >= model.first) & (y < model.first + logits.shape[-1])
    picked = shifted.gather(-1, (y - model.first).where(own, 0)[:, None])[:, 0]
    powers = (logits * 0.5).logsumexp(-1)
    if model.group is not None:
        powers = Sum.apply((powers - top).exp(), model.group).log() + top
    return (log_total - summed(picked.where(own, 0.0), model.group) + scale * 0.1 + powers.square() * 0.1).mean()

"""

THREE_TERMS = """
BATCH_AXES = ("dp",)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 12)
        self.head = nn.Linear(12, 10)

    def forward(self, x):
        self.hidden = torch.tanh(self.body(x))
        return self.head(self.hidden)


def build():
    return Net()


def batch():
    return torch.randn(24, 8), torch.randint(10, (24,))


def parts(model, batch):
    logits = model(batch[0])
    return functional.cross_entropy(logits, batch[1]), logits.logsumexp(-1).square().mean(), model.hidden.abs().mean()


def loss(model, batch):
    entropy, z, size = parts(model, batch)
    return entropy + 0.01 * z + 0.1 * size


def step(model, batch, mesh):
    entropy, z, size = parts(model, batch)
    value = entropy + 0.01 * z + 0.1 * size
    value.backward()
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad, op=distributed.ReduceOp.AVG, group=mesh.get_group("dp"))
    value = value.detach()
    distributed.all_reduce(value, op=distributed.ReduceOp.AVG, group=mesh.get_group("dp"))
    return value

"""

TWO_AXES = """
BATCH_AXES = ("replicate", "shard")


def build():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batch():
    return torch.randn(24, 8)


def step(model, x, mesh):
    loss = model(x).square().mean()
    loss.backward()
    for parameter in model.parameters():
        grad = parameter.grad.flatten()
        size = mesh["shard"].size()
        part = grad.new_empty(grad.numel() // size)
        distributed.reduce_scatter_tensor(part, grad, group=mesh.get_group("shard"))
        part /= size
        distributed.all_reduce(part, group=mesh.get_group("replicate"))
        part /= mesh["replicate"].size()
        distributed.all_gather_into_tensor(grad, part, group=mesh.get_group("shard"))
        parameter.grad = grad.view_as(parameter)
    return loss.detach()

"""

ENTROPY = """
from torch.distributed.tensor.parallel import loss_parallel


def build():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 16, bias=False))


def parallelize(model, mesh):
    last = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh["tp"], {"2": last})


def batch():
    return {"x": torch.randn(10, 8), "labels": torch.randint(16, (10,))}


def whole_output(output, mesh):
    return output.full_tensor()


def entropy(logits):
    chances = functional.log_softmax(logits, -1)
    return -(chances.exp() * chances).sum(-1).mean()


def loss(model, batch):
    logits = model(batch["x"])
    return functional.cross_entropy(logits, batch["labels"]) - 0.5 * entropy(logits)


def step(model, batch, mesh):
    logits = model(batch["x"])
    bonus = entropy(logits.full_tensor())
    with loss_parallel():
        total = functional.cross_entropy(logits, batch["labels"]).full_tensor() - 0.5 * bonus
        total.backward()
    return total.detach()

"""

NEXT_WORDS = """
MESH = (2,)
class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.middle = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
    def forward(self, ids):
        return self.head(torch.tanh(self.middle(self.embed(ids))))
def build(): return LM()
def batch(): return torch.randint(16, (2, 17))
def loss(model, ids):
    return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
def step(model, ids, mesh):
    rank, size = mesh.get_local_rank(), mesh.size()
    words, labels = ids[:, :-1].chunk(size, 1)[rank], ids[:, 1:].chunk(size, 1)[rank]
    value = functional.cross_entropy(model(words).flatten(0, 1), labels.flatten())
    value.backward()
    whole = value.detach().clone()
    for number in (whole, *(weight.grad for weight in model.parameters())):
        distributed.all_reduce(number, group=mesh.get_group())
        number /= size
    return whole
"""

CASES = (
    Bug(
        "labels that are shifted after the sequence is cut",
        "cp=2",
        NEXT_WORDS,
        (
            (
                "functional.cross_entropy(model(words).flatten(0, 1), labels.flatten())",
                "functional.cross_entropy(model(words)[:, :-1].flatten(0, 1), words[:, 1:].flatten())",
            ),
        ),
        ("wrong-value",),
        ("28 labels on all ranks", "32 in the unsharded model", "shift labels"),
        never=("mean of their means",),
        with_lines=True,
    ),
    Bug(
        "labels of the other rank's part of the sequence",
        "cp=2",
        NEXT_WORDS,
        (("ids[:, 1:].chunk(size, 1)[rank]", "ids[:, 1:].chunk(size, 1)[-1 - rank]"),),
        ("wrong-value",),
        ("with another label",),
        with_lines=True,
    ),
    Bug(
        "labels that are shifted twice, as many as there are",
        "cp=2",
        NEXT_WORDS,
        (("ids[:, 1:].chunk(size, 1)[rank]", "ids[:, 1:].roll(-1, 1).chunk(size, 1)[rank]"),),
        ("wrong-value",),
        ("with another label", "shift labels once"),
        never=("labels on all ranks together", "mean of their means"),
        with_lines=True,
    ),
    Bug(
        "an entropy whose backward loss_parallel replaces",
        "tp=2",
        ENTROPY,
        (
            ("    bonus = entropy(logits.full_tensor())\n    with loss_parallel():\n", "    with loss_parallel():\n"),
            ("- 0.5 * bonus\n", "- 0.5 * entropy(logits).full_tensor()\n"),
        ),
        ("wrong-value",),
        ("loss_parallel", "model's output"),
    ),
    Bug(
        "label smoothing over each rank's own words",
        "tp=2",
        SMOOTHED,
        (("mean = Sum.apply(logits.sum(-1), model.group) / WORDS", "mean = logits.mean(-1)"),),
        ("unreduced-scalar",),
        ("tp", "mean"),
        never=("label it", "offset"),
    ),
    Bug(
        "label smoothing by the mean of each rank's own words",
        "tp=2",
        SMOOTHED,
        (("mean = Sum.apply(logits.sum(-1), model.group) / WORDS", "mean = logits.mean(-1)"),),
        ("wrong-value", "unreduced-output"),
        ("mean", "averages the means over tp", "divide its gradient by 2 and don't reduce it"),
        ("a backward that averages",),
        with_lines=True,
    ),
    Bug(
        "a third term of a loss that counts twice",
        "dp=2",
        THREE_TERMS,
        (
            (
                "    value = entropy + 0.01 * z + 0.1 * size\n    value.backward",
                ("    value = entropy + 0.01 * z + 0.1 * size * mesh['dp'].size()\n    value.backward"),
            ),
        ),
        ("wrong-scale",),
        ("term 3", "2 times"),
    ),
    Bug(
        "a term of a loss that is detached",
        "dp=2",
        THREE_TERMS,
        (
            (
                "    value = entropy + 0.01 * z + 0.1 * size\n    value.backward",
                "    value = entropy + 0.01 * z.detach() + 0.1 * size\n    value.backward",
            ),
        ),
        ("wrong-scale", "wrong-value"),
        ("term 2",),
    ),
    Bug(
        "a part of a gradient divided by all ranks after reduce-scatter",
        "replicate=2,shard=2",
        TWO_AXES,
        (('part /= mesh["replicate"].size()', "part /= mesh.size()"),),
        ("wrong-scale",),
        ("1/2",),
    ),
    Bug(
        "a part of a gradient not reduced over replicas",
        "replicate=2,shard=2",
        TWO_AXES,
        (
            (
                (
                    '        distributed.all_reduce(part, group=mesh.get_group("replicate"))\n'
                    '        part /= mesh["replicate"].size()\n'
                ),
                "",
            ),
        ),
        ("unreduced-gradient",),
        ("over replicate",),
    ),
    Bug(
        "a cross entropy relative to the largest logit of each rank",
        "tp=2",
        EXTREMES,
        (("over(logits.detach().amax(-1), model.group, distributed.ReduceOp.MAX)", "logits.detach().amax(-1)"),),
        ("wrong-value",),
        ("the max of its own part", "op=ReduceOp.MAX"),
        never=("the rank's own offset",),
        with_lines=True,
    ),
    Bug(
        "a scale of the smallest logit of each rank",
        "tp=2",
        EXTREMES,
        (
            (
                "over(logits.detach().abs().min(-1).values, model.group, distributed.ReduceOp.MIN)",
                "logits.detach().abs().min(-1).values",
            ),
        ),
        ("wrong-value",),
        ("the min of its own part", "op=ReduceOp.MIN"),
        with_lines=True,
    ),
    Bug(
        "a smallest logit that is reduced by the largest",
        "tp=2",
        EXTREMES,
        (("ReduceOp.MIN", "ReduceOp.MAX"),),
        ("wrong-value",),
        ("doesn't give the whole", "ReduceOp.MIN"),
        with_lines=True,
    ),
    Bug(
        "the square of each rank's own logsumexp",
        "tp=2",
        EXTREMES,
        (("powers = Sum.apply((powers - top).exp(), model.group).log() + top", "pass"),),
        ("wrong-value",),
        ("the logsumexp of its own part", "take their logsumexp"),
        with_lines=True,
    ),
)
