"""Losses over a split vocabulary that the sharded model writes anew, also as functions with a backward of their own."""

from __future__ import annotations

from tests.bugs.case import Bug

MODEL = '''
WORDS = 20


class Net(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(WORDS, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, WORDS, bias=False)

    def forward(self, ids, target):
        x = self.embed(ids).flatten(0, 1)
        x = torch.tanh(self.mix(x)) + x
        logits = self.head(x if self.group is None else Copy.apply(x, self.group))
        if self.group is None:
            return whole_loss(logits, target.flatten())
        return loss_of_part(logits, target.flatten(), self.group)


def build():
    return Net()


def parallelize(model, mesh):
    rank, size = mesh["tp"].get_local_rank(), mesh["tp"].size()
    model.group = mesh.get_group("tp")
    model.head.weight = nn.Parameter(model.head.weight.detach().chunk(size)[rank].clone())


def batch():
    return torch.randint(WORDS, (2, 6)), torch.randint(WORDS, (2, 6))


def loss(model, batch):
    return model(*batch)


def own_place(target, width, group):
    """Return where each label stands in the rank's own words, and which labels stand elsewhere."""
    local = target - distributed.get_rank(group) * width
    outside = (local < 0) | (local >= width)
    return local.masked_fill(outside, 0), outside

'''

IN_FUNCTION = (
    MODEL
    + """
whole_loss = functional.cross_entropy


class SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, group):
        peak = logits.amax(-1)
        distributed.all_reduce(peak, op=distributed.ReduceOp.MAX, group=group)
        logits = logits - peak[:, None]
        powers = logits.exp()
        total = powers.sum(-1)
        distributed.all_reduce(total, group=group)
        local, outside = own_place(target, logits.shape[-1], group)
        picked = logits.gather(-1, local[:, None])[:, 0].masked_fill(outside, 0)
        distributed.all_reduce(picked, group=group)
        ctx.save_for_backward(powers / total[:, None], local, outside)
        return (total.log() - picked).mean()

    @staticmethod
    def backward(ctx, grad):
        result, local, outside = ctx.saved_tensors
        result = result.clone()
        result[torch.arange(len(local)), local] -= (~outside).to(result.dtype)
        return result * grad / len(local), None, None


def loss_of_part(logits, target, group):
    return SplitCrossEntropy.apply(logits, target, group)

"""
)

IN_LINES = (
    MODEL
    + """
whole_loss = functional.cross_entropy


def loss_of_part(logits, target, group):
    peak = logits.detach().max(-1, keepdim=True).values
    distributed.all_reduce(peak, op=distributed.ReduceOp.MAX, group=group)
    logits = logits - peak
    total = Sum.apply(logits.exp().sum(-1), group)
    local, outside = own_place(target, logits.shape[-1], group)
    picked = logits.gather(-1, local[:, None])[:, 0].masked_fill(outside, 0)
    return (total.log() - Sum.apply(picked, group)).mean()

"""
)

PICKED = (
    MODEL
    + '''
def whole_loss(logits, target):
    return functional.softplus(-logits.gather(-1, target[:, None])[:, 0]).mean()


class Pick(torch.autograd.Function):
    """The logit of each label, on all ranks."""

    @staticmethod
    def forward(ctx, logits, target, group):
        local, outside = own_place(target, logits.shape[-1], group)
        inside = ~outside
        ctx.width, ctx.saved = logits.shape[-1], (local, inside)
        picked = logits[torch.arange(len(local)), local] * inside
        distributed.all_reduce(picked, group=group)
        return picked

    @staticmethod
    def backward(ctx, grad):
        local, inside = ctx.saved
        result = grad.new_zeros(len(local), ctx.width)
        result.scatter_(1, local[:, None], (grad * inside)[:, None])
        return result, None, None


def loss_of_part(logits, target, group):
    return functional.softplus(-Pick.apply(logits, target, group)).mean()

'''
)

LOW_RANK = """
class LowRank(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.base, self.down = nn.Linear(16, 32, bias=False), nn.Linear(16, 4, bias=False)
        self.up = nn.Linear(4, 32, bias=False)
        self.base.weight.requires_grad_(False)

    def enter(self, x):
        return x if self.group is None else Copy.apply(x, self.group)

    def forward(self, x):
        low = self.enter(self.down(x))
        return self.base(self.enter(x)) + 2 * self.up(low)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.back = nn.RMSNorm(16), LowRank(), nn.Linear(32, 16, bias=False)
        self.back.weight.requires_grad_(False)

    def forward(self, x):
        out = self.back(functional.silu(self.wide(self.norm(x))))
        return x + (out if self.wide.group is None else Sum.apply(out, self.wide.group))


def build():
    return nn.Sequential(Block(), Block())


def parallelize(model, mesh):
    rank, size = mesh["tp"].get_local_rank(), mesh["tp"].size()
    for block in model:
        block.wide.group = mesh.get_group("tp")
        for linear, dim in ((block.wide.base, 0), (block.wide.up, 0), (block.back, 1)):
            linear.weight.data = linear.weight.data.chunk(size, dim)[rank].clone()


def batch():
    return torch.randn(4, 16)

"""

MAXIMUM = "    distributed.all_reduce(peak, op=distributed.ReduceOp.MAX, group=group)\n"
OWN_MAXIMUM = ("the max of its own part", "op=ReduceOp.MAX", "peak = ")

CASES = (
    Bug(
        "a sum in backward in front of both matrices of an adapter",
        "tp=2",
        LOW_RANK,
        (("self.enter(self.down(x))", "self.down(self.enter(x))"),),
        ("unreduced-gradient",),
        ("wide.up begins", "sums the ranks' parts of the gradient too late", "one too many for this branch: move it"),
        with_lines=True,
    ),
    Bug(
        "one sum in backward in front of a layer and its adapter",
        "tp=2",
        LOW_RANK,
        (
            ("        low = self.enter(self.down(x))\n", "        x = self.enter(x)\n        low = self.down(x)\n"),
            ("self.base(self.enter(x))", "self.base(x)"),
        ),
        ("unreduced-gradient",),
        ("wide.up begins", "or let the branch read what stands in front of it"),
        with_lines=True,
    ),
    Bug(
        "no sum in backward behind the first matrix of an adapter",
        "tp=2",
        LOW_RANK,
        (("self.enter(self.down(x))", "self.down(x)"),),
        ("unreduced-gradient",),
        ("Nothing sums", "over tp"),
        never=("too late", "one too many"),
        with_lines=True,
    ),
    Bug(
        "exponentials in a function relative to each rank's own maximum",
        "tp=2",
        IN_FUNCTION,
        (("    " + MAXIMUM, ""),),
        ("wrong-value",),
        OWN_MAXIMUM,
        with_lines=True,
    ),
    Bug(
        "exponentials in lines of the model relative to each rank's own maximum",
        "tp=2",
        IN_LINES,
        ((MAXIMUM, ""),),
        ("wrong-value",),
        OWN_MAXIMUM,
        with_lines=True,
    ),
    Bug(
        "a backward that takes labels of other ranks for label 0",
        "tp=2",
        IN_FUNCTION,
        (("-= (~outside).to(result.dtype)", "-= 1.0"),),
        ("wrong-value",),
        ("backward of SplitCrossEntropy doesn't match", "is True. The forward sets these to zero", "subtract nothing"),
        never=("peak",),
        with_lines=True,
    ),
    Bug(
        "a backward that forgets the label",
        "tp=2",
        IN_FUNCTION,
        (("-= (~outside).to(result.dtype)", "-= 0.0"),),
        ("wrong-value",),
        ("backward of SplitCrossEntropy doesn't match", "is False. The backward lacks"),
        never=("peak",),
        with_lines=True,
    ),
    Bug(
        "a backward that sends every rank the gradient of a label",
        "tp=2",
        PICKED,
        (("(grad * inside)", "grad"),),
        ("wrong-value",),
        ("backward of Pick doesn't match", "The forward sets these to zero"),
        with_lines=True,
    ),
    Bug(
        "a backward with another divisor",
        "tp=2",
        IN_FUNCTION,
        (("result * grad / len(local)", "result * grad * result.shape[-1] / len(local)"),),
        ("wrong-value", "wrong-scale"),
        ("backward of SplitCrossEntropy doesn't match|10 times|times 10",),
        never=("peak",),
        with_lines=True,
    ),
)
