"""Recurrences over a sequence in parts: each rank scans its own tokens, and adds what ranks before it have left."""

from __future__ import annotations

from tests.bugs.case import Bug
from tests.bugs.models import AVERAGED

SCAN = (
    """
BATCH_AXES = {"sp": 1}


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        distributed.all_reduce(grad, group=ctx.group)
        return grad[distributed.get_rank(ctx.group)], None


class Scan(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.inner, self.decay = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        h, decay = self.inner(x), torch.sigmoid(self.decay(x))
        state, states = torch.zeros_like(h[:, 0]), []
        for token in range(h.shape[1]):
            state = decay[:, token] * state + h[:, token]
            states.append(state)
        states, decayed = torch.stack(states, 1), decay.cumprod(1)
        if self.group is not None:
            ends = Gather.apply(torch.stack([decayed[:, -1], states[:, -1]]), self.group)
            carry = 0 * ends[0, 1]
            for rank in range(distributed.get_rank(self.group)):
                carry = ends[rank, 0] * carry + ends[rank, 1]
            states = states + decayed * carry.unsqueeze(1)
        return x + states


def build():
    return nn.Sequential(Scan())


def parallelize(model, mesh):
    model[0].group = mesh.get_group("sp")


def batch():
    return torch.randn(2, 12, 6)

"""
    + AVERAGED
)
OWN_DECAY = ("states + decayed * carry", "states + decay * carry")
NO_DECAY = ("decayed * carry.unsqueeze(1)", "carry.unsqueeze(1)")
FIRST_DECAY = ("carry = ends[rank, 0] * carry", "carry = ends[0, 0] * carry")
KEPT = ("carry = ends[rank, 0] * carry + ends", "carry = carry + ends")

CASES = (
    Bug(
        "what a scan carries decays by each token's own factor",
        "sp=2",
        SCAN,
        (OWN_DECAY,),
        ("wrong-value",),
        ("decay * carry.unsqueeze(1)`", "reads another tensor", "decay.cumprod(1)"),
        with_lines=True,
    ),
    Bug(
        "what a scan carries is added without a decay",
        "sp=2",
        SCAN,
        (NO_DECAY,),
        ("wrong-value",),
        ("states + carry.unsqueeze(1)`", "lacks a factor", "decay.cumprod(1)"),
        with_lines=True,
    ),
    Bug(
        "a scan's carry goes from part to part without a decay",
        "sp=3",
        SCAN,
        (KEPT,),
        ("wrong-value",),
        ("carry = carry + ends[rank, 1]`", "lacks a factor", "a slice of what"),
        with_lines=True,
    ),
    Bug(
        "a scan's carry decays by another part's factor",
        "sp=3",
        SCAN,
        (FIRST_DECAY,),
        ("wrong-value",),
        ("ends[0, 0] * carry", "reads another tensor", "a slice of what"),
        with_lines=True,
    ),
)
