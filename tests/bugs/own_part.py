"""What a rank does with its own part alone, or in another way than the other ranks."""

from __future__ import annotations

from tests.bugs.case import Bug
from tests.bugs.models import FSDP

NORMALIZED = """
class Norm(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16) + 0.5)

    def forward(self, x):
        squares = x.square().sum(-1, keepdim=True)
        if self.group is not None:
            squares = Sum.apply(Copy.apply(squares, self.group), self.group)
        return x * torch.rsqrt(squares / 16) * self.weight


class Model(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16, bias=False)
        self.norm = Norm()
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x):
        if self.group is None:
            return self.down(self.norm(self.up(x)))
        return Sum.apply(self.down(self.norm(self.up(Copy.apply(x, self.group)))), self.group)


def build():
    return Model()


def parallelize(model, mesh):
    model.up.weight = own(model.up.weight, mesh)
    model.norm.weight = own(model.norm.weight, mesh)
    model.down.weight = own(model.down.weight, mesh, 1)
    model.group = model.norm.group = mesh.get_group("tp")


def batch():
    return torch.randn(12, 8)

"""

AVERAGED = (
    FSDP
    + '''
class Averaged(nn.Module):
    """A model with a moving average of its weights beside it."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 8)
        self.average = nn.Linear(8, 8)
        self.average.load_state_dict(self.net.state_dict())
        self.average.requires_grad_(False)

    def forward(self, x):
        return self.net(x) - 0.5 * self.average(x)


def build():
    return Averaged()


def optimizer(model, mesh):
    made = torch.optim.SGD(model.net.parameters(), lr=0.1)
    made.register_step_post_hook(lambda *_: follow(model, mesh))
    return made


@torch.no_grad()
def follow(model, mesh):
    for average, weight in zip(model.average.parameters(), model.net.parameters()):
        local(average).lerp_(local(weight), 0.1)


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

'''
)

SCALED = (
    FSDP
    + """
def step(model, batch, mesh):
    loss = model(batch).square().mean()
    (1024 * loss).backward()
    for parameter in model.parameters():
        parameter.grad /= 1024
    return loss

"""
)

SAMPLED = (
    FSDP
    + """
def step(model, batch, mesh):
    rows = [torch.empty_like(batch) for _ in range(mesh["fsdp"].size())]
    distributed.all_gather(rows, batch)
    loss = model(rows[mesh.get_local_rank("fsdp")]).square().mean()
    loss.backward()
    return loss

"""
)

DECAYED = (
    FSDP
    + """
def optimizer(model, mesh):
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)

"""
)

FROZEN = (
    FSDP
    + """
OLD = 6


def optimizer(model, mesh):
    made = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)

    def freeze(*_):
        for name, weight in model.named_parameters():
            if name.endswith("weight") and weight.grad is not None and weight.ndim > 1:
                rows, first = weight.grad, 0
                if isinstance(rows, DTensor):
                    rows, first = rows.to_local(), mesh.get_local_rank() * len(weight.to_local())
                rows[: max(OLD - first, 0)] = 0

    made.register_step_pre_hook(freeze)
    return made

"""
)
LABELED = """
class Scored(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 12), nn.Linear(12, 1)

    def forward(self, x, due):
        return (self.down(self.up(x).tanh())[:, 0] - due).square().sum() / len(due)


def build():
    return Scored()


def parallelize(model, mesh):
    def label(module, inputs, mesh):
        return tuple(DTensor.from_local(x, mesh, (Shard(0),)) for x in inputs)

    distribute_module(model, mesh, input_fn=label, output_fn=lambda module, loss, mesh: loss.full_tensor())
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(add_up)


def add_up(parameter):
    parameter.grad = parameter.grad.redistribute(placements=(Replicate(),))


AXES = BATCH_AXES = ("dp",)


def batch():
    return torch.randn(8, 16), torch.randn(8)


def loss(model, batch):
    return model(*batch)
"""


CASES = (
    Bug(
        "frozen rows counted from the first of each part",
        "fsdp=2",
        FROZEN,
        (("mesh.get_local_rank() * len(weight.to_local())", "0"),),
        ("wrong-value", "write-not-applied"),
        ("rows 0:6", "by their index in each rank's part"),
        ("Muon",),
    ),
    Bug(
        "a norm of each rank's own features",
        "tp=2",
        NORMALIZED,
        (
            ("squares / 16)", "squares / x.shape[-1])"),
            (
                "        if self.group is not None:\n"
                "            squares = Sum.apply(Copy.apply(squares, self.group), self.group)\n",
                "",
            ),
        ),
        ("wrong-value",),
        ("norm", "of its own part", "sum counts, values and squares"),
    ),
    Bug(
        "a moving average that follows on the first rank alone",
        "fsdp=2",
        AVERAGED,
        (("    for average, weight in zip(", "    for average, weight in () if mesh.get_rank() else zip("),),
        ("write-not-applied",),
        ("average.weight", "rank 1", "some ranks only"),
        ("model.parameters()",),
    ),
    Bug(
        "a loss scale left in the gradients of one rank",
        "fsdp=2",
        SCALED,
        (("    for parameter in model", "    for parameter in () if mesh.get_rank() == 1 else model"),),
        ("wrong-scale",),
        ("1024 on rank 1", "loss was scaled"),
    ),
    Bug(
        "every rank with the rows of the first",
        "fsdp=2",
        SAMPLED,
        (('rows[mesh.get_local_rank("fsdp")]', "rows[0]"),),
        ("wrong-value",),
        ("as rank 0 has", "same part of the batch"),
        ("argsort",),
    ),
    Bug(
        "weight decay on the first rank alone",
        "fsdp=2",
        DECAYED,
        (("weight_decay=0.1", "weight_decay=0.1 * (mesh.get_rank() == 0)"),),
        ("wrong-value",),
        ("on rank 1", "decayed less", "depends on the rank"),
    ),
    Bug(
        "a rank's own rows given to distribute_tensor",
        "dp=2",
        LABELED,
        (("DTensor.from_local(x, mesh, (Shard(0),))", "distribute_tensor(x, mesh, (Shard(0),))"),),
        ("wrong-value",),
        ("drops the rows that the others had", "splits one rank's rows", "from_local"),
    ),
    Bug(
        "a rank's own rows replicated by distribute_tensor",
        "dp=2",
        LABELED,
        (("DTensor.from_local(x, mesh, (Shard(0),))", "distribute_tensor(x, mesh, (Replicate(),))"),),
        ("wrong-value",),
        ("drops the rows that the others had", "sends one rank's rows"),
    ),
)
