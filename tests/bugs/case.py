"""A case: a right program, and the edits that make a silent bug of it."""

from __future__ import annotations

from dataclasses import dataclass

HEAD = '''
import math
import torch
from torch import distributed, nn
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor


def parallelize(model, mesh):
    """Leave every weight whole."""


class Sum(torch.autograd.Function):
    """The sum over ranks, each of which computes the whole loss: backward hands the gradient on."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Copy(torch.autograd.Function):
    """The same on all ranks, each of which uses its own part: backward sums."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        distributed.all_reduce(grad, group=ctx.group)
        return grad, None


def own(whole, mesh, dim=0, axis="tp"):
    return nn.Parameter(whole.detach().chunk(mesh[axis].size(), dim)[mesh.get_local_rank(axis)].clone())


class Exchange(torch.autograd.Function):
    """Send parts of unequal lengths to the ranks of a group, and gradients back."""

    @staticmethod
    def forward(ctx, x, sent, received, group):
        ctx.sent, ctx.received, ctx.group = sent, received, group
        out = x.new_empty(sum(received), *x.shape[1:])
        distributed.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad, ctx.received, ctx.sent, ctx.group), None, None, None

'''
"""What every program begins with; what a program defines again counts. `Sum` and `Copy` are tensor parallel by hand:
out of a block a sum in forward, into it one in backward."""


@dataclass(frozen=True)
class Bug:
    """A silent bug and its right twin, which differ in a few lines.

    Attributes:
        name: What is wrong, in a few words.
        mesh: `dp=2,tp=2`.
        program: The right one, a probe without its imports.
        edits: Pairs of a text that stands once in the program and what the bug has in its stead.
        kinds: The kinds of findings that name it rightly.
        words: Each must stand in what the findings say, `a|b` where either will do.
        never: What no finding may say: causes that are not true, fixes that do not mend it.
        with_lines: Whether ranks are asked for the lines of the first wrong module, as `shardviz probe` asks them.
    """

    name: str
    mesh: str
    program: str
    edits: tuple[tuple[str, str], ...]
    kinds: tuple[str, ...]
    words: tuple[str, ...]
    never: tuple[str, ...] = ()
    with_lines: bool = False

    @property
    def right(self) -> str:
        """The right twin's source."""
        return HEAD + self.program

    @property
    def wrong(self) -> str:
        """The bug's source."""
        text = self.program
        for right, wrong in self.edits:
            assert text.count(right) == 1, f"{self.name}: {right!r} stands {text.count(right)} times in the program"
            text = text.replace(right, wrong)
        return HEAD + text


@dataclass(frozen=True)
class Healthy:
    """A right program that looks like a bug, or uses a hook in a way of its own.

    Attributes:
        name: What is odd about it.
        mesh: `dp=2,tp=2`.
        program: A probe without its imports.
    """

    name: str
    mesh: str
    program: str

    @property
    def right(self) -> str:
        """Its source."""
        return HEAD + self.program
