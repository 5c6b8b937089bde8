"""Bugs that are one change of a right program: another op, a missing collective, another dim."""

from __future__ import annotations

from tests.bugs.case import Bug

EIGHT_BITS_IN = """
class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        distributed.all_reduce(x, group=group)
        return x
    @staticmethod
    def backward(ctx, grad):
        return grad, None
class MLP(nn.Module):
    group = None
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16, bias=False)
    def forward(self, x):
        h = torch.relu(self.up(x))
        amax = h.detach().abs().max()
        if self.group is not None:
            distributed.all_reduce(amax, op=distributed.ReduceOp.MAX, group=self.group)
        scale = 448 / amax
        rounded = (h.detach() * scale).to(torch.float8_e4m3fn).to(h.dtype) / scale
        out = self.down(h + (rounded - h.detach()))
        if self.group is not None:
            out = Sum.apply(out, self.group)
        return out
def build(): return MLP()
def parallelize(model, mesh):
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for weight, dim in ((model.up.weight, 0), (model.up.bias, 0), (model.down.weight, 1)):
        weight.data = weight.data.chunk(ranks, dim)[rank].clone()
    model.group = mesh.get_group()
def batch(): return torch.randn(6, 16)
"""

CASES = (
    Bug(
        "a float8 scale from the sum of the ranks' largest",
        "tp=2",
        EIGHT_BITS_IN,
        (("op=distributed.ReduceOp.MAX, ", ""),),
        ("wrong-value",),
        ("amax", "with SUM, not with MAX"),
        ("scale of their own",),
    ),
    Bug(
        "a float8 scale from the smallest of the ranks' largest",
        "tp=4",
        EIGHT_BITS_IN,
        (("ReduceOp.MAX", "ReduceOp.MIN"),),
        ("wrong-value",),
        ("amax", "with MIN, not with MAX"),
    ),
    Bug(
        "a sum left out behind a cast to float8",
        "tp=2",
        EIGHT_BITS_IN,
        (("out = Sum.apply(out, self.group)", "pass"),),
        ("unreduced-output",),
        ("sum over tp",),
        with_lines=True,
    ),
)
