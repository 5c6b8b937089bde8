"""What a gradient that is n times, or 1/n of, the unsharded model's comes of, where n is the size of mesh axes.

Whether an axis splits the batch, and whether it splits the tensor, tells apart what multiplies: FSDP reduces what it
splits and has a setting of its own, copies are reduced by the training loop, and along an axis whose ranks see the same
batch nothing is averaged at all. A reduction over an axis that splits a tensor is never advised: it mixes shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from fractions import Fraction

    from shardviz.check.step.compared import Compared
    from shardviz.dump.dump import Dump

    Batch = Mapping[str, bool]

Advice = tuple[str, str]
"""A cause and a fix."""

OF_ALL = "the loss that backward ran on, or the gradient after it"
OF_PART = "a divide factor of their modules, a term of the loss that reaches only them, or the gradient after backward"
"""What divides all gradients, or a part of them."""


@dataclass(frozen=True, slots=True)
class Over:
    """Axes whose sizes multiply to a factor.

    Attributes:
        axes: The axes.
        size: The product of their sizes.
        batch: Whether each of them splits the batch; None where that is not known.
        splits: Whether one of them splits a gradient that has the factor.
        labelled: Whether that gradient is a DTensor, as FSDP's are.
    """

    axes: tuple[str, ...]
    size: int
    batch: bool | None
    splits: bool
    labelled: bool

    @property
    def text(self) -> str:
        """The axes, as sentences call them."""
        return " * ".join(self.axes)


def batch_axes(dump: Dump) -> Batch | None:
    """Return for each axis of the run whether it splits the batch, over which the loss is an average.

    Returns:
        None where the dump has no loss, or one without a claim.
    """
    loss = dump.find("step", "scalar", "loss")
    claimed = loss.claimed if loss is not None else None
    if claimed is None or dump.files.mesh is None:
        return None
    pending = {axis for axis, _ in claimed.partial}
    return {axis: axis in pending for axis in dump.files.mesh.axes}


def batch_of(axes: Sequence[str], batch: Batch | None) -> bool | None:
    """Return whether all of some axes split the batch, or none of them; None where that differs or is not known."""
    known = {batch.get(axis) for axis in axes} if batch is not None else {None}
    return known.pop() if len(known) == 1 else None


def splits(one: Compared, axis: str) -> bool:
    """Whether ranks along an axis hold different parts of a tensor."""
    groups = one.mesh.groups(axis) if axis in one.mesh.axes else []
    return any(len({one.regions[rank] for rank in group if rank in one.regions}) > 1 for group in groups)


def advice(ratio: Fraction, found: Sequence[Over], *, of_all: bool) -> Advice:
    """Return the cause and the fix of gradients that have a factor, for all axes that it may come of.

    Args:
        ratio: The factor.
        found: The axes.
        of_all: Whether all gradients of the step have it; what all come from, as the loss, cannot be off by it else.
    """
    each = [(_too_large if ratio > 1 else _too_small)(over, of_all=of_all) for over in found]
    causes, fixes = (list(dict.fromkeys(texts)) for texts in zip(*each, strict=True))
    return "; or: ".join(causes), "; or ".join(fixes)


def _too_large(over: Over, *, of_all: bool) -> Advice:
    axes, size = over.text, over.size
    if over.batch is False:
        return _repeated(over)
    if over.splits and over.labelled and not of_all:
        return (
            f"FSDP averages over {axes} by itself; for these it was set to sum (set_gradient_divide_factor), or a term "
            f"of the loss that reaches only them, or their gradient itself, is multiplied by the size of {axes}",
            f"take set_gradient_divide_factor out of their modules, or pass it a factor {size} times as large; divide "
            f"only what reaches no other gradient by {size}, not the loss, which all gradients come from",
        )
    if over.splits and over.labelled:
        return (
            f"FSDP averages over {axes} by itself; it was set to sum (set_gradient_divide_factor), or the loss that "
            f"backward ran on is multiplied by the size of {axes}",
            f"take set_gradient_divide_factor out, or pass it a factor {size} times as large; or divide the loss by "
            f"{size}",
        )
    if over.splits:
        what = "the gradient, or the loss of each rank," if of_all else "the gradient"
        return (
            f"Each rank's loss is the mean over its own rows, and the gradient of what it alone holds, which {axes} "
            "splits, is the sum over all ranks' rows: nothing divided it",
            f"divide {what} by {size}, the size of {axes}; do not reduce it over {axes}, whose ranks hold different "
            "parts",
        )
    return (
        f"Contributions were summed over {axes} that should be averaged, or were reduced over it more than once",
        f"reduce over {axes} with ReduceOp.AVG, and once only",
    )


def _repeated(over: Over) -> Advice:
    """Return the advice for axes along which every rank computes the same loss."""
    axes = over.text
    return (
        f"Ranks along {axes} compute the same loss, and equal gradients were summed over it again: in backward, by "
        "torch.distributed.nn.functional.all_reduce, whose backward is a sum over ranks too, or by an all_reduce after "
        "it",
        f"leave that sum out: where products are added over {axes} in forward, use RowwiseParallel or a "
        "torch.autograd.Function that all_reduces in forward and returns the gradient as it is in backward",
    )


def _too_small(over: Over, *, of_all: bool) -> Advice:
    axes, size = over.text, over.size
    if over.batch is False and not over.splits:
        return (
            f"It was divided by the size of {axes}, too, as by the number of all ranks (world size), though ranks "
            f"along {axes} see the same batch; or parts that should be summed over {axes} were averaged",
            f"divide by the sizes of the axes that split the batch only, not by get_world_size(); where each rank "
            f"along {axes} has a part of the gradient, use ReduceOp.SUM",
        )
    if over.splits and over.labelled and over.batch is not False:
        return (
            f"FSDP averages over {axes} already, and something divides by its size once more: "
            f"{OF_ALL if of_all else OF_PART}",
            f"take that division by {size} out, or pass set_gradient_divide_factor one {size} times smaller",
        )
    if over.splits:
        return (
            f"It was divided by the size of {axes}, which splits it: what each rank holds has its whole gradient "
            "already",
            f"take that division by {size} out; do not reduce it over {axes}, whose ranks hold different parts",
        )
    return (
        f"An average was taken over {axes} where the ranks' contributions should be summed, or where they were divided "
        "already",
        f"reduce over {axes} with ReduceOp.SUM, or divide once only",
    )
