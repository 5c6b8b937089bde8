"""What sharding loses on the way: a frozen weight, a hook, a sum in backward, a rank's own offset, a wide dtype."""

from __future__ import annotations

from tests.bugs.case import Bug
from tests.bugs.models import MLP, TENSOR_PARALLEL

FROZEN = (
    TENSOR_PARALLEL.replace(
        "def build():\n    return MLP()\n",
        """def build():
    model = nn.Sequential(nn.Linear(8, 8), MLP())
    model[1].requires_grad_(False)
    return model
""",
    ).replace("def parallelize(model, mesh):\n", "def parallelize(whole, mesh):\n    model = whole[1]\n")
    + """
def own(whole, mesh, dim=0, axis="tp"):
    part = whole.detach().chunk(mesh[axis].size(), dim)[mesh.get_local_rank(axis)]
    return nn.Parameter(part.clone(), whole.requires_grad)


def optimizer(model, mesh):
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)

"""
)

HOOKED = TENSOR_PARALLEL.replace(
    "def build():\n    return MLP()\n",
    """def build():
    model = MLP()
    model.up.weight.register_hook(slower)
    return model


def slower(gradient):
    return gradient / 10
""",
).replace("    model.down.weight = own(", "    model.up.weight.register_hook(slower)\n    model.down.weight = own(")

LOCAL = """
class Local(nn.Module):
    mesh = None

    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(*shape) / 3) for shape in ((8, 16), (16, 8)))

    def forward(self, x):
        if self.mesh is None:
            return torch.relu(x @ self.up) @ self.down
        x = x.to_local(grad_placements=[Partial()])
        terms = torch.relu(x @ self.up) @ self.down
        return DTensor.from_local(terms, self.mesh, [Partial()]).redistribute(placements=[Replicate()])


class Between(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.local, self.last = nn.Linear(8, 8), Local(), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.local(torch.tanh(self.first(x))))


def build():
    return Between()


def parallelize(model, mesh):
    local, rank = model.local, mesh.get_local_rank("tp")
    local.up = nn.Parameter(local.up.detach().chunk(2, 1)[rank].clone())
    local.down = nn.Parameter(local.down.detach().chunk(2, 0)[rank].clone())
    local.mesh = mesh["tp"]
    for linear in (model.first, model.last):
        for name, weight in list(linear.named_parameters()):
            setattr(linear, name, nn.Parameter(distribute_tensor(weight.detach(), mesh["tp"], [Replicate()])))
    model.register_forward_pre_hook(lambda _, given: (distribute_tensor(given[0], mesh["tp"], [Replicate()]),))


def batch():
    return torch.randn(12, 8)

"""

TOKENS = '''
def joined(x, dim, group):
    parts = [torch.empty_like(x) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


class Cut(torch.autograd.Function):
    """A rank's own part of a dim; its backward joins the parts."""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return x.chunk(2, dim)[distributed.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx, grad):
        return joined(grad, ctx.dim, ctx.group), None, None


class Join(torch.autograd.Function):
    """All parts of a dim; its backward cuts."""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return joined(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(2, ctx.dim)[distributed.get_rank(ctx.group)].contiguous(), None, None


class Block(nn.Module):
    group, first = None, 0

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8, elementwise_affine=False)
        self.linear = nn.Linear(8, 8)
        self.heads = nn.Parameter(torch.randn(8))

    def forward(self, x):
        parts = x if self.group is None else Cut.apply(x, 1, self.group)
        rows = self.norm(parts.flatten(0, 1))
        if self.group is not None:
            rows = Join.apply(rows.view(parts.shape), 1, self.group).flatten(0, 1)
        out, heads = torch.tanh(self.linear(rows)).view(x.shape), self.heads
        if self.group is not None:
            out, heads = Cut.apply(out, -1, self.group), Copy.apply(heads, self.group)
        out = out * heads[self.first : self.first + out.shape[-1]]
        return x + (out if self.group is None else Join.apply(out, -1, self.group))


def build():
    return nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 2))


def parallelize(model, mesh):
    model[1].group, model[1].first = mesh.get_group("tp"), 4 * mesh.get_local_rank("tp")


def batch():
    return torch.randn(3, 6, 8)

'''

GATES = """
class Experts(nn.Module):
    group, first = None, 0

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.experts = nn.Parameter(torch.randn(4, 8, 8) / 3)

    def forward(self, x):
        gates, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        if self.group is not None:
            x, gates = Copy.apply(x, self.group), Copy.apply(gates, self.group)
        mine = chosen - self.first
        here = (mine >= 0) & (mine < len(self.experts))
        gates = gates / gates.sum(-1, keepdim=True).clamp_min(1e-9)
        gates = gates * here
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out = out + (gates * (mine == number)).sum(-1, keepdim=True) * torch.relu(x @ expert)
        return out if self.group is None else Sum.apply(out, self.group)


def build():
    return nn.Sequential(nn.Linear(8, 8), Experts(), nn.Linear(8, 8))


def parallelize(model, mesh):
    experts, rank = model[1], mesh.get_local_rank("ep")
    experts.experts = nn.Parameter(experts.experts.detach().chunk(2)[rank].clone())
    experts.group, experts.first = mesh.get_group("ep"), 2 * rank


def batch():
    return torch.randn(20, 8)

"""
DIVIDED = "        gates = gates / gates.sum(-1, keepdim=True).clamp_min(1e-9)\n"

NARROW = (
    MLP
    + """
from torch.distributed.fsdp import MixedPrecisionPolicy

BATCH_AXES = ("dp", "fsdp")
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def parallelize(model, mesh):
    fully_shard(model.up, mesh=mesh["fsdp"], mp_policy=POLICY)
    fully_shard(model, mesh=mesh["fsdp"], mp_policy=POLICY)
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(lambda one: over_replicas(one.grad.to_local(), mesh.get_group("dp")))


def over_replicas(grad, group):
    mean = grad / group.size()
    distributed.all_reduce(mean, group=group)
    grad.copy_(mean)

"""
)

CASES = (
    Bug(
        "terms of a sum that from_local is told are the whole",
        "tp=2",
        LOCAL,
        (("from_local(terms, self.mesh, [Partial()])", "from_local(terms, self.mesh, [Replicate()])"),),
        ("unreduced-output",),
        ("is given Replicate() for what is one term of a sum over tp", "pass from_local Partial() for tp"),
        with_lines=True,
    ),
    Bug(
        "a whole input that from_local is told are terms of a sum",
        "tp=2",
        LOCAL,
        (
            (
                "x = x.to_local(grad_placements=[Partial()])",
                "x = DTensor.from_local(x.to_local(), self.mesh, [Partial()]).full_tensor(grad_placements=[Partial()])",
            ),
        ),
        ("wrong-value", "wrong-scale"),
        ("is given Partial() for what every rank has whole", "pass from_local Replicate()"),
        with_lines=True,
    ),
    Bug(
        "a frozen weight made a parameter that is trained",
        "tp=2",
        FROZEN,
        (("clone(), whole.requires_grad)", "clone())"),),
        ("wrong-value",),
        ("frozen", "has a gradient"),
        ("learning rate",),
    ),
    Bug(
        "a hook of a parameter that sharding replaced",
        "tp=2",
        HOOKED,
        (("    model.up.weight.register_hook(slower)\n    model.down", "    model.down"),),
        ("wrong-scale",),
        ("10 times", "hook after sharding"),
    ),
    Bug(
        "to_local without the placements of its gradient",
        "tp=2",
        LOCAL,
        (("x.to_local(grad_placements=[Partial()])", "x.to_local()"),),
        ("unreduced-gradient",),
        ("local", "grad_placements"),
        ("No FSDP, DDP or tensor-parallel style wraps",),
    ),
    Bug(
        "parts of tokens joined along the rows",
        "tp=2",
        TOKENS,
        (("Join.apply(rows.view(parts.shape), 1, self.group).flatten(0, 1)", "Join.apply(rows, 0, self.group)"),),
        ("wrong-value",),
        ("different order", "Join.apply(rows, 0"),
        with_lines=True,
    ),
    Bug(
        "the first rank's part of a table of heads",
        "tp=2",
        TOKENS,
        (("heads[self.first : self.first + out.shape[-1]]", "heads[: out.shape[-1]]"),),
        ("wrong-value",),
        ("a different rank's", "heads[: out"),
        with_lines=True,
    ),
    Bug(
        "gates divided by the sum of a rank's own",
        "ep=2",
        GATES,
        ((f"{DIVIDED}        gates = gates * here\n", f"        gates = gates * here\n{DIVIDED}"),),
        ("unreduced-output",),
        ("gates * here", "gates.sum"),
        ("`here = ",),
        with_lines=True,
    ),
    Bug(
        "a unit of FSDP2 that sums in the dtype of its weights",
        "dp=1,fsdp=2",
        NARROW,
        (
            (
                'model.up, mesh=mesh["fsdp"], mp_policy=POLICY',
                'model.up, mesh=mesh["fsdp"], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)',
            ),
        ),
        ("wrong-value",),
        ("up.weight", "bfloat16", "reduce_dtype"),
    ),
    Bug(
        "gradients cast to bfloat16 to be summed over replicas",
        "dp=2,fsdp=1",
        NARROW,
        (("mean = grad / group.size()", "mean = (grad / group.size()).bfloat16()"),),
        ("wrong-value",),
        ("bfloat16", "casts"),
        ("param_dtype",),
    ),
)
