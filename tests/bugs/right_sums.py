"""Right programs that reduce, sum, round or recompute in a way of their own."""

from __future__ import annotations

from tests.bugs.case import Healthy
from tests.bugs.residual import BLOCK

TWO = BLOCK.replace("BLOCKS", "nn.Sequential(nn.Linear(8, 8), Block(), Block(), nn.Linear(8, 4))")

CKPT = "import torch.utils.checkpoint\n" + TWO.replace(
    "    def forward(self, x):\n        h = self.norm(x)",
    "    def forward(self, x):\n        if self.group is None:\n            return self.run(x)\n"
    "        return torch.utils.checkpoint.checkpoint(self.run, x, use_reentrant=False)\n\n"
    "    def run(self, x):\n        h = self.norm(x)",
)

SUMMED = (
    TWO.replace("            h = Copy.apply(h, self.group)\n", "            h = h\n").replace(
        "h = Sum.apply(h, self.group)", "h = all_reduce(h, group=self.group)"
    )
    + """
def step(model, x, mesh):
    loss = model(x).square().mean()
    (loss / mesh["tp"].size()).backward()
    for name, parameter in model.named_parameters():
        if "up" not in name and "down" not in name:
            distributed.all_reduce(parameter.grad, group=mesh.get_group("tp"))
    return loss.detach()

"""
)

HOOKED = """
BATCH_AXES = ("dp",)


def build():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def parallelize(model, mesh):
    group, size = mesh.get_group("dp"), mesh["dp"].size()

    def hook(parameter):
        parameter.grad /= size
        distributed.all_reduce(parameter.grad, group=group)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


def batch():
    return torch.randn(16, 8)

"""

BUCKET = """
BATCH_AXES = ("dp",)


def build():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batch():
    return torch.randn(16, 8)


def step(model, x, mesh):
    loss = model(x).square().mean()
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    flat = torch._utils._flatten_dense_tensors(grads)
    size = mesh["dp"].size()
    part = flat.new_empty(-(-flat.numel() // size))
    flat = functional.pad(flat, (0, part.numel() * size - flat.numel()))
    distributed.reduce_scatter_tensor(part, flat, group=mesh.get_group("dp"))
    part /= size
    distributed.all_gather_into_tensor(flat, part, group=mesh.get_group("dp"))
    start = 0
    for parameter in model.parameters():
        parameter.grad = flat[start : start + parameter.numel()].view_as(parameter).clone()
        start += parameter.numel()
    return loss.detach()

"""

AT_END = """
class Net(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x):
        h = self.up(torch.tanh(self.first(x)))
        out = functional.linear(torch.tanh(h), self.down.weight)
        if self.group is not None:
            out = Sum.apply(out, self.group)
        return out + self.down.bias


def build():
    return Net()


def parallelize(model, mesh):
    rank, size = mesh["tp"].get_local_rank(), mesh["tp"].size()
    model.group = mesh.get_group("tp")
    model.up.weight = nn.Parameter(model.up.weight.detach().chunk(size)[rank].clone())
    model.up.bias = nn.Parameter(model.up.bias.detach().chunk(size)[rank].clone())
    model.down.weight = nn.Parameter(model.down.weight.detach().chunk(size, 1)[rank].clone())


def batch():
    return torch.randn(6, 8)


def step(model, x, mesh):
    loss = model(x).square().mean()
    loss.backward()
    for parameter in model.first.parameters():
        distributed.all_reduce(parameter.grad, group=mesh.get_group("tp"))
    return loss.detach()

"""

AUTOCAST = """
from torch.nn.parallel import DistributedDataParallel
BATCH_AXES = ("dp",)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 4)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            h = self.down(torch.tanh(self.up(x)))
        return h.float()


def build():
    return Net()


def batch():
    return torch.randn(32, 8)


def step(model, x, mesh):
    wrapped = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    loss = wrapped(x).square().mean()
    loss.backward()
    return loss.detach()

"""

CASES = (
    Healthy("gradients reduced by a hook of every parameter", "dp=2", HOOKED),
    Healthy("gradients reduced in one bucket by reduce-scatter and all-gather", "dp=3", BUCKET),
    Healthy("gradients of the layers before a column-parallel one summed after backward", "tp=2", AT_END),
    Healthy("a sum whose backward sums, under a loss divided by the ranks", "tp=2", SUMMED),
    Healthy("bfloat16 by autocast under DDP", "dp=2", AUTOCAST),
    Healthy("hand-cut blocks that are recomputed in backward", "tp=2", CKPT),
)
