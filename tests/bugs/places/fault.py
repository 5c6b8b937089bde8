"""A fault: a right program of several layers, the edits that put one wrong thing into it, and where that is."""

from __future__ import annotations

from dataclasses import dataclass

from tests.bugs.case import HEAD

IN_BFLOAT16 = '''

_built, _batch = build, batch


def refuse_float64(module, inputs):
    """Raise for float64, as a kernel does that was written for narrow numbers."""
    if any(torch.is_tensor(one) and one.dtype == torch.float64 for one in (*inputs, *module.parameters())):
        raise TypeError("this kernel wants bfloat16")


def build():
    model = _built().to(torch.bfloat16)
    model.register_forward_pre_hook(refuse_float64)
    return model


def batch():
    whole = _batch()
    return whole.to(torch.bfloat16) if whole.is_floating_point() else whole
'''
"""What makes a program compute in bfloat16, sharded and unsharded."""


OTHER_RANK = '''
class Other(torch.autograd.Function):
    """What the other rank of two has; gradients go back to it."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(2)]
        distributed.all_gather(parts, x.contiguous(), group=group)
        return parts[1 - distributed.get_group_rank(group, distributed.get_rank())]

    @staticmethod
    def backward(ctx, grad):
        return Other.apply(grad, ctx.group), None

    @staticmethod
    def of(group):
        return lambda x: Other.apply(x, group)

'''
"""Exchanges activations between two ranks, for faults that have those of another one."""

LAYERS_AND_HEAD = """

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(FEATURES, 5)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build():
    return Model()

"""
"""A model of `LAYERS` times `Layer`."""

MEAN_OVER_DP = """

def step(model, rows, mesh):
    loss = model(rows).square().mean()
    loss.backward()
    for parameter in [one for one in model.parameters() if one.grad is not None]:
        distributed.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        parameter.grad /= mesh["dp"].size()
    return loss.detach()

"""
"""A step after which gradients are averaged over dp by hand."""

NOTHING = '    """Leave everything as it is."""\n'
"""What a right program's `spoil` does."""


def spoiled(call: str) -> tuple[tuple[str, str], ...]:
    """Return the edit after which `spoil` does something."""
    return ((NOTHING, f"    {call}\n"),)


@dataclass(frozen=True)
class Program:
    """A right program.

    Attributes:
        name: Model and sharding, in a few words.
        mesh: `dp=2,tp=2`.
        text: The probe without its imports.
    """

    name: str
    mesh: str
    text: str

    def source(self, edits: tuple[tuple[str, str], ...] = (), *, narrow: bool = False) -> str:
        """Return a probe's source, with edits, in float64 or in bfloat16."""
        text = self.text
        for right, wrong in edits:
            assert text.count(right) == 1, f"{self.name}: {right!r} stands {text.count(right)} times in the program"
            text = text.replace(right, wrong)
        return HEAD + text + (IN_BFLOAT16 if narrow else "")


@dataclass(frozen=True)
class Fault:
    """One wrong thing at a known place.

    Attributes:
        name: What is wrong, in a few words.
        program: The right program.
        edits: Pairs of a text that stands once in it and what the faulty one has in its stead.
        places: The modules that are rightly named first; the first one is best.
        words: Each must stand in what the first finding says, `a|b` where either will do.
        never: What no finding may say.
    """

    name: str
    program: Program
    edits: tuple[tuple[str, str], ...]
    places: tuple[str, ...]
    words: tuple[str, ...]
    never: tuple[str, ...] = ()

    def source(self, *, narrow: bool = False) -> str:
        """Return the faulty probe's source."""
        return self.program.source(self.edits, narrow=narrow)
