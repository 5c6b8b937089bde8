"""Keys and values that go from rank to rank: every round adds a block to sums which earlier rounds have begun."""

from __future__ import annotations

from tests.bugs.case import Bug
from tests.bugs.models import AVERAGED

RING = (
    """
BATCH_AXES = {"cp": 1}


def exchange(x, group, by):
    ranks, rank = distributed.get_process_group_ranks(group), distributed.get_rank(group)
    got, size = torch.empty_like(x), len(ranks)
    ops = [
        distributed.P2POp(distributed.isend, x, ranks[(rank + by) % size], group),
        distributed.P2POp(distributed.irecv, got, ranks[(rank - by) % size], group),
    ]
    for work in distributed.batch_isend_irecv(ops):
        work.wait()
    return got


class PassOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return exchange(x.contiguous(), group, 1)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad.contiguous(), ctx.group, -1), None


class Attention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        top = q.new_full((*q.shape[:-1], 1), -1e30)
        below, above = torch.zeros_like(top), torch.zeros_like(q)
        rounds = 1 if self.group is None else distributed.get_world_size(self.group)
        for turn in range(rounds):
            scores = q @ k.mT
            higher = torch.maximum(top, scores.amax(-1, keepdim=True))
            weights, shrink = (scores - higher).exp(), (top - higher).exp()
            below = below * shrink + weights.sum(-1, keepdim=True)
            above = above * shrink + weights @ v
            top = higher
            if turn < rounds - 1:
                k, v = PassOn.apply(k, self.group), PassOn.apply(v, self.group)
        return above / below


def build():
    return Attention()


def parallelize(model, mesh):
    model.group = mesh.get_group("cp")


def batch():
    return torch.randn(2, 12, 8)

"""
    + AVERAGED
)
BESIDE = ("although", "does|do")

GATHERED = (
    RING.replace(
        "            scores = q @ k.mT\n",
        """            block = (self.rank - turn) % rounds
            k, v = keys[block], values[block]
            scores = q @ k.mT
""",
    )
    .replace(
        """            if turn < rounds - 1:
                k, v = PassOn.apply(k, self.group), PassOn.apply(v, self.group)
""",
        "",
    )
    .replace(
        "        rounds = 1 if",
        """        if self.group is not None:
            k, v = (torch.cat(functional_gather(part, self.group), 1) for part in (k, v))
        rounds = 1 if""",
    )
    .replace(
        "        for turn in range(rounds):\n",
        "        keys, values = k.chunk(rounds, 1), v.chunk(rounds, 1)\n        for turn in range(rounds):\n",
    )
    .replace("    group = None\n", "    group, rank = None, 0\n")
    .replace(
        """    model.group = mesh.get_group("cp")
""",
        """    model.group, model.rank = mesh.get_group("cp"), mesh.get_local_rank("cp")
""",
    )
    .replace(
        "class Attention",
        """def functional_gather(part, group):
    return distributed.nn.functional.all_gather(part.contiguous(), group=group)


class Attention""",
    )
)

BIASED = RING.replace(
    "        for turn in range(rounds):\n            scores = q @ k.mT\n",
    """        size, rank = x.shape[1], distributed.get_rank(self.group) if self.group is not None else 0
        at = torch.arange(size) + rank * size
        keys, distance = at + size, (at[:, None] - at) - size
        for turn in range(rounds):
            keys = (keys - size) % (rounds * size)
            distance = distance + size
            scores = (q @ k.mT - 0.25 * distance).masked_fill(keys > at[:, None], -1e30)
""",
)

STACKED = (
    RING.replace(
        """            scores = q @ k.mT
            higher = torch.maximum(top, scores.amax(-1, keepdim=True))
""",
        """            k, v = block
            scores = q @ k.mT
            here = scores.amax(-1, keepdim=True).detach()
            if not turn:
                weights = (scores - here).exp()
                above, below, top = weights @ v, weights.sum(-1, keepdim=True), here
                block = block if rounds == 1 else PassOn.apply(block, self.group)
                continue
            higher = torch.maximum(top, here)
""",
    )
    .replace(
        "k, v = PassOn.apply(k, self.group), PassOn.apply(v, self.group)", "block = PassOn.apply(block, self.group)"
    )
    .replace("        top = q.new_full", "        block = torch.stack([k, v])\n        top = q.new_full")
)

CASES = (
    Bug(
        "a ring that does not shrink its sum to the new maximum",
        "cp=3",
        RING,
        (("above = above * shrink + weights @ v", "above = above + weights @ v"),),
        ("wrong-value",),
        ("runs 3 times on each rank", "above = above", *BESIDE),
        with_lines=True,
    ),
    Bug(
        "a ring that begins with its first block and does not shrink its sum",
        "cp=3",
        STACKED,
        (("above = above * shrink + weights @ v", "above = above + weights @ v"),),
        ("wrong-value",),
        ("along cp by send",),
        never=("goes wrong between", "needs the other parts too"),
        with_lines=True,
    ),
    Bug(
        "a loop over gathered blocks that does not shrink its sum",
        "cp=2",
        GATHERED,
        (("above = above * shrink + weights @ v", "above = above + weights @ v"),),
        ("wrong-value",),
        ("above = above", "lacks a factor", "shrink = "),
        with_lines=True,
    ),
    Bug(
        "a ring with distances that does not shrink its sum",
        "cp=3",
        BIASED,
        (("above = above * shrink + weights @ v", "above = above + weights @ v"),),
        ("wrong-value",),
        ("above = above + weights @ v` is the first wrong line", "lacks a factor", "shrink = "),
        with_lines=True,
    ),
    Bug(
        "a ring whose distances go to the other side",
        "cp=3",
        BIASED,
        (("distance = distance + size", "distance = distance - size"),),
        ("wrong-value",),
        ("the bias isn't that of these", "`distance = distance - size` changes it in each round"),
        with_lines=True,
    ),
    Bug(
        "a ring whose distances stay those of its own keys",
        "cp=3",
        BIASED,
        (("            distance = distance + size\n", ""), ("(at[:, None] - at) - size", "(at[:, None] - at)")),
        ("wrong-value",),
        ("biases keys 0-3", "the bias takes them as 4-7", "the block of keys that has come is another rank's"),
        with_lines=True,
    ),
    Bug(
        "a ring that passes keys on and keeps its values",
        "cp=3",
        RING,
        (("k, v = PassOn.apply(k, self.group), PassOn.apply(v, self.group)", "k = PassOn.apply(k, self.group)"),),
        ("wrong-value",),
        ("runs 3 times on each rank", "weights @ v", "keys and values"),
        with_lines=True,
    ),
)
