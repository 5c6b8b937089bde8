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
MOVING = (
    SCAN.replace("self.inner, self.decay = nn.Linear(6, 6), nn.Linear(6, 6)", "self.inner = nn.Linear(6, 6)")
    .replace(
        "        super().__init__()\n", "        super().__init__()\n        self.raw = nn.Parameter(torch.randn(6))\n"
    )
    .replace(
        "        h, decay = self.inner(x), torch.sigmoid(self.decay(x))\n",
        "        h, decay = self.inner(x), torch.sigmoid(self.raw)\n",
    )
    .replace("decay[:, token] * state", "decay * state")
    .replace("states, decayed = torch.stack(states, 1), decay.cumprod(1)", "states = torch.stack(states, 1)")
    .replace(
        "            ends = Gather.apply(torch.stack([decayed[:, -1], states[:, -1]]), self.group)\n",
        "            length = h.shape[1]\n            ends = Gather.apply(states[:, -1], self.group)\n",
    )
    .replace("carry = 0 * ends[0, 1]", "carry = 0 * ends[0]")
    .replace("carry = ends[rank, 0] * carry + ends[rank, 1]", "carry = decay**length * carry + ends[rank]")
    .replace(
        "            states = states + decayed * carry.unsqueeze(1)\n",
        "            decayed = decay ** torch.arange(1, length + 1)[:, None]\n"
        "            states = states + carry[:, None] * decayed\n",
    )
)
"""Moving averages: each channel decays by a number of its own."""

HEADS = (
    MOVING.replace(
        "self.raw = nn.Parameter(torch.randn(6))",
        'self.register_buffer("gamma", torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5, 0.4]))',
    )
    .replace("torch.sigmoid(self.raw)", "self.gamma")
    .replace("return x + states", "return x + torch.tanh(states)")
)

OWN_DECAY = ("states + decayed * carry", "states + decay * carry")
NO_DECAY = ("decayed * carry.unsqueeze(1)", "carry.unsqueeze(1)")
FIRST_DECAY = ("carry = ends[rank, 0] * carry", "carry = ends[0, 0] * carry")
KEPT = ("carry = ends[rank, 0] * carry + ends", "carry = carry + ends")

CASES = (
    Bug(
        "what a moving average carries is decayed one step too few",
        "sp=2",
        MOVING,
        (("torch.arange(1, length + 1)", "torch.arange(length)"),),
        ("wrong-value",),
        ("states + carry[:, None] * decayed`", "lacks a factor", "torch.sigmoid(self.raw)"),
        with_lines=True,
    ),
    Bug(
        "what each channel carries is decayed by two steps too many",
        "sp=3",
        HEADS,
        (("torch.arange(1, length + 1)", "torch.arange(3, length + 3)"),),
        ("wrong-value",),
        ("states + carry[:, None] * decayed`", "lacks a factor", "buffer gamma to the power of -2"),
        with_lines=True,
    ),
    Bug(
        "what each channel carries is scaled by numbers of its own",
        "sp=2",
        HEADS,
        (("carry[:, None] * decayed", "carry[:, None] * decayed * torch.tensor([1, 2, 4, 5, 8, 10.0])"),),
        ("wrong-value",),
        ("decayed * torch.tensor", "in place of an operand"),
        with_lines=True,
    ),
    Bug(
        "the sum of a moving average is scaled by numbers of each channel",
        "sp=2",
        HEADS,
        (
            (
                "states + carry[:, None] * decayed",
                "states + (carry * carry.new_tensor([1, 2, 4, 5, 8, 10]))[:, None] * decayed",
            ),
        ),
        ("wrong-value",),
        ("lacks a factor", "1, 0.5, 0.25, 0.2, ... for the slices of dim 2"),
        with_lines=True,
    ),
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
