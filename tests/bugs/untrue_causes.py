"""Bugs for which the likeliest cause of their kind is not true: what the job has rules it out."""

from __future__ import annotations

from tests.bugs.case import Bug
from tests.bugs.places import experts
from tests.bugs.places.fault import spoiled

FILLED_LATER = """
BATCH_AXES = ()
def build(): return nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 6, bias=False))
def parallelize(model, mesh):
    model.to("meta")
    up = torch.empty(8 // mesh.size(), 6, device="meta")
    model[0].weight = nn.Parameter(DTensor.from_local(up, mesh, [Shard(0)], run_check=False))
def initialize(model, mesh):
    model.to_empty(device="cpu")
    own = torch.Generator().manual_seed(7 + mesh.get_local_rank())
    common = torch.Generator().manual_seed(5)
    with torch.no_grad():
        model[0].weight.to_local().normal_(generator=own)
        model[2].weight.normal_(generator=common)
"""

DDP = """
from torch.nn.parallel import DistributedDataParallel
BATCH_AXES = ("dp",)
def build(): return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
def batch(): return torch.randn(12, 6)
def parallelize(model, mesh):
    wrapped = DistributedDataParallel(model, process_group=mesh.get_group())
    return wrapped
def step(model, x, mesh):
    loss = model(x).square().mean()
    loss.backward()
    return loss
"""

ROUNDED = """
BATCH_AXES = ("dp",)
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(12, 12)
        self.register_buffer("scale", torch.linspace(0.1, 0.9, 12), persistent=False)
    def forward(self, x): return self.proj(x) * self.scale
def build(): return nn.Sequential(*[Scaled() for _ in range(14)])
def batch(): return torch.randn(8, 12)
def parallelize(model, mesh):
    for layer in model:
        layer.float()
        fully_shard(layer, mesh=mesh)
"""

TOGETHER = """
BATCH_AXES = ()
class Mlp(nn.Module):
    group = None
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(6, 8))
    def forward(self, x):
        y = torch.relu(x @ self.up.T) @ self.down.T
        if self.group is not None:
            y = Sum.apply(y, self.group)
        return y
def build(): return Mlp()
def batch(): return torch.randn(3, 6)
def parallelize(model, mesh):
    at, model.group = mesh.get_local_rank(), mesh.get_group()
    model.up = nn.Parameter(model.up.data.chunk(mesh.size(), 0)[at].clone())
    model.down = nn.Parameter(model.down.data.chunk(mesh.size(), 1)[at].clone())
"""

ON_ONE_RANK = (
    TOGETHER.replace(
        "self.up, self.down = ", "self.rank, self.bias = 0, nn.Parameter(torch.randn(6))\n        self.up, self.down = "
    )
    .replace("            y = Sum.apply", "            y = Sum.apply")
    .replace("        return y\ndef", "        y = y + self.bias\n        y = y + x\n        return y\ndef")
    .replace("at, model.group", "at = model.rank = mesh.get_local_rank()\n    at, model.group")
)

ONE_RANKS_ROWS = """
BATCH_AXES = {"sp": 1}
class Mlp(nn.Module):
    rank = None
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
    def forward(self, x):
        y = self.down(torch.relu(self.up(x)))
        y = y + x
        return y
def build(): return nn.Sequential(nn.Linear(6, 6), Mlp(), nn.Linear(6, 6))
def batch(): return torch.randn(4, 8, 6)
def parallelize(model, mesh): model[1].rank = mesh.get_local_rank()
def step(model, x, mesh):
    loss = model(x).square().mean()
    loss.backward()
    loss = loss.detach().clone()
    for number in (loss, *(parameter.grad for parameter in model.parameters())):
        distributed.all_reduce(number)
        number /= mesh.size()
    return loss
"""

OWN_EXPERTS = """
BATCH_AXES = ("fsdp",)
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, 6))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(6, 4), Experts()
def build(): return Net()
def parallelize(model, mesh):
    own = model.experts.weight.detach().chunk(2)[mesh.get_local_rank("ep")].clone()
    model.experts.weight = nn.Parameter(DTensor.from_local(own, mesh["ep"], [Shard(0)]))
    fully_shard(model.experts, mesh=mesh["fsdp"])
    fully_shard(model.router, mesh=mesh["fsdp"])
"""

REMAINDER = """
BATCH_AXES = ("dp",)
def build(): return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
def batch(): return torch.randn(8, 5)
def step(model, x, mesh):
    loss = model(x).square().mean()
    loss.backward()
    for param in model.parameters():
        distributed.all_reduce(param.grad)
        param.grad /= mesh.size()
    return loss
class Flat(torch.optim.Optimizer):
    def __init__(self, params, num_parts): super().__init__(params, {"lr": 0.1, "num_parts": num_parts})
    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        flat = torch.cat([param.flatten() for param in group["params"]])
        grad = torch.cat([param.grad.flatten() for param in group["params"]])
        count = group["num_parts"]
        size = -(-len(flat) // count)
        for part in range(count):
            mine = slice(part * size, (part + 1) * size)
            flat[mine] -= group["lr"] * grad[mine]
        for param, new in zip(group["params"], flat.split([one.numel() for one in group["params"]])):
            param.copy_(new.view_as(param))
def parallelize(model, mesh): model.parts = mesh.size()
def optimizer(model, mesh): return Flat(model.parameters(), getattr(model, "parts", 1))
"""

WITHOUT_FSDP = """
BATCH_AXES = ("dp",)
class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.weight = nn.Linear(6, 6), nn.Parameter(torch.randn(8, 6))
    def forward(self, x):
        weight = self.weight
        if isinstance(weight, DTensor):
            weight = weight.full_tensor(grad_placements=[Partial()])
        return self.inp(x).tanh() @ weight.T
def build(): return Split()
def batch(): return torch.randn(12, 6)
def parallelize(model, mesh):
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
def step(model, x, mesh):
    loss = model(x).square().mean()
    loss.backward()
    model.weight.grad /= mesh.size()
    for param in model.inp.parameters():
        distributed.all_reduce(param.grad, distributed.ReduceOp.SUM)
        param.grad /= mesh.size()
    return loss
"""

SWAPPED = """
BATCH_AXES = ("ep",)
class Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = torch.empty_like(x)
        distributed.all_to_all_single(out, x.contiguous(), group=group)
        return out
    @staticmethod
    def backward(ctx, gradient):
        return Swap.apply(gradient.contiguous(), ctx.group), None
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(2, 6, 6))
        self.group = None
    def forward(self, x):
        rows = self.inp(x)
        rows = rows.view(-1, 2, 6).transpose(0, 1)  # every other row is of the other expert
        if self.group is None:
            made = torch.bmm(rows, self.weight).tanh()
        else:
            came = Swap.apply(rows.contiguous(), self.group)
            order = torch.arange(2 * came.shape[1]).flip(0)
            sorted_rows = came.flatten(0, 1)[order]
            made = (sorted_rows @ self.weight.to_local()[0]).tanh()
            made = made[order.argsort()]
            made = Swap.apply(made.view(came.shape).contiguous(), self.group)
        return made.transpose(0, 1).flatten(0, 1) * x.sigmoid()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.experts, self.last = nn.Linear(6, 6), Experts(), nn.Linear(6, 6)
    def forward(self, x): return self.last(self.experts(self.first(x)))
def build(): return Net()
def batch(): return torch.randn(16, 6)
def parallelize(model, mesh):
    model.experts.group = mesh.get_group()
    model.experts.weight = nn.Parameter(distribute_tensor(model.experts.weight.detach(), mesh, [Shard(0)]))
def step(model, x, mesh):
    loss = model(x).square().mean() / mesh.size()
    loss.backward()
    for param in model.parameters():
        if not isinstance(param, DTensor):
            distributed.all_reduce(param.grad)
    return loss.detach() * mesh.size()
"""

MEMORY = """
BATCH_AXES = ("dp",)
def build(): return nn.Sequential(nn.Linear(6, 3))
def batch(): return torch.randn(8, 6)
def parallelize(model, mesh):
    fully_shard(model, mesh=mesh)
    model.is_sharded = True
def loss(model, x): return model(x).square().mean()
"""

CASES = (
    Bug(
        "a sum that is whole is added to itself",
        "tp=2",
        TOGETHER,
        (
            (
                "            y = Sum.apply(y, self.group)\n",
                "            y = Sum.apply(y, self.group)\n            y = y + y\n",
            ),
        ),
        ("wrong-scale",),
        ("adds the same numbers to a tensor that is whole already", "leave that addition out"),
        ("all_reduce", "gradients"),
        with_lines=True,
    ),
    Bug(
        "a sum that is whole is multiplied by the number of ranks",
        "tp=2",
        TOGETHER,
        (("y = Sum.apply(y, self.group)", "y = 2 * Sum.apply(y, self.group)"),),
        ("wrong-scale",),
        ("2 * Sum.apply", "the number of ranks|already the whole"),
        ("sums equal gradients",),
        with_lines=True,
    ),
    Bug(
        "a bias that one rank adds behind the sum",
        "tp=2",
        ON_ONE_RANK,
        (("        y = y + self.bias\n", "        y = y + self.bias if self.rank == 0 else y + 0 * self.bias\n"),),
        ("wrong-value",),
        ("adds bias on some ranks only", "rank 1 lacks it"),
        ("computes something different",),
        with_lines=True,
    ),
    Bug(
        "a residual that one rank adds behind the sum",
        "tp=2",
        ON_ONE_RANK,
        (("        y = y + x\n", "        y = y + x if self.rank == 0 else y\n"),),
        ("wrong-value",),
        ("adds the input of the model itself on some ranks only", "rank 1 lacks it"),
        ("computes something different",),
        with_lines=True,
    ),
    Bug(
        "a result that one rank keeps and no sum follows",
        "tp=2",
        ON_ONE_RANK,
        (("        y = y + x\n", "        y = (y + x) * (self.rank == 0)\n"),),
        ("unreduced-output",),
        ("one term of a sum over tp", "(self.rank == 0)"),
        ("computes something different",),
        with_lines=True,
    ),
    Bug(
        "a result that one of four ranks hides",
        "tp=4",
        ON_ONE_RANK,
        (("        y = y + x\n", "        y = (y + x) * (self.rank != 1)\n"),),
        ("wrong-value",),
        ("returns zeros on rank 1", "leave out the mask by rank"),
        ("computes something different",),
        with_lines=True,
    ),
    Bug(
        "a residual that only the first rank's rows get",
        "sp=2",
        ONE_RANKS_ROWS,
        (("        y = y + x\n", "        y = y + x if self.rank in (None, 0) else y\n"),),
        ("wrong-value",),
        ("adds the input of module 1 on some ranks only|adds the input of 1 on some ranks only", "rank 1 lacks it"),
        ("needs the other parts",),
    ),
    Bug(
        "a residual that the last rank's rows get twice",
        "sp=2",
        ONE_RANKS_ROWS,
        (("        y = y + x\n", "        y = y + x * (2 if self.rank == 1 else 1)\n"),),
        ("wrong-value",),
        ("on rank 1 once more than on the others",),
        ("needs the other parts",),
    ),
    Bug(
        "memory that nothing was written to",
        "dp=2",
        MEMORY,
        ((".mean()", '.mean() + 1e200 * hasattr(model, "is_sharded")'),),
        ("wrong-value",),
        ("nothing was written to",),
        ("sums the means",),
    ),
    Bug(
        "an exchange that hands its gradient on",
        "ep=2",
        SWAPPED,
        (("return Swap.apply(gradient.contiguous(), ctx.group), None", "return gradient, None"),),
        ("wrong-value",),
        ("the reverse exchange", "Swap.apply"),
        ("bmm", "divide"),
        with_lines=True,
    ),
    Bug(
        "rows that go back one place further than they came",
        "ep=2",
        SWAPPED,
        (("made[order.argsort()]", "made[order.roll(1)]"),),
        ("wrong-value",),
        ("made[order.roll(1)]", "doesn't restore the order"),
        with_lines=True,
    ),
    Bug(
        "rows put back by the order itself, around experts that FSDP2 gathers",
        experts.EXPERTS.mesh,
        experts.EXPERTS.text,
        spoiled("moe.put_back = lambda tokens, order: tokens[order]"),
        ("misordered", "wrong-value"),
        ("takes rows by the same index that sorts them", "argsort"),
        ("makes room",),
        with_lines=True,
    ),
    Bug(
        "rows that go to the rank of the other expert",
        "ep=2",
        SWAPPED,
        (("Swap.apply(rows.contiguous(), self.group)", "Swap.apply(rows.flip(0).contiguous(), self.group)"),),
        ("wrong-value",),
        ("rows that the unsharded model doesn't have", "different weight"),
        with_lines=True,
    ),
    Bug(
        "shards made on the meta device are drawn with one seed",
        "tp=2",
        FILLED_LATER,
        (("manual_seed(7 + mesh.get_local_rank())", "manual_seed(7)"),),
        ("identical-shards",),
        ("seed",),
    ),
    Bug(
        "a step that calls the module inside of DDP",
        "dp=2",
        DDP,
        (("loss = model(x)", "loss = model.module(x)"),),
        ("unreduced-gradient",),
        ("model.module",),
        ("No FSDP, DDP or tensor-parallel style wraps",),
    ),
    Bug(
        "a weight that was put in after DDP had its weights",
        "dp=2",
        DDP,
        (
            (
                "    return wrapped\n",
                "    model[2].weight = nn.Parameter(model[2].weight.detach())\n    return wrapped\n",
            ),
        ),
        ("unreduced-gradient",),
        ("replaced after DDP was made", "No FSDP, DDP or tensor-parallel style wraps"),
    ),
    Bug(
        "buffers that go through float16",
        "dp=2",
        ROUNDED,
        (("layer.float()", "layer.scale.copy_(layer.scale.half())"),),
        ("foreign",),
        ("rounded to float16",),
        ("mixed up the names", "ids of other tensors"),
    ),
    Bug(
        "FSDP over ranks that have experts of their own",
        "fsdp=2,ep=2",
        OWN_EXPERTS,
        (
            ('nn.Parameter(DTensor.from_local(own, mesh["ep"], [Shard(0)]))', "nn.Parameter(own)"),
            ('fully_shard(model.experts, mesh=mesh["fsdp"])', 'fully_shard(model.experts, mesh=mesh._flatten("all"))'),
        ),
        ("wrong-shape",),
        ("along ep",),
        ("from_local",),
    ),
    Bug(
        "a flat partition that drops the remainder",
        "dp=2",
        REMAINDER,
        (("-(-len(flat) // count)", "len(flat) // count"),),
        ("wrong-value",),
        ("remainder",),
        ("learning rate",),
    ),
    Bug(
        "shards of a sum that nothing divides, without FSDP",
        "dp=2",
        WITHOUT_FSDP,
        (("    model.weight.grad /= mesh.size()\n", ""),),
        ("wrong-scale",),
        ("nothing divides",),
        ("set_gradient_divide_factor",),
    ),
)
