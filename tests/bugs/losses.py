"""Losses: means of means, a vocabulary in shards."""

from __future__ import annotations

from tests.bugs.case import Bug, Healthy
from tests.bugs.models import VOCABULARY

LABELS = '''
BATCH_AXES = ("dp",)
NONE = -100


def build():
    return nn.Linear(8, 10)


def parallelize(model, mesh):
    fully_shard(model, mesh=mesh["dp"])


def batch():
    """Labels of which the second half has few that count."""
    labels = torch.randint(10, (24,))
    labels[13:20] = NONE
    return torch.randn(24, 8), labels


def loss(model, batch):
    rows, labels = batch
    return functional.cross_entropy(model(rows), labels, ignore_index=NONE)


def step(model, batch, mesh):
    """Divide every rank's sum by the number of labels of all ranks."""
    rows, labels = batch
    count = (labels != NONE).sum()
    distributed.all_reduce(count, group=mesh.get_group("dp"))
    total = functional.cross_entropy(model(rows), labels, ignore_index=NONE, reduction="sum")
    value = total / count * mesh["dp"].size()
    value.backward()
    return value.detach()

'''

WITHOUT_STEP = LABELS.replace("    labels[13:20] = NONE\n", "    labels[[0, 12]] = NONE\n").split("def step(")[0]

PAIRS = '''
BATCH_AXES = ("dp",)


def build():
    return nn.Linear(8, 6)


def parallelize(model, mesh):
    fully_shard(model, mesh=mesh["dp"])


def batch():
    """Rows of which the second half is farther apart."""
    rows = torch.randn(24, 8)
    rows[12:] *= 4
    return rows


def loss(model, batch):
    """Compare every row with every other one of the batch."""
    found = model(batch)
    return (found[:, None] - found).square().mean()

'''

WRONG = ("wrong-value", "wrong-scale")

COUNTED = LABELS.replace("torch.randint(10, (24,))", "torch.randint(10, (1800,))").replace(
    "    labels[13:20] = NONE\n    return torch.randn(24, 8)",
    "    labels[900:903] = NONE\n    return torch.randn(1800, 8)",
)

NEXT = """
BATCH_AXES = {"cp": 1}


def build():
    return nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 20))


def parallelize(model, mesh):
    fully_shard(model, mesh=mesh["cp"])


def batch():
    tokens = torch.randint(20, (3, 17))
    return tokens[:, :-1], tokens[:, 1:]


def loss(model, batch):
    ids, labels = batch
    logits = model(ids)
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

"""

CASES = (
    Bug(
        "labels that are shifted in each rank's part of the sequence",
        "cp=2",
        NEXT,
        (
            ("tokens[:, :-1], tokens[:, 1:]", "tokens[:, 1:], tokens[:, 1:]"),
            ("model(ids)", "model(ids)[:, :-1]"),
            ("labels.flatten()", "labels[:, 1:].flatten()"),
        ),
        ("wrong-value",),
        ("42 labels on all ranks together", "shift labels and drop rows of the whole batch"),
        never=("the offset and the size",),
        with_lines=True,
    ),
    Bug(
        "a count of labels that is sent in bfloat16",
        "dp=2",
        COUNTED,
        (("count = (labels != NONE).sum()", "count = (labels != NONE).sum().bfloat16()"),),
        ("wrong-scale",),
        ("sums one number over dp in bfloat16", "torch.int64"),
        ("clips", "unequal numbers"),
        with_lines=True,
    ),
    Bug(
        "a count of labels in float32 that is sent in bfloat16",
        "dp=2",
        COUNTED.replace("(labels != NONE).sum()", "(labels != NONE).sum().double()"),
        (("count = (labels != NONE).sum().double()", "count = (labels != NONE).sum().double().bfloat16()"),),
        ("wrong-scale",),
        ("sums one number over dp in bfloat16", "torch.int64"),
    ),
    Bug(
        "a count and a sum that are sent together in bfloat16",
        "dp=2",
        COUNTED.replace("nn.Linear(8, 10)", "nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 10))").replace(
            """    value = total / count * mesh["dp"].size()
    value.backward()
    return value.detach()
""",
            """    sums = torch.stack((total.detach(), (labels != NONE).sum().to(total.dtype)))
    distributed.all_reduce(sums, group=mesh.get_group("dp"))
    sums = sums.to(total.dtype)
    (total / sums[1] * mesh["dp"].size()).backward()
    return sums[0] / sums[1]
""",
        ),
        (("(labels != NONE).sum().to(total.dtype)))", "(labels != NONE).sum().to(total.dtype))).bfloat16()"),),
        ("wrong-scale",),
        ("sums one number over dp in bfloat16", "torch.int64"),
    ),
    Bug(
        "a mean of the ranks' means over unequal counts of labels",
        "dp=2",
        LABELS,
        (
            ('    distributed.all_reduce(count, group=mesh.get_group("dp"))\n', ""),
            (' / count * mesh["dp"].size()', " / count"),
        ),
        WRONG,
        ("mean of|means", "unequal|count", "all_reduce"),
    ),
    Bug(
        "a mean of means in loss itself",
        "dp=2",
        WITHOUT_STEP,
        (("[[0, 12]]", "[[13, 14, 15, 16]]"),),
        WRONG,
        ("mean of|means", "unequal|count"),
    ),
    Healthy("a loss over pairs whose value lies between those of the parts", "dp=2", PAIRS),
    Bug(
        "a logarithm of each shard's own sum of exponentials",
        "tp=4",
        VOCABULARY,
        (
            (
                "Sum.apply((logits - largest[:, None]).exp().sum(-1), model.group)",
                "(logits - largest[:, None]).exp().sum(-1)",
            ),
        ),
        ("unreduced-scalar", *WRONG),
        ("tp", "softmax|exponential|logsumexp"),
    ),
    Bug(
        "a softmax over copies of the logits",
        "tp=4",
        VOCABULARY,
        (
            (
                "    return (total.log()",
                "    total = total * distributed.get_world_size(model.group)\n    return (total.log()",
            ),
        ),
        WRONG,
        ("log(4)|log of 4|log of the size|log(tp)", "tp"),
        ("unequal numbers of tokens",),
    ),
    Bug(
        "labels not moved to a shard's own words",
        "tp=2",
        VOCABULARY,
        (("local = words - model.first", "local = words"),),
        WRONG,
        ("label|vocabulary|shard",),
        ("unequal numbers of tokens",),
    ),
    Healthy(
        "a loss that is a sum", "dp=2", LABELS.replace('/ count * mesh["dp"].size()', '/ count * mesh["dp"].size()')
    ),
)
