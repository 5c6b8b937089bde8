"""Micro-batches and loss scales: gradients of another loss than the one that is reported."""

from __future__ import annotations

from tests.bugs.case import Bug, Healthy
from tests.bugs.models import DATA_PARALLEL, FSDP, STAGES

ACCUMULATED = (
    DATA_PARALLEL
    + '''
PARTS = 4


def step(model, rows, mesh):
    """Accumulate the gradients of several micro-batches, and reduce them once."""
    model.zero_grad()
    total = torch.zeros((), dtype=rows.dtype)
    for part in rows.chunk(PARTS):
        loss = model(part).square().mean() / PARTS
        loss.backward()
        total += loss.detach()
    reduce(model, mesh)
    return total

'''
)

FACTORED = (
    ACCUMULATED.replace("torch.tanh(self.up(x))", "torch.tanh(self.up(x)) * self.factor").replace(
        "self.up = ", "self.factor = 1.0\n        self.up = "
    )
    + """
def parallelize(model, mesh):
    model.factor = 1.0

"""
)

PARTED_LOSS = """
def loss(model, rows):
    return sum(model(part).square().mean() for part in rows.chunk(PARTS)) / PARTS

"""

STRIDED = (
    DATA_PARALLEL
    + '''
PARTS = 4


def batch():
    return torch.randn(32, 8), torch.randn(32, 8)


def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def step(model, batch, mesh):
    """Give each micro-batch every fourth row."""
    rows, targets = batch
    total = torch.zeros((), dtype=rows.dtype)
    for number in range(PARTS):
        part = (model(rows[number::PARTS]) - targets[number::PARTS]).square().mean() / PARTS
        part.backward()
        total += part.detach()
    reduce(model, mesh)
    return total

'''
)

KEPT_TARGETS = (
    STAGES
    + '''
PARTS = 3


def batch():
    return torch.randn(24, 8), torch.randint(8, (24,))


def loss(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def step(model, batch, mesh):
    """Run all micro-batches forward, then all backward, the last one first."""
    stage, last, group = mesh.get_local_rank("pp"), mesh["pp"].size() - 1, mesh.get_group("pp")
    inputs, labels = (list(part.chunk(PARTS)) for part in batch)
    held, total = [], torch.zeros((), dtype=batch[0].dtype)
    for _ in range(PARTS):
        x = inputs.pop(0)
        if stage > 0:
            distributed.recv(x, group_src=stage - 1, group=group)
            x = x.clone().requires_grad_()
        output = model(x)
        if stage == last:
            output = functional.cross_entropy(output, labels.pop(0)) / PARTS
            total += output.detach()
        else:
            distributed.send(output.detach(), group_dst=stage + 1, group=group)
        held.append((x, output))
    while held:
        x, output = held.pop()
        gradient = None
        if stage < last:
            gradient = torch.empty_like(output)
            distributed.recv(gradient, group_src=stage + 1, group=group)
        output.backward(gradient)
        if stage > 0:
            distributed.send(x.grad, group_dst=stage - 1, group=group)
    distributed.broadcast(total, group_src=last, group=group)
    return total

'''
)

SYNCED = (
    FSDP
    + '''
PARTS = 2


def step(model, rows, mesh):
    """Reduce the gradients with the last micro-batch."""
    total = torch.zeros((), dtype=rows.dtype)
    for number, part in enumerate(rows.chunk(PARTS)):
        if isinstance(model.up.weight, DTensor):
            model.set_requires_gradient_sync(number == PARTS - 1)
        loss = model(part).square().mean() / PARTS
        loss.backward()
        total += loss.detach()
    return total


def optimizer(model, mesh):
    return torch.optim.SGD(model.parameters(), lr=0.1)

'''
)

SCALED = (
    DATA_PARALLEL
    + '''
SCALE = 1024.0


def step(model, rows, mesh):
    """Scale the loss for backward, as for float16, and the gradients back."""
    loss = model(rows).square().mean()
    (loss * SCALE).backward()
    reduce(model, mesh)
    for parameter in model.parameters():
        parameter.grad /= SCALE
    return loss.detach()

'''
)

UNEVEN = (
    FSDP
    + '''
def step(model, rows, mesh):
    """Weigh every micro-batch by its rows."""
    total = 0
    for part in rows.split(5):
        value = model(part).square().mean() * len(part) / len(rows)
        value.backward()
        total = total + value.detach()
    return total

'''
)

CASES = (
    Bug(
        "a stage's micro-batches with targets from the end of the list",
        "pp=2",
        KEPT_TARGETS,
        (("labels.pop(0)", "labels.pop()"),),
        ("wrong-value",),
        ("micro-batches 0, 2 with the targets of 2, 0", "reversed order", "cross_entropy(output, labels.pop())"),
        ("shifts or pads", "unequal numbers"),
        with_lines=True,
    ),
    Bug(
        "micro-batches with the targets of the next one",
        "dp=2",
        STRIDED,
        (("targets[number::PARTS]", "targets[(number + 1) % PARTS :: PARTS]"),),
        ("wrong-value",),
        ("micro-batches 0, 1, 2, 3 with the targets of 1, 2, 3, 0", "keep them by the micro-batch's number"),
        ("shifts or pads", "unequal numbers", "reversed order"),
        with_lines=True,
    ),
    Bug(
        "micro-batches of unequal sizes weighed alike",
        "fsdp=2",
        UNEVEN,
        ((" * len(part) / len(rows)", " / 3"),),
        ("wrong-value",),
        ("micro-batch", "unequal"),
    ),
    Bug(
        "micro-batches summed where they are averaged",
        "dp=2",
        ACCUMULATED,
        ((".square().mean() / PARTS", ".square().mean()"), ("return total", "return total / PARTS")),
        ("wrong-scale",),
        ("4 times", "micro-batch"),
    ),
    Bug(
        "a wrong factor in every micro-batch",
        "dp=2",
        FACTORED,
        (("model.factor = 1.0", "model.factor = 1.01"),),
        ("wrong-value", "wrong-scale"),
        ("self.factor)` is the first wrong line", "1.01 times"),
        ("is given another input",),
        with_lines=True,
    ),
    Bug(
        "a wrong factor in every micro-batch, of which the unsharded model's loss has as many",
        "dp=2",
        FACTORED + PARTED_LOSS,
        (("model.factor = 1.0", "model.factor = 1.01"),),
        ("wrong-value", "wrong-scale"),
        ("self.factor)` is the first wrong line", "1.01 times"),
        ("is given another input",),
        with_lines=True,
    ),
    Bug(
        "gradients zeroed before every micro-batch",
        "dp=2",
        ACCUMULATED,
        (
            ("    model.zero_grad()\n", ""),
            ("        loss = model(part)", "        model.zero_grad()\n        loss = model(part)"),
        ),
        ("wrong-value", "wrong-scale"),
        ("last micro-batch", "zero_grad"),
    ),
    Bug(
        "gradients reduced after every micro-batch",
        "dp=2",
        ACCUMULATED,
        (
            (
                "    reduce(model, mesh)\n    return total",
                "    for parameter in model.parameters():\n        parameter.grad /= 2\n    return total",
            ),
            (
                "        total += loss.detach()",
                "        total += loss.detach()\n"
                "        for parameter in model.parameters():\n"
                "            distributed.all_reduce(parameter.grad)",
            ),
        ),
        ("wrong-value", "wrong-scale"),
        ("micro-batch|more than once|several times", "after each of"),
        with_lines=True,
    ),
    Bug(
        "the last micro-batch not reduced",
        "dp=2",
        ACCUMULATED,
        (
            ("    reduce(model, mesh)\n    return total", "    return total"),
            (
                "    for part in rows.chunk(PARTS):\n",
                "    for number, part in enumerate(rows.chunk(PARTS)):\n"
                "        if number == PARTS - 1:\n"
                "            reduce(model, mesh)\n",
            ),
        ),
        ("unreduced-gradient", "wrong-value"),
        ("dp",),
    ),
    Bug(
        "gradient sync of FSDP left off",
        "fsdp=2",
        SYNCED,
        (("number == PARTS - 1", "False"),),
        ("unreduced-gradient", "write-not-applied", "incomplete"),
        (".grad is None|set_requires_gradient_sync",),
        ("from before it was sharded",),
    ),
    Bug(
        "a loss scale never taken out of the gradients",
        "dp=2",
        SCALED,
        (("        parameter.grad /= SCALE", "        parameter.grad /= 1"),),
        ("wrong-scale",),
        ("1024", "loss scale|backward ran|another loss"),
        ("ReduceOp",),
    ),
    Bug(
        "backward through another loss than the one returned",
        "dp=2",
        SCALED,
        (("(loss * SCALE).backward()", "(loss * SCALE * 0.3).backward()"),),
        ("wrong-scale",),
        ("0.3", "backward runs on"),
        ("clipping",),
    ),
    Bug(
        "targets cut into runs beside inputs cut with a stride",
        "dp=2",
        STRIDED,
        (("targets[number::PARTS]", "targets.chunk(PARTS)[number]"),),
        ("wrong-value",),
        ("targets of other rows",),
        ("joins the parts",),
    ),
    Healthy("gradients accumulated without a sync until the last micro-batch", "fsdp=2", SYNCED),
)
