"""Bugs for which something beside the wrong place was blamed: another reader, a bias, a collective that is right."""

from __future__ import annotations

from tests.bugs.case import Bug
from tests.bugs.ring_attention import RING

ADAPTERS = """
BATCH_AXES = ()
class Adapted(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
        self.low, self.high = nn.Linear(inputs, 3, bias=False), nn.Linear(3, outputs, bias=False)
        nn.init.zeros_(self.high.weight)
    def forward(self, x):
        return self.base(x) + 2 * self.high(self.low(x))
class Feed(nn.Module):
    group = None
    def __init__(self):
        super().__init__()
        self.up, self.down = Adapted(12, 16), nn.Linear(16, 12, bias=False)
    def forward(self, x):
        entered = x
        if self.group is not None:
            entered = Copy.apply(x, self.group)
        y = self.down(torch.nn.functional.silu(self.up(entered)))
        if self.group is not None:
            y = Sum.apply(y, self.group)
        return x + y
def build(): return nn.Sequential(Feed(), Feed())
def batch(): return torch.randn(6, 12)
def parallelize(model, mesh):
    at, size = mesh.get_local_rank(), mesh.size()
    for feed in model:
        feed.group = mesh.get_group()
        for linear in (feed.up.base, feed.up.high):
            part = linear.weight.detach().chunk(size, 0)[at].clone()
            linear.weight = nn.Parameter(part, requires_grad=linear.weight.requires_grad)
        feed.down.weight = nn.Parameter(feed.down.weight.detach().chunk(size, 1)[at].clone())
        feed.up.low.weight.register_post_accumulate_grad_hook(
            lambda weight: distributed.all_reduce(weight.grad, group=mesh.get_group()))
"""

BAGS = """
BATCH_AXES = ()
class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 6))
        self.group, self.first, self.rows = None, 0, 16
    def forward(self, ids):
        here = (ids >= self.first) & (ids < self.first + self.rows)
        rows = functional.embedding((ids - self.first).clamp(0, self.rows - 1), self.weight) * here[..., None]
        total = rows.sum(-2)
        if self.group is not None:
            total = Sum.apply(total, self.group)
        return total / ids.size(-1)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags, self.deep = nn.ModuleList(Bag() for _ in range(3)), nn.Linear(18, 4)
    def forward(self, ids):
        return self.deep(torch.cat([bag(part) for bag, part in zip(self.bags, ids.unbind(1))], -1))
def build(): return Model()
def batch(): return torch.randint(16, (4, 3, 5))
def parallelize(model, mesh):
    for bag in model.bags:
        bag.group, bag.rows = mesh.get_group(), 16 // mesh.size()
        bag.first = mesh.get_local_rank() * bag.rows
        bag.weight = nn.Parameter(bag.weight.detach().chunk(mesh.size())[mesh.get_local_rank()].clone())
"""

NORM = """
BATCH_AXES = ()
class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.group, self.size = nn.Parameter(1 + 0.2 * torch.randn(16)), None, 1
    def forward(self, x):
        mean = x.square().mean(-1, keepdim=True)
        if self.group is not None:
            mean = Copy.apply(Sum.apply(mean, self.group), self.group) / self.size
        return x * (mean + 1e-6).rsqrt() * self.weight
def build(): return nn.Sequential(nn.Linear(6, 16, bias=False), Norm(), nn.Linear(16, 6, bias=False))
def batch(): return torch.randn(5, 6)
def parallelize(model, mesh):
    at, size = mesh.get_local_rank(), mesh.size()
    model[0].weight = nn.Parameter(model[0].weight.detach().chunk(size, 0)[at].clone())
    model[1].weight = nn.Parameter(model[1].weight.detach().chunk(size, 0)[at].clone())
    model[2].weight = nn.Parameter(model[2].weight.detach().chunk(size, 1)[at].clone())
    model[1].group, model[1].size = mesh.get_group(), size
    model[2].register_forward_hook(lambda module, inputs, y: Sum.apply(y, mesh.get_group()))
"""

EXPERTS = """
BATCH_AXES = ()
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, 4, bias=False)
        self.experts = nn.ModuleDict({str(at): nn.Linear(6, 6) for at in range(4)})
        self.group = None
    def forward(self, x):
        weight, tokens = self.router(x).softmax(-1), x
        if self.group is not None:
            tokens, weight = Copy.apply(tokens, self.group), Copy.apply(weight, self.group)
        y = sum(weight[..., int(at), None] * expert(tokens) for at, expert in self.experts.items())
        return Sum.apply(y, self.group) if self.group is not None else y
def build(): return nn.Sequential(nn.Linear(6, 6), Experts())
def batch(): return torch.randn(5, 6)
def parallelize(model, mesh):
    rank, each = mesh.get_local_rank(), 4 // mesh.size()
    model[1].group = mesh.get_group()
    own = map(str, range(rank * each, (rank + 1) * each))
    model[1].experts = nn.ModuleDict({at: model[1].experts[at] for at in own})
"""

HEADS = """
BATCH_AXES = {"cp": 1}
def exchanged(x, group, cut, join):
    parts = [part.contiguous() for part in x.chunk(distributed.get_world_size(group), cut)]
    came = [torch.empty_like(part) for part in parts]
    distributed.all_to_all(came, parts, group=group)
    return torch.cat(came, join)
class ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return exchanged(x, group, 2, 1)
    @staticmethod
    def backward(ctx, grad):
        return exchanged(grad, ctx.group, 1, 2), None
class ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return exchanged(x, group, 1, 2)
    @staticmethod
    def backward(ctx, grad):
        return exchanged(grad, ctx.group, 2, 1), None
class Attention(nn.Module):
    group = None
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False)
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 2)).unbind(2)
        if self.group is not None:
            q, k, v = (ToHeads.apply(part, self.group) for part in (q, k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        if self.group is not None:
            y = ToTokens.apply(y.contiguous(), self.group)
        return self.out(y.flatten(2))
def build(): return nn.Sequential(nn.Linear(8, 8), Attention())
def batch(): return torch.randn(2, 8, 8)
def parallelize(model, mesh):
    model[1].group = mesh.get_group()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda weight: distributed.all_reduce(weight.grad, op=distributed.ReduceOp.AVG, group=mesh.get_group()))
def loss(model, x): return model(x).square().mean()
"""

FROZEN = """
BATCH_AXES = ("dp",)
OLD = 6
def build(): return nn.Sequential(nn.Embedding(20, 12), nn.Linear(12, 20, bias=False))
def parallelize(model, mesh): fully_shard(model, mesh=mesh)
def freeze(table):
    rows, first = table.grad, 0
    if isinstance(rows, DTensor):
        rows = rows.to_local()
        first = table.device_mesh.get_local_rank() * len(rows)
    rows[:max(OLD - first, 0)] = 0
def optimizer(model, mesh):
    steps = torch.optim.Adam(model.parameters(), lr=0.01)
    steps.register_step_pre_hook(lambda *_: freeze(model[0].weight))
    return steps
def batch(): return torch.randint(20, (4, 7))
def loss(model, words):
    return functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
"""

STATES = """
BATCH_AXES = {"cp": 1}
class Scan(nn.Module):
    def __init__(self):
        super().__init__()
        self.value, self.out = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.decay, self.rank, self.group = nn.Parameter(torch.rand(6)), 0, None
    def scan(self, state, v, w):
        states = []
        for at in range(v.size(1)):
            state = state * w + v[:, at]
            states.append(state)
        return torch.stack(states, 1), state
    def forward(self, x):
        v, w = self.value(x), self.decay.sigmoid()
        state = torch.zeros_like(v[:, 0])
        if self.group is not None:
            _, end = self.scan(state, v, w)
            ends = distributed.nn.functional.all_gather(end.contiguous(), group=self.group)
            state = state + 0 * sum(ends)
            for other in ends[:self.rank]:
                state = state * w ** x.size(1) + other
        states, _ = self.scan(state, v, w)
        return self.out(states)
def build(): return nn.Sequential(nn.Linear(6, 6), Scan())
def batch(): return torch.randn(2, 8, 6)
def parallelize(model, mesh):
    model[1].rank, model[1].group = mesh.get_local_rank(), mesh.get_group()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda weight: distributed.all_reduce(weight.grad, op=distributed.ReduceOp.AVG, group=mesh.get_group()))
def loss(model, x): return model(x).square().mean()
"""

COPIES = """
BATCH_AXES = ()
class Feed(nn.Module):
    group = None
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
    def forward(self, x):
        entered = x if self.group is None else Copy.apply(x, self.group)
        y = self.down(functional.gelu(self.up(entered)))
        return x + (y if self.group is None else Sum.apply(y, self.group))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(torch.randn(5, 8))
        self.feeds, self.last = nn.Sequential(Feed(), Feed()), nn.Linear(8, 3)
    def forward(self, x): return self.last(self.feeds(x + self.places))
def build(): return Model()
def batch(): return torch.randn(4, 5, 8)
def parallelize(model, mesh):
    at, size = mesh.get_local_rank(), mesh.size()
    for feed in model.feeds:
        feed.group = mesh.get_group()
        feed.up.weight = nn.Parameter(feed.up.weight.detach().chunk(size, 0)[at].clone())
        feed.up.bias = nn.Parameter(feed.up.bias.detach().chunk(size, 0)[at].clone())
        feed.down.weight = nn.Parameter(feed.down.weight.detach().chunk(size, 1)[at].clone())
def loss(model, x): return model(x).square().mean()
"""

JOINED = """
BATCH_AXES = {"cp": 1}
class Read(nn.Module):
    group = None
    def __init__(self):
        super().__init__()
        self.ask = nn.Parameter(torch.randn(3, 8))
        self.key, self.value, self.out = (nn.Linear(8, 8, bias=False) for _ in range(3))
    def forward(self, x):
        ask = self.ask if self.group is None else Copy.apply(self.ask, self.group)
        scores = ask @ self.key(x).mT
        found = scores.softmax(-1) @ self.value(x)
        if self.group is not None:
            own = scores.logsumexp(-1, keepdim=True)
            top = own.detach().clone()
            distributed.all_reduce(top, op=distributed.ReduceOp.MAX, group=self.group)
            mass = (own - top).exp()
            every = Copy.apply(Sum.apply(mass, self.group), self.group)
            found = Sum.apply(found * mass / every, self.group)
        return self.out(found)
def build(): return Read()
def batch(): return torch.randn(2, 10, 8)
def parallelize(model, mesh):
    model.group = mesh.get_group()
    for parameter in (model.key.weight, model.value.weight):
        parameter.register_post_accumulate_grad_hook(
            lambda weight: distributed.all_reduce(weight.grad, group=mesh.get_group()))
def loss(model, x): return model(x).square().mean()
"""

MASKED = """
STAGE_AXES = ("pp",)
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
    def forward(self, x, seen):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(functional.scaled_dot_product_attention(q, k, v, seen[:, None]))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(at): Layer() for at in range(2)})
    def forward(self, x, seen):
        for layer in self.layers.values():
            x = layer(x, seen)
        return x
def build(): return Model()
def batch():
    return torch.randn(4, 6, 8), torch.arange(6) < torch.tensor([6, 3, 4, 2])[:, None]
def loss(model, batch): return model(*batch).square().mean()
def parallelize(model, mesh):
    at = str(mesh.get_local_rank())
    model.layers = nn.ModuleDict({at: model.layers[at]})
def stages(model, mesh): return {mesh.get_local_rank(): model}
def step(model, batch, mesh):
    stage, group = mesh.get_local_rank(), mesh.get_group()
    values, masks = (part.chunk(2) for part in batch)
    outputs, inputs, total = [], [], torch.zeros((), dtype=values[0].dtype)
    for number, (x, seen) in enumerate(zip(values, masks)):
        if stage:
            x = torch.empty_like(x)
            distributed.recv(x, 0)
            x.requires_grad_()
        y = model(x, seen)
        if stage:
            y = y.square().mean() / 2
            total += y.detach()
        else:
            distributed.send(y.detach(), 1)
        inputs.append(x)
        outputs.append(y)
    for x, y in zip(inputs, outputs):
        gradient = None
        if not stage:
            gradient = torch.empty_like(y)
            distributed.recv(gradient, 1)
        y.backward(gradient)
        if stage:
            distributed.send(x.grad, 0)
    distributed.broadcast(total, 1, group=group)
    return total
"""

PAIRS = """
BATCH_AXES = ("dp",)
class Pairs(nn.Module):
    group, first = None, 0
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(5, 8), nn.Linear(6, 8)
    def forward(self, a, b):
        a, b = (functional.normalize(side, dim=-1) for side in (self.left(a), self.right(b)))
        every = b
        if self.group is not None:
            every = torch.cat(distributed.nn.functional.all_gather(b.contiguous(), group=self.group))
        labels = torch.arange(len(a)) + self.first * len(a)
        return functional.cross_entropy(4 * a @ every.T, labels)
def build(): return Pairs()
def batch(): return torch.randn(8, 5), torch.randn(8, 6)
def parallelize(model, mesh):
    model.group, model.first = mesh.get_group(), mesh.get_local_rank()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda weight: distributed.all_reduce(weight.grad, op=distributed.ReduceOp.AVG, group=mesh.get_group()))
def loss(model, batch): return model(*batch)
"""

CASES = (
    Bug(
        "an adapted layer that doesn't sum its input's gradient, beside a residual",
        "tp=2",
        ADAPTERS,
        (("            entered = Copy.apply(x, self.group)", "            pass"),),
        ("unreduced-gradient",),
        ("nothing sums the ranks' parts of the gradient", "where feed|where 1.up begins", "over tp"),
        ("doesn't match its forward", "without a backward"),
        with_lines=True,
    ),
    Bug(
        "bags of a table in parts that a layer with a bias reads unsummed",
        "tp=2",
        BAGS,
        (("            total = Sum.apply(total, self.group)", "            pass"),),
        ("unreduced-output",),
        ("output of bags.2 is not summed|nothing sums", "over tp"),
        ("adds deep.bias",),
        with_lines=True,
    ),
    Bug(
        "means of parts that are summed and not divided",
        "tp=2",
        NORM,
        ((" / self.size", ""),),
        ("wrong-scale",),
        ("sums over tp the means", "2 times the mean", "divide the result"),
        ("nothing averages",),
        with_lines=True,
    ),
    Bug(
        "every rank keeps the first rank's experts",
        "ep=2",
        EXPERTS,
        (("rank, each = mesh.get_local_rank()", "rank, each = 0"),),
        ("incomplete",),
        ("every rank keeps experts 0-1", "get_local_rank('ep')"),
        ("renames, replaces or drops",),
    ),
    Bug(
        "weights of experts whose gradient nobody sums, beside tokens whose gradient is summed",
        "ep=2",
        EXPERTS,
        (("Copy.apply(tokens, self.group), Copy.apply(weight, self.group)", "Copy.apply(tokens, self.group), weight"),),
        ("unreduced-gradient",),
        ("sends back each rank's own part of a gradient", "over ep"),
        ("collective without a backward", "wraps this parameter"),
        with_lines=True,
    ),
    Bug(
        "a backward that leaves out the exchange that undoes its forward",
        "cp=2",
        HEADS,
        (
            (
                "        return exchanged(grad, ctx.group, 1, 2), None",
                "        return torch.cat(grad.chunk(distributed.get_world_size(ctx.group), 1), 2), None",
            ),
        ),
        ("wrong-value",),
        ("exchanges numbers in forward", "doesn't send the gradients back"),
        ("needs a sum in backward",),
        with_lines=True,
    ),
    Bug(
        "old rows that are frozen by the other rank's first row",
        "dp=2",
        FROZEN,
        (("table.device_mesh.get_local_rank() * len(rows)", "(1 - table.device_mesh.get_local_rank()) * len(rows)"),),
        ("wrong-value",),
        ("counts the first row of a rank's part wrongly", "rank 0 steps rows 0:6"),
        ("parameter group",),
    ),
    Bug(
        "states of earlier parts that are subtracted",
        "cp=2",
        STATES,
        (("state * w ** x.size(1) + other", "state * w ** x.size(1) - other"),),
        ("wrong-value",),
        ("by all_gather", "wrong order or scale"),
        ("but needs the other parts too",),
    ),
    Bug(
        "weighted sums of ranks' own keys that are averaged",
        "cp=2",
        JOINED,
        (("mass = (own - top).exp()", "mass = torch.ones_like(own)"),),
        ("wrong-value",),
        ("without their weights", "exp(logsumexp of its scores"),
        ("gather or reduce the input of softmax",),
        with_lines=True,
    ),
    Bug(
        "weighted sums that are joined rightly, and a result that is squared behind them",
        "cp=2",
        JOINED,
        (("return self.out(found)", "return self.out(found if self.group is None else found.square())"),),
        ("wrong-value",),
        ("case.py:",),
        ("without their weights",),
        with_lines=True,
    ),
    Bug(
        "a later micro-batch with the first one's mask",
        "pp=2",
        MASKED,
        (("        y = model(x, seen)", "        y = model(x, masks[0] if stage else seen)"),),
        ("wrong-value",),
        ("layers.1 is given a different input 1",),
        ("positions that the keys don't have",),
        with_lines=True,
    ),
    Bug(
        "labels of pairs that are counted from 0 beside the rows of all ranks",
        "dp=2",
        PAIRS,
        ((" + self.first * len(a)", ""),),
        ("wrong-value",),
        ("labels = torch.arange(len(a))", "different rank's part", "rank's own offset"),
        ("No rule explains",),
        with_lines=True,
    ),
    Bug(
        "heads of all tokens that are taken for all heads of the rank's tokens",
        "cp=2",
        HEADS,
        (
            ("            y = ToTokens.apply(y.contiguous(), self.group)", "            pass"),
            ("return self.out(y.flatten(2))", "return self.out(y.reshape(*x.shape))"),
        ),
        ("wrong-value",),
        ("shape of a part along dim 1", "all_to_all"),
        ("joins parts along the wrong dim",),
        with_lines=True,
    ),
    Bug(
        "a ring whose backward leaves gradients where they are",
        "cp=2",
        RING,
        (("return exchange(grad.contiguous(), ctx.group, -1), None", "return grad, None"),),
        ("wrong-value",),
        ("exchanges numbers in forward", "send the gradient to the rank from which forward receives"),
        ("backward of matmul",),
        with_lines=True,
    ),
    Bug(
        "a ring in which keys and values stay where they are",
        "cp=2",
        RING,
        (("k, v = PassOn.apply(k, self.group), PassOn.apply(v, self.group)", "k, v = k.clone(), v.clone()"),),
        ("wrong-value",),
        ("same block in each of the 2 rounds", "read in the next round what has come"),
        ("although", "scale"),
        with_lines=True,
    ),
    Bug(
        "layers whose inputs' gradients nobody sums, behind a weight of the model's own",
        "tp=2",
        COPIES,
        (("x if self.group is None else Copy.apply(x, self.group)", "x"),),
        ("unreduced-gradient",),
        ("over tp",),
        ("no sum or mean of them is right",),
        with_lines=True,
    ),
)
"""Each with what was said of it before."""
