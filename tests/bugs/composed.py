"""Losses that ranks take step by step, with a reduction each, where the unsharded model calls one function."""

from __future__ import annotations

from tests.bugs.case import Bug

PARALLEL_LOSS = """
class Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, first, group):
        top = logits.amax(-1)
        distributed.all_reduce(top, op=distributed.ReduceOp.MAX, group=group)
        shifted = logits - top[..., None]
        at = labels - first
        is_here = (at >= 0) & (at < logits.shape[-1])
        at = at.clamp(0, logits.shape[-1] - 1)
        chosen = shifted.gather(-1, at[..., None])[..., 0] * is_here
        distributed.all_reduce(chosen, group=group)
        powers = shifted.exp()
        total = powers.sum(-1)
        distributed.all_reduce(total, group=group)
        ctx.save_for_backward(powers / total[..., None], at, is_here)
        return total.log() - chosen

    @staticmethod
    def backward(ctx, grad):
        shares, at, is_here = ctx.saved_tensors
        made = shares.scatter_add(-1, at[..., None], -is_here[..., None].to(shares.dtype))
        return made * grad[..., None], None, None, None


class Speaker(nn.Module):
    group, first = None, 0

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 12, bias=False)

    def forward(self, x, labels):
        x = torch.tanh(self.body(x))
        if self.group is not None:
            logits = self.head(Copy.apply(x, self.group))
            return Entropy.apply(logits, labels, self.first, self.group).mean()
        return functional.cross_entropy(self.head(x).flatten(0, -2), labels.flatten())


def build():
    return Speaker()


def parallelize(model, mesh):
    model.head.weight = own(model.head.weight, mesh)
    model.group, model.first = mesh.get_group("tp"), 12 // mesh["tp"].size() * mesh.get_local_rank("tp")


def batch():
    return torch.randn(4, 6, 8), torch.randint(12, (4, 6))


def loss(model, batch):
    return model(*batch)
"""

BY_STEPS = PARALLEL_LOSS.replace(
    "        return functional.cross_entropy(self.head(x).flatten(0, -2), labels.flatten())",
    "        logits = self.head(x)\n"
    "        return (torch.logsumexp(logits, -1) - logits.gather(-1, labels[..., None])[..., 0]).mean()",
)
"""The same, beside an unsharded model that takes the two terms itself."""

LABEL, TOTAL = (f"        distributed.all_reduce({name}, group=group)\n" for name in ("chosen", "total"))

CASES = (
    Bug(
        "a label's logit that nobody sums, in a loss whose backward is its own",
        "tp=2",
        PARALLEL_LOSS,
        ((LABEL, ""),),
        ("wrong-value",),
        ("case.py:73", "chosen = shifted.gather", "over tp"),
        ("amax is of",),
        with_lines=True,
    ),
    Bug(
        "a label's logit that is summed twice",
        "tp=2",
        PARALLEL_LOSS,
        ((LABEL, 2 * LABEL),),
        ("wrong-scale",),
        ("all_reduce in case.py:", "2 times", "already"),
        with_lines=True,
    ),
    Bug(
        "a sum of exponentials of own classes",
        "tp=2",
        PARALLEL_LOSS,
        ((TOTAL, ""),),
        ("wrong-value",),
        ("total = powers.sum(-1)", "over tp"),
        ("amax is of",),
        with_lines=True,
    ),
    Bug(
        "a label's logit that nobody sums, beside a logsumexp and a gather",
        "tp=2",
        BY_STEPS,
        ((LABEL, ""),),
        ("wrong-value",),
        ("case.py:73", "chosen = shifted.gather", "over tp"),
        with_lines=True,
    ),
    Bug(
        "a sum of exponentials of own classes, beside a logsumexp and a gather",
        "tp=2",
        BY_STEPS,
        ((TOTAL, ""),),
        ("wrong-value",),
        ("total = powers.sum(-1)", "over tp"),
        ("amax is of",),
        with_lines=True,
    ),
)
