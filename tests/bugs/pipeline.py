"""Pipelines: stages in another order, layers lost or kept twice, gradients of micro-batches and of tied weights."""

from __future__ import annotations

from tests.bugs.case import Bug, Healthy
from tests.bugs.models import STAGES

MICRO = (
    STAGES
    + """
PARTS = 3


def backward(loss):
    (loss / PARTS).backward()


def step(model, rows, mesh):
    return torch.stack([through(model, part, mesh) for part in rows.chunk(PARTS)]).mean()

"""
)

ALL_FORWARD = (
    STAGES
    + """
PARTS = 4


def loss(model, rows):
    return model(rows).square().mean()


def step(model, rows, mesh):
    stage, last, group = mesh.get_local_rank("pp"), mesh["pp"].size() - 1, mesh.get_group("pp")
    inputs, outputs = [], []
    for part in rows.chunk(PARTS):
        if stage > 0:
            part = torch.empty_like(part)
            distributed.recv(part, group_src=stage - 1, group=group)
            part.requires_grad_()
        inputs.append(part)
        outputs.append(model(part))
        if stage < last:
            distributed.send(outputs[-1].detach(), group_dst=stage + 1, group=group)
    losses = [output.square().mean() / PARTS for output in outputs]
    total = sum(losses).detach()
    for number in range(PARTS):
        if stage == last:
            losses[number].backward()
        else:
            output = outputs.pop(0)
            gradient = torch.empty_like(output)
            distributed.recv(gradient, group_src=stage + 1, group=group)
            output.backward(gradient)
        if stage > 0:
            distributed.send(inputs[number].grad, group_dst=stage - 1, group=group)
    distributed.broadcast(total, group_src=last, group=group)
    return total

"""
)

WITH_DATA = (
    STAGES
    + """
BATCH_AXES = ("dp",)


def step(model, rows, mesh):
    loss = through(model, rows, mesh)
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        parameter.grad /= mesh["dp"].size()
    return loss

"""
)

TIED = (
    STAGES.replace(
        """        self.layers = nn.ModuleDict({str(number): Block() for number in range(LAYERS)})
""",
        """        self.layers = nn.ModuleDict({str(number): Block() for number in range(LAYERS)})
        self.embed = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight
""",
    ).replace(
        """        for layer in self.layers.values():
            x = layer(x)
        return x
""",
        """        x = self.embed(x) if self.embed is not None else x
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x) if self.head is not None else x
""",
    )
    + '''
def parallelize(model, mesh):
    stage = mesh.get_local_rank("pp")
    names = [str(number) for number in layers_of(stage, mesh)]
    model.layers = nn.ModuleDict({name: model.layers[name] for name in names})
    if stage > 0:
        model.embed = None
    if stage < mesh["pp"].size() - 1:
        model.head = None


def step(model, rows, mesh):
    loss = through(model, rows, mesh)
    sum_ties(model, mesh)
    return loss


def sum_ties(model, mesh):
    """Sum the gradients of the embedding on the first stage and the head on the last."""
    ends = distributed.new_group([0, mesh["pp"].size() - 1])
    tied = model.embed or model.head
    if tied is not None:
        distributed.all_reduce(tied.weight.grad, group=ends)

'''
)

TIED_SHARDS = (
    TIED.replace("self.embed(x)", "functional.linear(x, whole(self.embed.weight))").replace(
        "self.head(x)", "functional.linear(x, whole(self.head.weight))"
    )
    + """
EMBED, HEAD = 0, 0


def whole(weight):
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def parallelize(model, mesh):
    stage, kept = mesh.get_local_rank("pp"), model.embed.weight.detach()
    names = [str(number) for number in layers_of(stage, mesh)]
    model.layers = nn.ModuleDict({name: model.layers[name] for name in names})
    if stage > 0:
        model.embed = None
        model.head.weight = nn.Parameter(distribute_tensor(kept, mesh["tp"], (Shard(HEAD),)))
    else:
        model.head = None
        model.embed.weight = nn.Parameter(distribute_tensor(kept, mesh["tp"], (Shard(EMBED),)))


def sum_ties(model, mesh):
    tied = model.embed or model.head
    distributed.all_reduce(tied.weight.grad.to_local(), group=mesh.get_group("pp"))

"""
)

V_SHAPED = (
    STAGES
    + '''
def numbers(mesh):
    """Rank r of p has stage r on the way down and stage 2p - 1 - r on the way back."""
    rank, size = mesh.get_local_rank("pp"), mesh["pp"].size()
    return [rank, 2 * size - 1 - rank]


def parallelize(model, mesh):
    model.layers = nn.ModuleDict({str(number): model.layers[str(number)] for number in numbers(mesh)})


def stages(model, mesh):
    return {number: model.layers[str(number)] for number in numbers(mesh)}


def step(model, rows, mesh):
    """Down on ranks 0 and 1, and back on ranks 1 and 0, whose last layer has the loss."""
    first, second = (model.layers[str(number)] for number in numbers(mesh))
    rank, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    if rank == 0:
        out = first(rows)
        distributed.send(out.detach(), dst=1)
        x = torch.empty_like(rows)
        distributed.recv(x, src=1)
        x.requires_grad_()
        loss = second(x).square().mean()
        loss.backward()
        distributed.send(x.grad, dst=1)
        grad = torch.empty_like(out)
        distributed.recv(grad, src=1)
        out.backward(grad)
        loss = loss.detach().clone()
    else:
        x = torch.empty_like(rows)
        distributed.recv(x, src=0)
        x.requires_grad_()
        out = second(first(x))
        distributed.send(out.detach(), dst=0)
        grad = torch.empty_like(out)
        distributed.recv(grad, src=0)
        out.backward(grad)
        distributed.send(x.grad, dst=0)
        loss = torch.zeros((), dtype=rows.dtype)
    distributed.broadcast(loss, src=0, group=group)
    return loss

'''
)

SKIPPING = (
    """
AXES = STAGE_AXES = ("pp",)


class Front(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.skip = nn.Linear(12, 12), nn.Linear(12, 12, bias=False)

    def forward(self, x):
        return torch.tanh(self.up(x)), self.skip(x)


class Back(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(12, 12)

    def forward(self, hidden, skip):
        return self.last(hidden) + skip


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.front, self.back = Front(), Back()

    def forward(self, x):
        return self.back(*self.front(x))


def build():
    return Model()


def batch():
    return torch.randn(20, 12)

"""
    + '''
def parallelize(model, mesh):
    if mesh.get_local_rank("pp") == 0:
        model.back = None
    else:
        model.front = None


def stages(model, mesh):
    return {mesh.get_local_rank("pp"): model}


def step(model, rows, mesh):
    """The first stage sends two tensors, and the second sends the gradients of both back."""
    if mesh.get_local_rank("pp") == 0:
        sent = model.front(rows)
        for one in sent:
            distributed.send(one.detach(), dst=1)
        grads = [torch.empty_like(rows) for _ in sent]
        for grad in grads:
            distributed.recv(grad, src=1)
        torch.autograd.backward(sent, grads)
        loss = torch.zeros((), dtype=rows.dtype)
    else:
        hidden, skip = (torch.empty_like(rows) for _ in range(2))
        for one in (hidden, skip):
            distributed.recv(one, src=0)
            one.requires_grad_()
        loss = model.back(hidden, skip).square().mean()
        loss.backward()
        for one in (hidden, skip):
            distributed.send(one.grad, dst=0)
        loss = loss.detach()
    distributed.broadcast(loss, src=1, group=mesh.get_group("pp"))
    return loss

'''
)

CASES = (
    Bug(
        "a stage's gradients multiplied by the number of stages",
        "pp=2",
        MICRO,
        (
            (
                "    return torch.stack([through(model, part, mesh) for part in rows.chunk(PARTS)]).mean()",
                "    loss = torch.stack([through(model, part, mesh) for part in rows.chunk(PARTS)]).mean()\n"
                "    for parameter in model.parameters():\n"
                "        parameter.grad *= mesh['pp'].size() if mesh.get_rank() == 0 else 1\n"
                "    return loss",
            ),
        ),
        ("wrong-scale",),
        ("2 times",),
        ("no mesh axis has",),
    ),
    Bug(
        "no gradient for the second tensor that a stage sends",
        "pp=2",
        SKIPPING,
        (("torch.autograd.backward(sent, grads)", "sent[0].backward(grads[0])"),),
        ("wrong-value",),
        ("front.skip.weight", "output[1] of front", "backward isn't started with it"),
        ("cuts the graph",),
    ),
    Bug(
        "a loss that the last stage alone has",
        "pp=2",
        STAGES,
        (("    distributed.broadcast(loss, src=ranks[last], group=group)\n", "    loss *= stage == last\n"),),
        ("unreduced-scalar",),
        ("computed on rank 1 alone", "over pp"),
        with_lines=True,
    ),
    Bug(
        "stages in falling order",
        "pp=2",
        STAGES,
        (('tensor_split(mesh["pp"].size())[stage]', 'tensor_split(mesh["pp"].size())[-1 - stage]'),),
        ("misordered", "wrong-value"),
        ("order", "stage|layer"),
        ("compare the outputs module by module",),
    ),
    Bug(
        "two stages exchanged",
        "pp=4",
        STAGES,
        (('tensor_split(mesh["pp"].size())[stage]', 'tensor_split(mesh["pp"].size())[[0, 2, 1, 3][stage]]'),),
        ("misordered", "wrong-value"),
        ("order", "stage|layer"),
        ("compare the outputs module by module",),
    ),
    Bug(
        "layers dealt out in turn to stages that follow one another",
        "pp=2",
        STAGES,
        (
            (
                'return torch.arange(LAYERS).tensor_split(mesh["pp"].size())[stage].tolist()',
                'return torch.arange(LAYERS)[stage :: mesh["pp"].size()].tolist()',
            ),
        ),
        ("misordered", "wrong-value"),
        ("order|round-robin", "stage|layer"),
        ("compare the outputs module by module",),
    ),
    Bug(
        "layers left over lost",
        "pp=2",
        STAGES.replace("LAYERS = 4", "LAYERS = 5"),
        (
            (
                'return torch.arange(LAYERS).tensor_split(mesh["pp"].size())[stage].tolist()',
                'return torch.arange(LAYERS).split(LAYERS // mesh["pp"].size())[stage].tolist()',
            ),
        ),
        ("missing", "incomplete"),
        ("layers.4",),
    ),
    Bug(
        "a layer on two stages",
        "pp=2",
        STAGES,
        (("[stage].tolist()", "[stage].tolist() + ([2] if stage == 0 else [])"),),
        ("duplicated", "wrong-value", "unreduced-gradient"),
        ("layers.2", "twice|two stages|several stages|both"),
    ),
    Bug(
        "losses of micro-batches summed",
        "pp=2",
        MICRO,
        (("(loss / PARTS).backward()", "loss.backward()"),),
        ("wrong-scale",),
        ("3 times", "micro-batch"),
    ),
    Bug(
        "gradients reduced over pp where dp is meant",
        "dp=2,pp=2",
        WITH_DATA,
        (('mesh.get_group("dp")', 'mesh.get_group("pp")'),),
        ("unreduced-gradient", "wrong-value"),
        ("over pp", "dp"),
        ("clipping",),
    ),
    Bug(
        "gradients of a tied embedding and head not summed",
        "pp=2",
        TIED,
        (("    sum_ties(model, mesh)\n    return loss", "    return loss"),),
        ("unreduced-gradient",),
        ("head.weight", "embed.weight", "sum"),
    ),
    Bug(
        "gradients of a tied embedding and head averaged",
        "pp=2",
        TIED,
        (
            (
                "        distributed.all_reduce(tied.weight.grad, group=ends)",
                "        distributed.all_reduce(tied.weight.grad, group=ends)\n        tied.weight.grad /= 2",
            ),
        ),
        ("wrong-scale",),
        ("1/2", "SUM|sum", "pp|tied"),
    ),
    Bug(
        "tied shards of different dims summed as they lie",
        "pp=2,tp=2",
        TIED_SHARDS,
        (("EMBED, HEAD = 0, 0", "EMBED, HEAD = 0, 1"),),
        ("wrong-value", "misordered", "unreduced-gradient"),
        ("embed.weight", "head.weight", "tied|one tensor", "split|shards|dim"),
    ),
    Bug(
        "a V of stages in the order of a loop",
        "pp=2",
        V_SHAPED,
        (("return [rank, 2 * size - 1 - rank]", "return [rank, size + rank]"),),
        ("misordered", "wrong-value"),
        ("order", "stage|layer"),
        ("compare the outputs module by module",),
    ),
    Bug(
        "the first micro-batch sent every time",
        "pp=2",
        MICRO.replace("    output = model(x)\n", "    output = model(x)\n"),
        (
            (
                "for part in rows.chunk(PARTS)]",
                'for part in (rows.chunk(PARTS) if mesh.get_local_rank("pp") else rows.chunk(PARTS)[:1] * PARTS)]',
            ),
        ),
        ("wrong-value", "misordered", "duplicated"),
        ("micro-batch|repeat",),
    ),
    Bug(
        "outputs of micro-batches taken last first",
        "pp=2",
        ALL_FORWARD,
        (("outputs.pop(0)", "outputs.pop()"),),
        ("wrong-value",),
        ("micro-batches 3, 2, 1, 0", "outputs.pop(0)"),
        never=("given another input",),
        with_lines=True,
    ),
    Bug(
        "outputs of micro-batches taken last first on a stage between others",
        "pp=4",
        ALL_FORWARD,
        (
            ("outputs.pop(0)", "outputs.pop(-(stage == 1))"),
            ("inputs[number].grad", "inputs[PARTS - 1 - number if stage == 1 else number].grad"),
        ),
        ("wrong-value",),
        ("on rank 1", "micro-batches 3, 2, 1, 0"),
        never=("given another input",),
        with_lines=True,
    ),
    Healthy("the loss and the output on the first rank of pp", "pp=2", V_SHAPED),
    Healthy(
        "all backwards last first",
        "pp=2",
        ALL_FORWARD.replace("range(PARTS):", "reversed(range(PARTS)):").replace("outputs.pop(0)", "outputs.pop()"),
    ),
    Healthy("more layers on the first stage", "pp=2", STAGES.replace("LAYERS = 4", "LAYERS = 5")),
)
