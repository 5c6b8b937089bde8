"""Bugs whose cause is proved by what would be right: another order of dims, another expert, other counts or flags."""

from __future__ import annotations

from tests.bugs.case import Bug

DECAYS = """
BATCH_AXES = ()
WIDTH = 8


class Mixer(nn.Module):
    rank, size, group = 0, 1, None

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, WIDTH, bias=False), nn.Linear(WIDTH, 6, bias=False)

    def decays(self, number):
        return torch.exp(torch.arange(number) * -2.0 / number)

    def forward(self, x):
        hidden = torch.relu(self.up(x))
        number, first = hidden.size(-1), self.rank * hidden.size(-1)
        decays = self.decays(number * self.size)[first : first + number]
        y = self.down(hidden * decays.to(x.dtype))
        return y if self.group is None else Sum.apply(y, self.group)


def build():
    return nn.Sequential(nn.Linear(6, 6), Mixer())


def batch():
    return torch.randn(5, 6)


def parallelize(model, mesh):
    mixer = model[1]
    mixer.rank, mixer.size, mixer.group = mesh.get_local_rank(), mesh.size(), mesh.get_group()
    mixer.up.weight = nn.Parameter(mixer.up.weight.detach().chunk(mixer.size, 0)[mixer.rank].clone())
    mixer.down.weight = nn.Parameter(mixer.down.weight.detach().chunk(mixer.size, 1)[mixer.rank].clone())
    for weight in model[0].parameters():
        weight.register_post_accumulate_grad_hook(lambda weight: distributed.all_reduce(weight.grad))
"""

GATHERED = """
BATCH_AXES = ()


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.rank = distributed.get_rank(group)
        parts = x.new_empty(distributed.get_world_size(group), *x.shape)
        distributed.all_gather_into_tensor(parts.flatten(0, 1), x.contiguous(), group=group)
        return parts

    @staticmethod
    def backward(ctx, gradient):
        return gradient[ctx.rank], None


class Head(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 12)

    def forward(self, x):
        y = self.linear(x)
        if self.group is None:
            return y
        return Gather.apply(y, self.group).permute(1, 2, 0, 3).flatten(2)


def build():
    return Head()


def batch():
    return torch.randn(4, 3, 6)


def parallelize(model, mesh):
    model.group = mesh.get_group()
    for name in ("weight", "bias"):
        part = getattr(model.linear, name).detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
        setattr(model.linear, name, nn.Parameter(part))
"""

EXPERTS = """
BATCH_AXES = ("ep",)
NUMBER, WIDTH = 6, 5


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sent, received, group):
        ctx.sides = sent, received, group
        made = x.new_empty(sum(received), *x.shape[1:])
        distributed.all_to_all_single(made, x.contiguous(), received, sent, group=group)
        return made

    @staticmethod
    def backward(ctx, gradient):
        sent, received, group = ctx.sides
        return Exchange.apply(gradient, received, sent, group), None, None, None


class Routed(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, NUMBER)
        self.weights = nn.Parameter(torch.randn(NUMBER, WIDTH, WIDTH))

    def experts(self, rows, counts):
        return torch.cat([rows @ weight for rows, weight in zip(rows.split(counts), self.weights)])

    def forward(self, x):
        scores, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=NUMBER)
        y = self.experts(x[order], counts.tolist()) if self.group is None else self.routed(x[order], counts)
        return x + torch.zeros_like(y).index_copy(0, order, y) * scores[:, None]

    def routed(self, rows, counts):
        size = distributed.get_world_size(self.group)
        came = torch.empty_like(counts)
        distributed.all_to_all_single(came, counts, group=self.group)
        came = came.view(size, -1)
        sent, received = counts.view(size, -1).sum(1).tolist(), came.sum(1).tolist()
        rows = Exchange.apply(rows, sent, received, self.group)
        experts = torch.arange(came.size(1)).repeat(size).repeat_interleave(came.flatten())
        order = experts.argsort(stable=True)
        y = self.experts(rows[order], came.sum(0).tolist())
        y = torch.zeros_like(y).index_copy(0, order, y)
        return Exchange.apply(y, received, sent, self.group)


def build():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Routed(), nn.Linear(WIDTH, 3))


def batch():
    return torch.randn(24, WIDTH)


def parallelize(model, mesh):
    size, routed = mesh.size(), model[1]
    routed.group = mesh.get_group()
    routed.weights = nn.Parameter(routed.weights.detach().chunk(size)[mesh.get_local_rank()].clone())

    def average(weight):
        if weight is not routed.weights:
            distributed.all_reduce(weight.grad)
        weight.grad /= size

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(average)
"""

TABLES = """
BATCH_AXES = ("dp",)
NUMBER, WIDTH = 3, 4


class Tables(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(9, WIDTH) for _ in range(NUMBER))
        self.mix = nn.Linear(WIDTH, 2)

    def lookup(self, ids):
        return torch.stack([table(ids[:, at]) for at, table in enumerate(self.tables)], 1)

    def parts(self, ids):
        size = distributed.get_world_size(self.group)
        every = ids.new_empty(size * len(ids), NUMBER)
        distributed.all_gather_into_tensor(every, ids.contiguous(), group=self.group)
        parts = self.lookup(every).unflatten(0, (size, -1))
        return Swap.apply(parts, self.group).permute(1, 2, 0, 3).flatten(2)

    def forward(self, ids):
        rows = self.lookup(ids) if self.group is None else self.parts(ids)
        return self.mix(rows).sum(1)


class Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, x = group, x.contiguous()
        made = torch.empty_like(x)
        distributed.all_to_all_single(made, x, group=group)
        return made

    @staticmethod
    def backward(ctx, gradient):
        return Swap.apply(gradient, ctx.group), None


def build():
    return Tables()


def batch():
    return torch.randint(9, (12, NUMBER))


def parallelize(model, mesh):
    size, rank, model.group = mesh.size(), mesh.get_local_rank(), mesh.get_group()

    def scale(weight):
        weight.grad /= size

    def average(weight):
        distributed.all_reduce(weight.grad)
        weight.grad /= size

    for table in model.tables:
        table.weight = nn.Parameter(table.weight.detach().chunk(size, 1)[rank].clone())
        table.weight.register_post_accumulate_grad_hook(scale)
    for weight in model.mix.parameters():
        weight.register_post_accumulate_grad_hook(average)
"""

STAGED = """
STAGE_AXES = ("pp",)
LAYERS = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, scale, mask):
        scores = (x @ x.T).masked_fill(mask, -1e9).softmax(-1)
        return x + torch.tanh(self.linear(scores @ x)) * scale


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Block() for number in range(LAYERS)})

    def forward(self, x):
        at = torch.arange(len(x))
        later = at > at[:, None]
        for number, (name, layer) in enumerate(self.layers.items()):
            scale = 1.0 / (int(name) + 1.5)
            far = later | (at[:, None] - at > 2) if int(name) == 0 else later
            x = layer(x, scale, far)
        return x


def build():
    return Blocks()


def batch():
    return torch.randn(6, 8)


def parallelize(model, mesh):
    keeps = torch.arange(LAYERS).tensor_split(mesh["pp"].size())[mesh.get_local_rank("pp")].tolist()
    model.layers = nn.ModuleDict({str(number): model.layers[str(number)] for number in keeps})


def stages(model, mesh):
    return {mesh.get_local_rank("pp"): model}


def loss(model, rows):
    return model(rows).square().mean()


def step(model, rows, mesh):
    stage, last, group = mesh.get_local_rank("pp"), mesh["pp"].size() - 1, mesh.get_group("pp")
    if stage > 0:
        rows = torch.empty_like(rows)
        distributed.recv(rows, group_src=stage - 1, group=group)
        rows.requires_grad_()
    made = model(rows)
    if stage < last:
        distributed.send(made.detach(), group_dst=stage + 1, group=group)
        gradient = torch.empty_like(made)
        distributed.recv(gradient, group_src=stage + 1, group=group)
        made.backward(gradient)
        total = torch.zeros((), dtype=made.dtype)
    else:
        total = made.square().mean()
        total.backward()
    if stage > 0:
        distributed.send(rows.grad, group_dst=stage - 1, group=group)
    total = total.detach().clone()
    distributed.broadcast(total, group_src=last, group=group)
    return total
"""

SHIFTED = """
BATCH_AXES = {"cp": 1}


def moved(x, by, group):
    rank, size, came, calls = distributed.get_rank(group), distributed.get_world_size(group), torch.zeros_like(x), []
    if 0 <= rank + by < size:
        calls.append(distributed.P2POp(distributed.isend, x, group=group, group_peer=rank + by))
    if 0 <= rank - by < size:
        calls.append(distributed.P2POp(distributed.irecv, came, group=group, group_peer=rank - by))
    for call in distributed.batch_isend_irecv(calls):
        call.wait()
    return came


class Before(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return torch.cat([moved(x[:, -1:].contiguous(), 1, group), x[:, :-1]], 1)

    @staticmethod
    def backward(ctx, gradient):
        back = torch.cat([gradient[:, 1:], torch.zeros_like(gradient[:, :1])], 1)
        back[:, -1:] += moved(gradient[:, :1].contiguous(), -1, ctx.group)
        return back, None


class Mix(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.key = nn.Linear(6, 6)

    def forward(self, x):
        before = functional.pad(x, (0, 0, 1, 0))[:, :-1] if self.group is None else Before.apply(x, self.group)
        return x + torch.tanh(self.key(before - x))


def build():
    return nn.Sequential(nn.Linear(6, 6), Mix(), Mix())


def batch():
    return torch.randn(3, 8, 6)


def parallelize(model, mesh):
    model[1].group = model[2].group = mesh.get_group()

    def average(weight):
        distributed.all_reduce(weight.grad)
        weight.grad /= mesh.size()

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(average)
"""

GUIDED = """
BATCH_AXES = ()


class Guided(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.up, self.gate = nn.Linear(6, 8, bias=False), nn.Linear(5, 8, bias=False)
        self.down = nn.Linear(8, 6, bias=False)

    def forward(self, x, guide):
        inner = x if self.group is None else Copy.apply(x, self.group)
        if self.group is not None:
            guide = Copy.apply(guide, self.group)
        y = self.down(torch.tanh(self.up(inner)) * torch.sigmoid(self.gate(guide)))
        return x + (y if self.group is None else Sum.apply(y, self.group))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 5)
        self.layers = nn.ModuleList(Guided() for _ in range(2))

    def forward(self, x):
        guide = self.embed(x[:, :4])
        for layer in self.layers:
            x = layer(x, guide)
        return x


def build():
    return Net()


def batch():
    return torch.randn(5, 6)


def parallelize(model, mesh):
    for layer in model.layers:
        layer.group = mesh.get_group()
        for name, dim in (("up", 0), ("gate", 0), ("down", 1)):
            weight = getattr(layer, name).weight
            part = weight.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()].clone()
            getattr(layer, name).weight = nn.Parameter(part)
"""

RETURNED = """
BATCH_AXES = ()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x, due):
        y = self.up(x)
        if isinstance(y, DTensor):
            due = distribute_tensor(due, y.device_mesh, [Shard(1)])
        loss = functional.mse_loss(torch.tanh(y), due, reduction="sum") / due.numel()
        return loss.full_tensor() if isinstance(loss, DTensor) else loss


def build():
    return Net()


def batch():
    return torch.randn(4, 6), torch.randn(4, 8)


def loss(model, batch):
    return model(*batch)


def parallelize(model, mesh):
    parallelize_module(model, mesh, {"up": ColwiseParallel(use_local_output=False)})
"""

CASES = (
    Bug(
        "a guide that two layers read for their own columns",
        "tp=2",
        GUIDED,
        (("            guide = Copy.apply(guide, self.group)\n", "            guide = guide.clone()\n"),),
        ("unreduced-gradient",),
        ("input 1 (counted from 0)", "layers.0", "layers.1", "once, behind embed"),
        with_lines=True,
    ),
    Bug(
        "a mean over a shard in a loss that the model returns",
        "tp=2",
        RETURNED,
        (('due, reduction="sum") / due.numel()', "due)"),),
        ("wrong-scale",),
        ("mse_loss", "torch's rule", "reduction='sum'"),
        ("nn.functional.all_reduce", "register_hook"),
        with_lines=True,
    ),
    Bug(
        "decays of a count that is the rank's own",
        "tp=2",
        DECAYS,
        (("self.decays(number * self.size)[first : first + number]", "self.decays(number)"),),
        ("wrong-value",),
        ("counts of their own part", "arange gets 4 for 8", "take the rank's own part of the result"),
        ("own offset",),
        with_lines=True,
    ),
    Bug(
        "decays that all ranks count from 0",
        "tp=2",
        DECAYS.replace("* -2.0 / number", "* -0.1"),
        (("self.decays(number * self.size)[first : first + number]", "self.decays(number)"),),
        ("wrong-value",),
        ("rank's own offset", "torch.arange(number) * -0.1"),
        ("counts of their own part",),
        with_lines=True,
    ),
    Bug(
        "columns that are gathered behind the rows",
        "tp=2",
        GATHERED,
        ((".permute(1, 2, 0, 3).flatten(2)", ".transpose(0, 1).reshape(*y.shape[:2], -1)"),),
        ("wrong-value",),
        ("merges dims in a wrong order", "permute("),
        with_lines=True,
    ),
    Bug(
        "columns of tables merged with those of the next table",
        "dp=2",
        TABLES,
        ((".permute(1, 2, 0, 3).flatten(2)", ".transpose(0, 1).reshape(len(ids), NUMBER, WIDTH)"),),
        ("wrong-value",),
        ("merges dims in a wrong order", "permute("),
        ("order of arrival", "doesn't have"),
        with_lines=True,
    ),
    Bug(
        "received rows numbered as if sorted",
        "ep=2",
        EXPERTS,
        ((".repeat(size).repeat_interleave(came.flatten())", ".repeat_interleave(came.sum(0))"),),
        ("wrong-value",),
        ("numbers of other experts", "experts = torch.arange"),
        ("different numbering", "operands"),
        with_lines=True,
    ),
    Bug(
        "received rows given to experts unsorted",
        "ep=2",
        EXPERTS,
        (("        order = experts.argsort(stable=True)\n", "        order = torch.arange(len(experts))\n"),),
        ("wrong-value",),
        ("another of the rank's experts", "sort the received rows"),
        ("different numbering", "operands", "numbers of other experts"),
        with_lines=True,
    ),
    Bug(
        "a factor by the number of a layer in its stage",
        "pp=2",
        STAGED,
        (("1.0 / (int(name) + 1.5)", "1.0 / (number + 1.5)"),),
        ("wrong-value", "wrong-scale"),
        ("layers.2", "mul", "0.2857"),
        with_lines=True,
    ),
    Bug(
        "a window by the number of a layer in its stage",
        "pp=2",
        STAGED,
        (("if int(name) == 0", "if number == 0"),),
        ("wrong-value",),
        ("layers.2", "`mask`", "masked_fill", "True for False"),
        with_lines=True,
    ),
    Bug(
        "a shift of which one token's gradient is dropped",
        "cp=2",
        SHIFTED,
        (("        back[:, -1:] += moved(gradient[:, :1].contiguous(), -1, ctx.group)\n", ""),),
        ("wrong-value",),
        ("Before.apply", "element 3 of dim 1 on rank 0", "send the gradient"),
        with_lines=True,
    ),
)
