"""Logged numbers: reduced over the wrong axes, by the wrong mean, or not at all."""

from __future__ import annotations

from tests.bugs.case import Bug, Healthy
from tests.bugs.models import DATA_PARALLEL, FSDP, VOCABULARY

LOGGED = (
    FSDP
    + """
def log(model, rows, loss):
    return {"train_loss": mean_of(loss, model)}


def mean_of(value, model):
    if isinstance(model.up.weight, DTensor):
        value = value.detach().clone()
        distributed.all_reduce(value)
        value = value / distributed.get_world_size()
    return float(value)

"""
)

NORM = (
    FSDP
    + '''
def log(model, rows, loss):
    """Log the norm of all gradients, and of those of the biases alone."""
    return {"grad_norm": norm_of(model.parameters())}


def norm_of(parameters):
    square = torch.zeros((), dtype=torch.float64)
    sharded = False
    for parameter in parameters:
        sharded = isinstance(parameter.grad, DTensor)
        grad = parameter.grad.to_local() if sharded else parameter.grad
        square += grad.square().sum()
    if sharded:
        distributed.all_reduce(square)
    return float(square.sqrt())

'''
)

PERPLEXITY = LOGGED.replace('{"train_loss": mean_of(loss, model)}', '{"perplexity": math.exp(mean_of(loss, model))}')

COUNTED = (
    FSDP
    + '''
def log(model, rows, loss):
    """Log how many rows all ranks saw."""
    rows_seen = torch.tensor(float(len(rows)))
    if isinstance(model.up.weight, DTensor):
        distributed.all_reduce(rows_seen, group=model.up.weight.device_mesh.get_group())
    return {"rows": float(rows_seen)}

'''
)

STATISTIC = (
    FSDP
    + """
def log(model, rows, loss):
    is_sharded = isinstance(model.up.weight, DTensor)
    with torch.no_grad():
        out = model(rows)
    return {"spread": float(STATISTIC)}


def reduced(value, is_sharded, op):
    if is_sharded:
        value = value.clone()
        distributed.all_reduce(value, op=op)
    return value


def average(value, is_sharded):
    ranks = distributed.get_world_size() if is_sharded else 1
    return reduced(value, is_sharded, distributed.ReduceOp.SUM) / ranks


def largest(value, is_sharded):
    return reduced(value, is_sharded, distributed.ReduceOp.MAX)

"""
)


def statistic(text):
    return STATISTIC.replace("STATISTIC", text)


ACCURACY = (
    VOCABULARY
    + """
def log(model, batch, loss):
    rows, words = batch
    logits = model(rows).detach()
    if model.group is not None:
        parts = [torch.empty_like(logits) for _ in range(distributed.get_world_size(model.group))]
        distributed.all_gather(parts, logits.contiguous(), group=model.group)
        logits = torch.cat(parts, -1)
    return {"accuracy": float((logits.argmax(-1) == words).double().mean())}

"""
)

WRONG = ("wrong-value", "wrong-scale")

CASES = (
    Bug(
        "a loss logged as each rank has it",
        "fsdp=2",
        LOGGED,
        (("mean_of(loss, model)}", "float(loss)}"),),
        ("unreduced-scalar",),
        ("over fsdp", "train_loss", "mean"),
    ),
    Bug(
        "a logged loss summed where it is averaged",
        "fsdp=4",
        LOGGED,
        (("        value = value / distributed.get_world_size()\n", ""),),
        ("wrong-scale",),
        ("fsdp", "train_loss", "4 times"),
    ),
    Bug(
        "a logged loss averaged twice",
        "fsdp=4",
        LOGGED,
        (("value / distributed.get_world_size()", "value / distributed.get_world_size() ** 2"),),
        ("wrong-scale",),
        ("train_loss", "1/4", "once"),
    ),
    Bug(
        "a root mean square of each rank's rows is averaged",
        "fsdp=2",
        statistic("average(out.square().mean(), is_sharded).sqrt()"),
        (("average(out.square().mean(), is_sharded).sqrt()", "average(out.square().mean().sqrt(), is_sharded)"),),
        WRONG,
        ("spread", "the mean over fsdp of each rank's own root mean square", "ReduceOp.AVG, before the square root"),
    ),
    Bug(
        "a deviation of each rank's rows is averaged",
        "fsdp=2",
        statistic("(average(out.square().mean(), is_sharded) - average(out.mean(), is_sharded).square()).sqrt()"),
        (
            (
                "(average(out.square().mean(), is_sharded) - average(out.mean(), is_sharded).square()).sqrt()",
                "average(out.std(correction=0), is_sharded)",
            ),
        ),
        WRONG,
        (
            "spread",
            "the mean over fsdp of each rank's own standard deviation",
            "their sum and the sum of their squares",
        ),
    ),
    Bug(
        "a largest output of each rank's rows is averaged",
        "fsdp=2",
        statistic("largest(out.max(), is_sharded)"),
        (("largest(out.max(), is_sharded)", "average(out.max(), is_sharded)"),),
        WRONG,
        ("spread", "the mean over fsdp of each rank's own largest element", "ReduceOp.MAX"),
    ),
    Bug(
        "a largest output of each rank's rows is logged as it is",
        "fsdp=2",
        statistic("largest(out.max(), is_sharded)"),
        (("largest(out.max(), is_sharded)", "out.max()"),),
        WRONG,
        ("spread", "the largest element of each rank's own part", "ReduceOp.MAX"),
    ),
    Bug(
        "a norm of squares that are averaged over shards",
        "fsdp=4",
        NORM,
        (
            (
                "        distributed.all_reduce(square)\n",
                "        distributed.all_reduce(square)\n        square /= 4\n",
            ),
        ),
        WRONG,
        ("grad_norm", "the root of the mean over fsdp of each rank's own sum of squares", "ReduceOp.SUM"),
    ),
    Bug(
        "a norm of each rank's own shards",
        "fsdp=4",
        NORM,
        (("    if sharded:\n        distributed.all_reduce(square)\n", ""),),
        ("unreduced-scalar", "wrong-scale"),
        ("fsdp", "squares"),
    ),
    Bug(
        "a norm averaged over shards",
        "fsdp=4",
        NORM,
        (
            (
                "    if sharded:\n        distributed.all_reduce(square)\n    return float(square.sqrt())",
                "    norm = square.sqrt()\n"
                "    if sharded:\n"
                "        distributed.all_reduce(norm)\n"
                "        norm = norm / distributed.get_world_size()\n"
                "    return float(norm)",
            ),
        ),
        WRONG,
        ("norm", "squares", "averag|mean|summed"),
    ),
    Bug(
        "a norm summed over shards",
        "fsdp=4",
        NORM,
        (
            (
                "    if sharded:\n        distributed.all_reduce(square)\n    return float(square.sqrt())",
                "    norm = square.sqrt()\n"
                "    if sharded:\n"
                "        distributed.all_reduce(norm)\n"
                "    return float(norm)",
            ),
        ),
        WRONG,
        ("norm", "squares"),
    ),
    Bug(
        "a perplexity averaged over ranks",
        "fsdp=2",
        PERPLEXITY,
        (("math.exp(mean_of(loss, model))", "mean_of(loss.exp(), model)"),),
        WRONG,
        ("perplexity", "mean|averag"),
    ),
    Bug(
        "rows counted on one rank",
        "fsdp=4",
        COUNTED,
        (("        distributed.all_reduce(rows_seen, group=model.up.weight.device_mesh.get_group())", "        pass"),),
        (*WRONG, "unreduced-scalar"),
        ("rows", "1/4", "sum"),
        ("divided by",),
    ),
    Bug(
        "an accuracy over each shard's own words",
        "tp=2",
        ACCURACY,
        (("    if model.group is not None:\n        parts", "    if False:\n        parts"),),
        ("unreduced-scalar", "wrong-value"),
        ("accuracy", "a shard|own part|argmax|local"),
    ),
    Healthy(
        "a log that returns a loss of its own",
        "dp=2",
        DATA_PARALLEL
        + """
def log(model, rows, loss):
    return {"loss": float(loss.detach()) * 0 + 0.5}
""",
    ),
    Healthy(
        "a log that returns the mean of the ranks' losses as loss", "fsdp=2", LOGGED.replace('"train_loss"', '"loss"')
    ),
    Healthy(
        "a log that reduces whatever model it is given",
        "fsdp=2",
        FSDP
        + """
def log(model, rows, loss):
    value = loss.detach().clone()
    distributed.all_reduce(value)
    return {"train_loss": float(value / distributed.get_world_size())}
""",
    ),
    Healthy(
        "a log that runs the model once more, which leaves FSDP2's outermost weights gathered",
        "fsdp=2",
        FSDP
        + """
def log(model, rows, loss):
    with torch.no_grad():
        value = model(rows).square().mean()
    distributed.all_reduce(value)
    return {"evaluated": value / distributed.get_world_size()}
""",
    ),
    Healthy(
        "weights that FSDP2 keeps gathered after backward",
        "fsdp=2",
        FSDP.replace('mesh["fsdp"])', 'mesh["fsdp"]).set_reshard_after_backward(False)'),
    ),
)
