"""Pieces of programs that several cases begin with."""

MLP = """
class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def build():
    return MLP()


def batch():
    return torch.randn(24, 8)

"""

DATA_PARALLEL = (
    MLP
    + """
BATCH_AXES = ("dp",)


def reduce(model, mesh):
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        parameter.grad /= mesh["dp"].size()


def step(model, rows, mesh):
    loss = model(rows).square().mean()
    loss.backward()
    reduce(model, mesh)
    return loss.detach()

"""
)

FSDP = (
    MLP
    + """
BATCH_AXES = ("fsdp",)


def parallelize(model, mesh):
    fully_shard(model, mesh=mesh["fsdp"])

"""
)

TENSOR_PARALLEL = """
class MLP(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x):
        x = self.norm(x)
        if self.group is None:
            return self.down(torch.tanh(self.up(x)))
        x = Copy.apply(x, self.group)
        x = functional.linear(torch.tanh(self.up(x)), self.down.weight)
        return Sum.apply(x, self.group) + self.down.bias


def build():
    return MLP()


def parallelize(model, mesh):
    model.up.weight = own(model.up.weight, mesh)
    model.down.weight = own(model.down.weight, mesh, 1)
    model.group = mesh.get_group("tp")


def batch():
    return torch.randn(24, 8)

"""

AVERAGED = """
def step(model, rows, mesh):
    loss = model(rows).square().mean()
    loss.backward()
    loss = loss.detach().clone()
    for number in (loss, *(parameter.grad for parameter in model.parameters())):
        distributed.all_reduce(number)
        number /= mesh.size()
    return loss

"""
"""A step whose ranks each have a part of the batch: loss and gradients are means."""

WEIGHT = """
def build():
    return nn.Linear(6, 24, bias=False)


def labelled(rows, mesh, whole, *placements):
    local = rows.clone().contiguous()
    return nn.Parameter(DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride()))

"""
"""One weight of 24 rows and 6 columns, and a way to label a part of it."""

ATTENTION = '''
HEADS, SIZE = 4, 4
FEATURES = HEADS * SIZE


def attend(q, k, v):
    """Let every head of q look at the head of k and v that it shares with its neighbours."""
    q, k, v = (part.unflatten(-1, (-1, SIZE)).transpose(-2, -3) for part in (q, k, v))
    k, v = (part.repeat_interleave(q.shape[-3] // part.shape[-3], -3) for part in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3).flatten(-2)

'''

STAGES = '''
STAGE_AXES = ("pp",)
LAYERS = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Block() for number in range(LAYERS)})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def build():
    return Blocks()


def batch():
    return torch.randn(24, 8)


def layers_of(stage, mesh):
    return torch.arange(LAYERS).tensor_split(mesh["pp"].size())[stage].tolist()


def parallelize(model, mesh):
    names = [str(number) for number in layers_of(mesh.get_local_rank("pp"), mesh)]
    model.layers = nn.ModuleDict({name: model.layers[name] for name in names})


def stages(model, mesh):
    return {mesh.get_local_rank("pp"): model}


def through(model, rows, mesh):
    """Run one micro-batch forward and backward through all stages, and return its loss on every rank."""
    stage, last = mesh.get_local_rank("pp"), mesh["pp"].size() - 1
    group = mesh.get_group("pp")
    ranks = distributed.get_process_group_ranks(group)
    x = rows
    if stage > 0:
        x = torch.empty_like(rows)
        distributed.recv(x, src=ranks[stage - 1])
        x.requires_grad_()
    output = model(x)
    loss = output.square().mean()
    if stage == last:
        backward(loss)
    else:
        distributed.send(output.detach(), dst=ranks[stage + 1])
        gradient = torch.empty_like(output)
        distributed.recv(gradient, src=ranks[stage + 1])
        output.backward(gradient)
    if stage > 0:
        distributed.send(x.grad, dst=ranks[stage - 1])
    loss = loss.detach().clone()
    distributed.broadcast(loss, src=ranks[last], group=group)
    return loss


def backward(loss):
    loss.backward()


def step(model, rows, mesh):
    return through(model, rows, mesh)

'''

VOCABULARY = """
class Speaker(nn.Module):
    group, first = None, 0

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)

    def forward(self, x):
        x = torch.tanh(self.body(x))
        return self.head(x if self.group is None else Copy.apply(x, self.group))


def build():
    return Speaker()


def parallelize(model, mesh):
    model.head.weight = own(model.head.weight, mesh)
    model.group, model.first = mesh.get_group("tp"), 12 // mesh["tp"].size() * mesh.get_local_rank("tp")


def batch():
    return torch.randn(24, 8), torch.randint(12, (24,))


def whole_output(logits, mesh):
    parts = [torch.empty_like(logits) for _ in range(mesh["tp"].size())]
    distributed.all_gather(parts, logits.contiguous(), group=mesh.get_group("tp"))
    return torch.cat(parts, -1)


def loss(model, batch):
    rows, words = batch
    logits = model(rows)
    if model.group is None:
        return functional.cross_entropy(logits, words)
    largest = logits.detach().amax(-1)
    distributed.all_reduce(largest, op=distributed.ReduceOp.MAX, group=model.group)
    total = Sum.apply((logits - largest[:, None]).exp().sum(-1), model.group)
    local = words - model.first
    here = (local >= 0) & (local < logits.shape[-1])
    chosen = logits.gather(-1, local.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0] * here
    chosen = Sum.apply(chosen, model.group)
    return (total.log() + largest - chosen).mean()

"""

BLOCK_BY_HAND = """
class Block(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8, bias=False)

    def forward(self, x):
        h = self.norm(x)
        if self.group is not None:
            h = Copy.apply(h, self.group)
        h = functional.silu(self.up(h))
        h = self.down(h)
        if self.group is not None:
            h = Sum.apply(h, self.group)
        return x + h

"""
"""A residual block whose ranks have their own features, by those two."""
