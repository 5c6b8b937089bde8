"""Losses divided by a count: over which ranks it is summed, and what is averaged afterwards."""

from __future__ import annotations

from tests.bugs.case import Bug, Healthy

COUNTED = """
BATCH_AXES = ("dp",)
GROUP = None


def build():
    return nn.Linear(8, 10)


def parallelize(model, mesh):
    global GROUP
    GROUP = mesh.get_group("dp")
    fully_shard(model, mesh=mesh["dp"])


def batch():
    labels = torch.randint(10, (24,))
    labels[13:20] = -100
    return torch.randn(24, 8), labels


def loss(model, batch):
    rows, labels = batch
    total = functional.cross_entropy(model(rows), labels, reduction="sum")
    count = (labels != -100).sum()
    if distributed.get_world_size() > 1:
        distributed.all_reduce(count, group=GROUP)
        return total / count * 2
    return total / count

"""

IN_PARTS = """
BATCH_AXES = ("dp",)


def build():
    return nn.Linear(8, 10)


def parallelize(model, mesh):
    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def batch():
    labels = torch.randint(10, (24,))
    labels[13:20] = -100
    return torch.randn(24, 8), labels


def summed(model, batch):
    rows, labels = batch
    return functional.cross_entropy(model(rows), labels, reduction="sum")


def loss(model, batch):
    return summed(model, batch) / (batch[1] != -100).sum()


def step(model, batch, mesh):
    count, total = (batch[1] != -100).sum(), 0.0
    distributed.all_reduce(count, group=mesh.get_group("dp"))
    for part in zip(*(whole.chunk(2) for whole in batch)):
        share = summed(model, part) / count
        (share * mesh["dp"].size()).backward()
        total = total + share.detach()
    distributed.all_reduce(total, group=mesh.get_group("dp"))
    return total

"""

MASKED = """
BATCH_AXES = ("dp",)


def build():
    return nn.Linear(8, 10)


def parallelize(model, mesh):
    fully_shard(model, mesh=mesh["dp"])


def batch():
    hidden = torch.arange(24) % 5 < 2
    hidden[12:] = torch.arange(12) % 4 == 0
    return torch.randn(24, 8), hidden


def loss(model, batch):
    rows, hidden = batch
    error = model(rows).square().mean(-1)
    if distributed.get_world_size() > 1:
        count = hidden.sum()
        distributed.all_reduce(count)
        return (error * hidden).sum() / count * 2
    return (error * hidden).sum() / hidden.sum()

"""
OWN_COUNT = """    if distributed.get_world_size() > 1:
        count = hidden.sum()
        distributed.all_reduce(count)
        return (error * hidden).sum() / count * 2
"""

EQUALLY = COUNTED.replace("    labels[13:20] = -100\n", "")
OVER_ALL = ("all_reduce(count, group=GROUP)", "all_reduce(count)")
OF_COPIES = ("tp have the same term of the sum over dp", "counts 2 times", "over the group of dp alone")
NEVER = ("already a mean", "nothing sums", "remove that division")

CASES = (
    Bug(
        "an error of masked rows divided by the rank's own count",
        "dp=2",
        MASKED,
        ((OWN_COUNT, ""),),
        ("wrong-value",),
        ("mean of means", "by the sum or count of each rank's own rows", "by 2, the number of ranks along dp"),
        ("all_reduce the result of sum",),
        with_lines=True,
    ),
    Healthy(
        "an error of masked rows divided by the rank's own count, which all ranks have",
        "dp=2",
        MASKED.replace(OWN_COUNT, "").replace("torch.arange(12) % 4 == 0", "hidden[:12]"),
    ),
    Bug(
        "a count of labels over ranks with the same rows",
        "dp=2,tp=2",
        COUNTED,
        (OVER_ALL,),
        ("wrong-scale",),
        OF_COPIES,
        NEVER,
        with_lines=True,
    ),
    Bug(
        "equal counts of labels over ranks with the same rows",
        "dp=2,tp=2",
        EQUALLY,
        (OVER_ALL,),
        ("wrong-scale",),
        OF_COPIES,
        NEVER,
        with_lines=True,
    ),
    Bug(
        "a count of weights over ranks with the same rows, and no factor",
        "dp=2,tp=2",
        COUNTED.replace("(labels != -100).sum()", "(labels != -100).double().sum()"),
        (OVER_ALL, ("total / count * 2", "total / count")),
        ("wrong-scale",),
        OF_COPIES,
        NEVER,
        with_lines=True,
    ),
    Bug(
        "a rank's term of the loss under FSDP",
        "dp=2,tp=2",
        COUNTED,
        (("total / count * 2", "total / count"),),
        ("wrong-scale",),
        ("its term of the loss's sum over dp", "multiply the loss in case.py", "by 2, the number of ranks along dp"),
        NEVER,
        with_lines=True,
    ),
    Bug(
        "a loss that is summed in forward under FSDP",
        "dp=2,tp=2",
        COUNTED,
        (("total / count * 2", "Sum.apply(total / count, GROUP)"),),
        ("wrong-scale",),
        ("sums the ranks' losses over dp", "averaged over dp instead of summed", "for the log only"),
        NEVER,
        with_lines=True,
    ),
    Bug(
        "a mean over the labels of ranks with the same rows",
        "dp=2,tp=2",
        COUNTED,
        (
            ("group=GROUP", "group=TP"),
            ("    global GROUP\n", "    global GROUP, TP\n"),
            ('    GROUP = mesh.get_group("dp")', '    GROUP = TP = mesh.get_group("tp")'),
        ),
        ("wrong-value",),
        ("mean of means", "all_reduced over dp and no other axis", "by 2, the number of ranks along dp"),
        with_lines=True,
    ),
    Bug(
        "micro-batches that each divide by their own count",
        "dp=2",
        IN_PARTS,
        (("summed(model, part) / count", "loss(model, part) / 4"),),
        ("wrong-value",),
        ("mean of means", "each micro-batch's own rows", "all micro-batches all_reduced over dp"),
        ("shifts or pads",),
        with_lines=True,
    ),
    Healthy(
        "a count over all ranks, and a factor for all ranks",
        "dp=2,tp=2",
        COUNTED.replace("all_reduce(count, group=GROUP)", "all_reduce(count)").replace("count * 2", "count * 4"),
    ),
)
