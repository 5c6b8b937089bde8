"""Experts under FSDP2, which divides their gradients by the ranks that it knows of."""

from __future__ import annotations

from tests.bugs.case import Bug
from tests.bugs.public.case import Public

MIXTURE = '''
EXPERTS = 8
BATCH_AXES = ("dp_mod", "ep")


class Experts(nn.Module):
    """A stack of matrices, cut over ep as a DTensor, and over dp_mod by FSDP2."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, 6, 6))

    def forward(self, x, numbers):
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return torch.bmm(x[:, None], weight[numbers])[:, 0]


class Mixture(nn.Module):
    """A router; tokens travel to the rank that has their expert, and back."""

    group = None

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x):
        gate, chosen = self.router(x).softmax(-1).max(-1)
        if self.group is None:
            return self.experts(x, chosen) * gate[:, None]
        size = distributed.get_world_size(self.group)
        owner = chosen // (EXPERTS // size)
        order = owner.argsort(stable=True)
        sent = owner.bincount(minlength=size)
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent, group=self.group)
        to, of = sent.tolist(), received.tolist()
        numbers = chosen.new_empty(sum(of))
        distributed.all_to_all_single(numbers, chosen[order], of, to, group=self.group)
        done = self.experts(Exchange.apply(x[order], to, of, self.group), numbers % (EXPERTS // size))
        return (Exchange.apply(done, of, to, self.group) * gate[order, None])[order.argsort()]


def build():
    return Mixture()


def parallelize(model, mesh):
    whole = model.experts.weight.detach()
    model.experts.weight = nn.Parameter(distribute_tensor(whole, mesh["ep"], (Shard(0),)))
    model.group = mesh.get_group("ep")
    fully_shard(model.experts, mesh=mesh["dp_mod"])
    model.experts.set_gradient_divide_factor(float(mesh.size()))
    fully_shard(model, mesh=mesh["dp_mod", "ep"]._flatten("dp"))


def batch():
    return torch.randn(64, 6)

'''

CASES = (
    Public(
        "pytorch#160285",
        Bug(
            "gradients of experts doubled at EP=2",
            "dp_mod=2,ep=2",
            MIXTURE,
            (("    model.experts.set_gradient_divide_factor(float(mesh.size()))\n", ""),),
            ("wrong-scale",),
            ("experts.weight", "2 times|twice", "ep", "divide"),
            ("set_gradient_divide_factor was called",),
        ),
    ),
)
