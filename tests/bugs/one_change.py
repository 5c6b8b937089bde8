"""Bugs that are one change of a right program: another op, a missing collective, another dim."""

from __future__ import annotations

from tests.bugs.case import Bug

EIGHT_BITS_IN = """
class MLP(nn.Module):
    group = None
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16, bias=False)
    def forward(self, x):
        h = torch.relu(self.up(x))
        amax = h.detach().abs().max()
        if self.group is not None:
            distributed.all_reduce(amax, op=distributed.ReduceOp.MAX, group=self.group)
        scale = 448 / amax
        rounded = (h.detach() * scale).to(torch.float8_e4m3fn).to(h.dtype) / scale
        out = self.down(h + (rounded - h.detach()))
        if self.group is not None:
            out = Sum.apply(out, self.group)
        return out
def build(): return MLP()
def parallelize(model, mesh):
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for weight, dim in ((model.up.weight, 0), (model.up.bias, 0), (model.down.weight, 1)):
        weight.data = weight.data.chunk(ranks, dim)[rank].clone()
    model.group = mesh.get_group()
def batch(): return torch.randn(6, 16)
"""

GATHERED = """
MESH = (2,)
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.rows = group, x.shape[1]
        parts = [torch.empty_like(x) for _ in range(group.size())]
        distributed.all_gather(parts, x.contiguous(), group=group)
        scale = torch.empty_like(x[0])
        torch.mul(x[0], 0, out=scale)
        return torch.cat(parts, 1) + scale.sum()
    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        distributed.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), 1)[ctx.group.rank()].contiguous(), None
class Mixing(nn.Module):
    group = None
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.out = nn.Linear(8, 8, bias=False)
    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.group is not None:
            k, v = Gather.apply(k, self.group), Gather.apply(v, self.group)
        return self.out((q @ k.transpose(1, 2)).softmax(-1) @ v)
def build(): return Mixing()
def parallelize(model, mesh): model.group = mesh.get_group()
def batch(): return torch.randn(2, 12, 8)
def step(model, x, mesh):
    size = mesh.size()
    loss = model(x.chunk(size, 1)[mesh.get_local_rank()]).square().mean()
    loss.backward()
    whole = loss.detach().clone()
    for number in (whole, *(weight.grad for weight in model.parameters())):
        distributed.all_reduce(number, group=mesh.get_group())
        number.div_(size)
    return whole
def whole_output(part, mesh): return DTensor.from_local(part, mesh, [Shard(1)]).full_tensor()
"""

POSITIONS = """
MESH = (2,)
class Model(nn.Module):
    mesh = None
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(12, 8))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        n = x.shape[1]
        first = 0 if self.mesh is None else self.mesh.get_local_rank() * n
        angles = (first + torch.arange(n, dtype=x.dtype))[:, None] * torch.arange(1, 9)
        x = x + self.table[first : first + n]
        bias = torch.arange(12, dtype=x.dtype).square().narrow(0, first, n)
        return self.down(torch.tanh(self.up(x * angles.cos() + bias[:, None])))
def build(): return Model()
def parallelize(model, mesh): model.mesh = mesh
def batch(): return torch.randn(2, 12, 8)
def step(model, x, mesh):
    size = mesh.size()
    loss = model(x.chunk(size, 1)[mesh.get_local_rank()]).square().mean()
    loss.backward()
    whole = loss.detach().clone()
    for number in (whole, *(weight.grad for weight in model.parameters())):
        distributed.all_reduce(number, group=mesh.get_group())
        number.div_(size)
    return whole
def whole_output(part, mesh): return DTensor.from_local(part, mesh, [Shard(1)]).full_tensor()
"""

CONTRASTIVE = """
AXES = BATCH_AXES = ("fsdp",)
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.rows = group, len(x)
        parts = [torch.empty_like(x) for _ in range(group.size())]
        distributed.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)
    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        distributed.all_reduce(grad, group=ctx.group)
        start = ctx.group.rank() * ctx.rows
        return grad[start : start + ctx.rows], None
class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 16), nn.Linear(8, 16)
    def forward(self, a, b):
        return functional.normalize(self.left(a), dim=-1), functional.normalize(self.right(b), dim=-1)
def build(): return Towers()
def parallelize(model, mesh): fully_shard(model, mesh=mesh)
def batch():
    a = torch.randn(12, 8)
    return a, a + 0.3 * torch.randn(12, 8)
def loss(model, batch):
    left, right = model(*batch)
    return functional.cross_entropy(left @ right.T / 0.1, torch.arange(len(left)))
def step(model, batch, mesh):
    group = mesh.get_group()
    left, right = model(*batch)
    everyone = Gather.apply(right, group)
    labels = group.rank() * len(left) + torch.arange(len(left))
    value = functional.cross_entropy(left @ everyone.T / 0.1, labels)
    value.backward()
    return value
"""

EXPERTS = """
AXES = ("ep",)
class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, is_sum):
        ctx.group, ctx.is_sum, x = group, is_sum, x.clone()
        if is_sum: distributed.all_reduce(x, group=group)
        return x
    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        if not ctx.is_sum: distributed.all_reduce(grad, group=ctx.group)
        return grad, None, None
class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 12) / 3), nn.Parameter(torch.randn(4, 12, 8) / 3)
        self.first, self.group = 0, None
    def forward(self, x):
        gates, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        if self.group is not None:
            gates, x = Both.apply(gates, self.group, False), Both.apply(x, self.group, False)
        mine = (chosen >= self.first) & (chosen < self.first + len(self.up))
        local = (chosen - self.first).clamp(0, len(self.up) - 1)
        share = x.new_zeros(len(x), len(self.up)).scatter_add(1, local, gates * mine)
        h = torch.einsum("td,edh->teh", x, self.up).relu()
        out = torch.einsum("teh,ehd,te->td", h, self.down, share)
        return out if self.group is None else Both.apply(out, self.group, True)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.moe, self.head = nn.Linear(8, 8), MoE(), nn.Linear(8, 4)
    def forward(self, x):
        x = self.first(x)
        return self.head(x + self.moe(x))
def build(): return Model()
def parallelize(model, mesh):
    moe, rank, size = model.moe, mesh.get_local_rank(), mesh.size()
    moe.up.data, moe.down.data = (w.data.chunk(size)[rank].clone() for w in (moe.up, moe.down))
    moe.first, moe.group = rank * len(moe.up), mesh.get_group()
def batch(): return torch.randn(24, 8)
"""

HALO = """
AXES = ("cp",)
BATCH_AXES = {"cp": 1}
class FromLeft(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, width, group):
        ctx.width, ctx.group, ctx.shape = width, group, x.shape
        tail = x[:, -width:].contiguous()
        tails = [torch.empty_like(tail) for _ in range(group.size())]
        distributed.all_gather(tails, tail, group=group)
        return tails[group.rank() - 1] if group.rank() else torch.zeros_like(tail)
    @staticmethod
    def backward(ctx, grad):
        grads = [torch.zeros_like(grad) for _ in range(ctx.group.size())]
        distributed.all_gather(grads, grad.contiguous(), group=ctx.group)
        out, after = grad.new_zeros(ctx.shape), ctx.group.rank() + 1
        if after < len(grads):
            out[:, -ctx.width :] = grads[after]
        return out, None, None
class Causal(nn.Module):
    group = None
    def __init__(self, dilation):
        super().__init__()
        self.conv, self.reach = nn.Conv1d(8, 8, 3, dilation=dilation), 2 * dilation
    def forward(self, x):
        length = x.shape[1]
        if self.group is not None:
            x = torch.cat([FromLeft.apply(x, self.reach, self.group), x], dim=1)
        x = x.transpose(1, 2)
        x = functional.pad(x, (length + self.reach - x.shape[2], 0))
        return functional.silu(self.conv(x)).transpose(1, 2)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.convs = nn.ModuleList([Causal(1), Causal(2)])
    def forward(self, x):
        x = self.first(x)
        for conv in self.convs:
            x = x + conv(x)
        return self.head(x)
def build(): return Model()
def parallelize(model, mesh):
    for conv in model.convs: conv.group = mesh.get_group()
def batch(): return torch.randn(3, 24, 6)
def loss(model, x): return model(x).square().mean()
def step(model, x, mesh):
    value = loss(model, x)
    value.backward()
    for weight in model.parameters():
        distributed.all_reduce(weight.grad)
        weight.grad.div_(mesh.size())
    return value
"""

OFFSET = ("the offset is wrong", "elements 1 to 6", "elements 6 to 11")

CASES = (
    *(
        Bug(
            f"a rank's offset is its number alone: {what}",
            "cp=2",
            POSITIONS,
            ((right, right.replace("first", "first // n" if right.count("first") == 1 else "(first // n)")),),
            ("wrong-value",),
            OFFSET,
            with_lines=True,
        )
        for what, right in (
            ("angles", "(first + torch.arange(n"),
            ("rows of a table", "self.table[first : first + n]"),
            ("a bias", ".narrow(0, first, n)"),
        )
    ),
    Bug(
        "a rank's offset is its number alone: labels",
        "fsdp=2",
        CONTRASTIVE,
        (("group.rank() * len(left) +", "group.rank() +"),),
        ("wrong-value",),
        OFFSET,
        ("unequal numbers",),
        with_lines=True,
    ),
    Bug(
        "labels of the last rows on every rank",
        "fsdp=2",
        CONTRASTIVE,
        (("group.rank() * len(left) +", "(group.size() - 1) * len(left) +"),),
        ("wrong-value",),
        ("rank 0",),
        ("unequal numbers",),
        with_lines=True,
    ),
    Bug(
        "room for all ranks' keys that nothing writes to",
        "cp=2",
        GATHERED,
        (("distributed.all_gather(parts, x.contiguous(), group=group)", "pass"),),
        ("wrong-value",),
        ("empty_like", "its memory held"),
        ("multiplies by a number",),
        with_lines=True,
    ),
    Bug(
        "keys and values of all ranks are joined along the rows of the batch",
        "cp=2",
        GATHERED,
        (("torch.cat(parts, 1)", "torch.cat(parts, 0).chunk(2)[0].repeat(1, 2, 1)"),),
        ("wrong-value", "misordered"),
        (),
        ("its memory held",),
        with_lines=True,
    ),
    Bug(
        "gates of other ranks' experts are not left out",
        "ep=4",
        EXPERTS,
        (("gates * mine)", "gates)"),),
        ("wrong-value",),
        ("scatter_add", "masked_fill"),
        ("check case.py",),
        with_lines=True,
    ),
    *(
        Bug(
            f"the backward of a halo: {what}",
            "cp=4",
            HALO,
            ((right, wrong),),
            ("wrong-value",),
            ("FromLeft.apply",),
            ("backward of cat", "conv gets the right gradient", ".conv is the first wrong module"),
            with_lines=True,
        )
        for what, right, wrong in (
            ("no collective", "distributed.all_gather(grads, grad.contiguous(), group=ctx.group)", "pass"),
            ("the rank's own", "grads[after]", "grads[after - 1]"),
            ("at the wrong end", "out[:, -ctx.width :]", "out[:, : ctx.width]"),
        )
    ),
    Bug(
        "a float8 scale from the sum of the ranks' largest",
        "tp=2",
        EIGHT_BITS_IN,
        (("op=distributed.ReduceOp.MAX, ", ""),),
        ("wrong-value",),
        ("amax", "with SUM, not with MAX"),
        ("scale of their own",),
    ),
    Bug(
        "a float8 scale from the smallest of the ranks' largest",
        "tp=4",
        EIGHT_BITS_IN,
        (("ReduceOp.MAX", "ReduceOp.MIN"),),
        ("wrong-value",),
        ("amax", "with MIN, not with MAX"),
    ),
    Bug(
        "a sum left out behind a cast to float8",
        "tp=2",
        EIGHT_BITS_IN,
        (("out = Sum.apply(out, self.group)", "pass"),),
        ("unreduced-output",),
        ("sum over tp",),
        with_lines=True,
    ),
)
