"""What a gradient that is n times, or 1/n of, the unsharded model's comes of, where n is the size of mesh axes.

Whether an axis splits the batch, and whether it splits the tensor, tells apart what multiplies: FSDP reduces what it
splits and has a setting of its own, copies are reduced by the training loop, and along an axis whose ranks see the same
batch nothing is averaged at all. A reduction over an axis that splits a tensor is never advised: it mixes shards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardviz.explain.factors import (
    AveragedNotSummed,
    DividedByWorldSize,
    DividedShardGradient,
    FsdpDividedAgain,
    FsdpSumsGradients,
    RepeatedSum,
    SummedNotAveraged,
    UndividedShardGradient,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from fractions import Fraction

    from shardviz.check.step.compared import Compared
    from shardviz.dump.dump import Dump
    from shardviz.explain.cause import Cause
    from shardviz.explain.factors import FactorOfAxes

    Batch = Mapping[str, bool]


@dataclass(frozen=True, slots=True)
class Over:
    """Axes whose sizes multiply to a factor.

    Attributes:
        axes: The axes.
        size: The product of their sizes.
        batch: Whether each of them splits the batch; None if that is not known.
        splits: Whether one of them splits a gradient that has the factor.
        labeled: Whether that gradient is a DTensor, as FSDP's are.
    """

    axes: tuple[str, ...]
    size: int
    batch: bool | None
    splits: bool
    labeled: bool

    @property
    def text(self) -> str:
        """The axes, as sentences call them."""
        return " * ".join(self.axes)


def batch_axes(dump: Dump) -> Batch | None:
    """Return for each axis of the run whether it splits the batch, over which the loss is an average.

    Returns:
        None if the dump has no loss, or one without a claim.
    """
    loss = dump.find("step", "scalar", "loss")
    claimed = loss.claimed if loss is not None else None
    if claimed is None or dump.files.mesh is None:
        return None
    pending = {axis for axis, _ in claimed.partial}
    return {axis: axis in pending for axis in dump.files.mesh.axes}


def batch_of(axes: Sequence[str], batch: Batch | None) -> bool | None:
    """Return whether all of some axes split the batch, or none of them; None if that differs or is not known."""
    known = {batch.get(axis) for axis in axes} if batch is not None else {None}
    return known.pop() if len(known) == 1 else None


def splits(result: Compared, axis: str) -> bool:
    """Whether ranks along an axis hold different parts of a tensor."""
    groups = result.mesh.groups(axis) if axis in result.mesh.axes else []
    return any(len({result.regions[rank] for rank in group if rank in result.regions}) > 1 for group in groups)


def cause_of_axes(ratio: Fraction, axes: Sequence[Over], *, of_all: bool, or_else: Cause | None = None) -> Cause:
    """Return the cause of gradients that have a factor, with all axes that it may come of.

    Args:
        ratio: The factor.
        axes: The axes.
        of_all: Whether all gradients of the step have it; what all come from, as the loss, cannot be off by it else.
        or_else: What else it may come of.
    """
    first, *others = ((_too_large if ratio > 1 else _too_small)(over, of_all=of_all) for over in axes)
    return replace(first, or_over=tuple(others), or_else=or_else)


def _too_large(over: Over, *, of_all: bool) -> FactorOfAxes:
    axes, size = over.text, over.size
    if over.batch is False:
        return RepeatedSum(axes)
    if over.splits:
        return (FsdpSumsGradients if over.labeled else UndividedShardGradient)(axes, size, of_all)
    return SummedNotAveraged(axes)


def _too_small(over: Over, *, of_all: bool) -> FactorOfAxes:
    axes, size = over.text, over.size
    if over.batch is False and not over.splits:
        return DividedByWorldSize(axes)
    if over.splits and over.labeled and over.batch is not False:
        return FsdpDividedAgain(axes, size, of_all)
    return DividedShardGradient(axes, size) if over.splits else AveragedNotSummed(axes)
