"""`unreduced-gradient`, `unreduced-output`: copies of one gradient or output were never made to agree.

Along an axis that does not split it every rank must have the same gradient, and the same output. Where they differ
along such an axis and their sum or mean is the unsharded model's, each rank has only its own part. Quiet where `.grad`
is None (HSDP between backward and all-reduce) and where a Partial placement says that the sum is still to come.

The names of a tied weight may go to different ranks: each has the gradient of its own use. On stages of a pipeline an
embedding and a head cannot share storage. They are copies, which stay equal only if the sum of both gradients is taken
on both (Megatron-LM's embedding group).

`wrong-value` of gradients that were reduced over an axis whose ranks have other weights, as stages of a pipeline. Ranks
along such an axis have tensors of the same shapes under other names. A reduction over it runs without a word and leaves
one gradient for different weights: equal numbers under different names tell it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from shardviz.check.step.comparison import apart_text
from shardviz.check.step.rules.factors import cause_of_ratio
from shardviz.explain.step.gradients import TiedShardsMisaligned, UnsummedTiedGradients
from shardviz.explain.step.sums import GradientNotReduced, MixedLayers, OutputNotReduced, UnreducedSharedPart
from shardviz.explain.templates import times_text
from shardviz.layout.notation import parse
from shardviz.relate.measures import (
    OPS,
    Reduction,
    is_of_other_parts,
    is_right_with,
    is_shared_with,
    ratio_of,
    reduced_over,
    reduction_among_holders,
    reduction_of,
)
from shardviz.relate.relations import Group, Pending, Related, Scaled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from shardviz.check.step.comparison import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding


TORCH_OPS: Mapping[Reduction, str] = {"mean": "AVG", "sum": "SUM", "norm": "SUM"}
"""Reductions, as torch calls what is sent."""


@dataclass(frozen=True)
class Unreduced:
    """A result that ranks hold unreduced, with the reduction that makes it right.

    Attributes:
        comparison: The result.
        kind: The reduction.
        axes: The axes to reduce over.
        ratio: What it is of the right one even then.
    """

    comparison: Compared
    kind: Reduction
    axes: tuple[str, ...]
    ratio: Fraction = Fraction(1)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have it."""
        return self.comparison.ranks

    @property
    def related(self) -> Related | None:
        """The reductions that are pending; None for a norm."""
        if self.kind == "norm":
            return None
        pending = (Pending(axis, OPS[self.kind]) for axis in self.axes)
        scaled = (Scaled(float(self.ratio)),) if self.ratio != 1 else ()
        return Related((Group(self.ranks, (*pending, *scaled)),))

    def wanted_of(self, rank: int) -> NDArray[np.float64]:
        """Return what a rank should hold."""
        return self.comparison.wanted_of(rank)

    def held_of(self, rank: int) -> NDArray[np.float64]:
        """Return a rank's own part."""
        return self.comparison.held_of(rank)

    @cached_property
    def whole(self) -> Mapping[int, NDArray[np.float64]]:
        """What each rank would have once it is reduced."""
        return reduced_over(self.comparison, self.kind, self.axes)


def own_part(kind: Reduction, axes: tuple[str, ...]) -> str:
    """Say what ranks hold if a reduction over axes is missing, in the notation: `+tp`, or `+tp:avg` for a mean."""
    op = ":avg" if kind == "mean" else ""
    return f"each rank's own part ({', '.join(f'+{axis}{op}' for axis in axes)})"


def check_unreduced(comparison: Compared, evidence: Evidence | None = None) -> Finding | None:
    """Return the finding if copies of a gradient or output differ along an axis, and a reduction makes them right."""
    missing = reduction_of(comparison) if comparison.copies_differ_along else None
    if missing is None:
        return _among_holders(comparison)
    reduction, over, ratio = missing
    if ratio != 1 and len(comparison.wrong) < len(comparison.values):
        return None  # a rank that has the whole gradient has not just its own part of it
    axes = " and ".join(over)
    low, high, worst = _farthest(comparison, comparison.mesh.groups(comparison.copies_differ_along[0]))
    whole = comparison.whose if ratio == 1 else f"{times_text(ratio)} {comparison.whose}"
    op = TORCH_OPS[reduction]
    cause: Cause = OutputNotReduced(over, op)
    if comparison.role == "grad":
        wrapper = comparison.wrapped_over(over)
        style = _style(evidence, comparison, over) if evidence is not None else ""
        part: Literal["", ".to_local()"] = ".to_local()" if comparison.is_dtensor else ""
        cause = GradientNotReduced(over, op, wrapper=wrapper, style=style, part=part)
        batch = evidence.batch if evidence is not None else None
        if ratio != 1:  # two things are wrong, and mending one of them leaves the other
            cause = replace(cause, ratio=ratio, rest=cause_of_ratio(comparison, ratio, over, batch))
    return comparison.finding(
        cause,
        f"the {comparison.what} differs along {axes}: {apart_text(low, high, worst)}",
        details=(f"their {reduction} is {whole}",),
        held=own_part(reduction, over),
    ).seen_in(Unreduced(comparison, reduction, over, ratio))


def _style(evidence: Evidence, comparison: Compared, axes: Sequence[str]) -> str:
    """Return the entry of a plan by which a gradient is reduced over axes whose ranks have the same batch.

    It is one of sequence parallelism if the module reads a dim that an axis splits, and the axis splits weights, too.
    """
    batch = evidence.batch
    if batch is None or any(batch.get(axis) is not False for axis in axes):
        return ""
    module = comparison.name.rpartition(".")[0]
    calls = evidence.calls.by_module.get(module, ()) if len(axes) == 1 and module else ()
    point = calls[0].point("input", "right") if calls else None
    has_plan = any(one.is_split(axes[0]) and one.is_dtensor for one in evidence.gradients.values())
    if point is None or not point.layout or not has_plan or not comparison.is_dtensor:
        return "none"
    dims = [dim for dim, chain in enumerate(parse(point.layout).chains) if axes[0] in chain]
    name = module.rpartition(".")[2]
    if len(dims) != 1 or name.isdecimal():
        return "none"
    return f'"{name}": SequenceParallel({"" if dims == [1] else f"sequence_dim={dims[0]}"})'


def _among_holders(comparison: Compared) -> Finding | None:
    """Return the finding if a reduction over the ranks that hold the same part, fewer than along any axis, is right."""
    holders = comparison.holders
    if comparison.role != "grad" or max(map(len, holders), default=0) < 2:
        return None
    low, high, worst = _farthest(comparison, holders)
    reduction = reduction_among_holders(comparison) if worst > comparison.tolerance else None
    if reduction is None:
        return None
    return comparison.finding(
        UnreducedSharedPart(len(holders), len(comparison.reduced), TORCH_OPS[reduction], holders),
        f"the gradient differs between ranks that hold the same part: {apart_text(low, high, worst)}",
        details=(f"the {reduction} over those that do is {comparison.whose}",),
        held="each rank's own contribution",
    )


def _farthest(result: Compared, groups: Sequence[Sequence[int]]) -> tuple[int, int, float]:
    """Return the two neighbors within groups whose copies of one part are farthest apart, and how far."""
    return max(result.neighbors_apart(groups), key=lambda pair: pair[2])


def check_other_layers(evidence: Evidence, comparison: Compared) -> Finding | None:
    """Return the finding if every wrong rank's gradient is that of another weight, which another rank has."""
    tied = (comparison.name, *evidence.tied_to(comparison.name))
    for axis in comparison.mesh.axes:
        for neighbor in evidence.wrong_gradients.near(comparison, axis):
            is_other = neighbor.name not in tied and neighbor.mesh == comparison.mesh
            if is_other and is_shared_with(comparison, neighbor, axis):
                names = (name for name in comparison.mesh.axes if name != axis)
                others = tuple(name for name in names if comparison.mesh.axis_size(name) > 1)
                which = f"that of {neighbor.name}, a different weight, on other ranks along {axis}"
                return comparison.finding(MixedLayers(axis, others), f"the gradient is equal to {which}")
    return None


def check_tied(evidence: Evidence, comparison: Compared) -> Finding | None:
    """Return the finding if the gradients of names that were one tensor were not summed, or not rightly."""
    names = evidence.tied_to(comparison.name)
    others = [evidence.gradients[name] for name in names if name in evidence.gradients]
    if not others:
        return None
    if not is_right_with(comparison, others):
        tied = next((other for other in others if is_of_other_parts(comparison, other)), None)
        if tied is None:
            return None
        return comparison.finding(
            TiedShardsMisaligned(),
            f"the gradient is equal to that of {tied.name} on other ranks, with which it was one tensor: but the local "
            "shards are different parts of it",
        )
    listed = " and ".join(other.name for other in others)
    if ratio_of(comparison) == Fraction(1, 1 + len(others)):
        uses = 1 + len(others)
        return comparison.finding(
            UnsummedTiedGradients(uses),
            f"the gradient is 1/{uses} of the unsharded model's: the gradients of its {uses} uses were averaged",
            kind="wrong-scale",
            details=(f"it is tied to {listed} on other ranks",),
        )
    return comparison.finding(
        UnsummedTiedGradients(),
        f"the gradient counts this name's use only: it is tied to {listed} on other ranks, and the sum of their "
        "gradients is the unsharded model's",
    )
