"""`wrong-scale`: a result is the unsharded model's, times a number.

A sum where a mean belongs multiplies by the number of ranks, a mean where a sum belongs divides by it. Whether an axis
splits the batch, and whether it splits the tensor, tells apart what multiplies: FSDP reduces what it splits and has a
setting of its own, copies are reduced by the training loop, and along an axis whose ranks see the same batch nothing is
averaged at all. A reduction over an axis that splits a tensor is never advised: it mixes shards. A number that is no
axis's size comes of what ranks compute by themselves: clipping by the norm of their own shard, a loss scale.

`unreduced-gradient`, `unreduced-output`: copies of one gradient or output were never made to agree.

Along an axis that does not split it every rank must have the same gradient, and the same output. Where they differ
along such an axis and their sum or mean is the unsharded model's, each rank has only its own part. Quiet if `.grad`
is None (HSDP between backward and all-reduce) and if a Partial placement says that the sum is still to come.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from shardviz.check.step.comparison import Compared, apart_text
from shardviz.explain.step.factors import (
    AveragedNotSummed,
    DdpAveragesShares,
    DividedByWorldSize,
    DividedShardGradient,
    DivideFactorOfSome,
    FactorOfAxes,
    FsdpDividedAgain,
    FsdpSumsGradients,
    LostContributions,
    MultipliedTerm,
    RepeatedSum,
    ScaledSharedPart,
    SequenceOfWhole,
    SummedContributions,
    SummedNotAveraged,
    UndividedShardGradient,
)
from shardviz.explain.step.losses import DividedMean, SummedValue, UnsummedValue
from shardviz.explain.step.modules import AveragedForward, RepeatedForwardSum
from shardviz.explain.step.scales import ClippedByParts, LossScaleLeft, ScaledByOwnCount, ScaledForward, ScaledInStep
from shardviz.explain.step.sums import GradientNotReduced, OutputNotReduced, UnreducedSharedPart
from shardviz.explain.step.whole_step import RankDependentCode
from shardviz.explain.templates import number, times_text
from shardviz.groups import the_only
from shardviz.layout.notation import parse
from shardviz.layout.splits import axes_in
from shardviz.relate.measures import (
    OPS,
    Reduction,
    axes_of_size,
    factors_of_ranks,
    ratio_of,
    reduced_over,
    reduction_among_holders,
    reduction_of,
)
from shardviz.relate.relations import Group, Pending, Related, Scaled
from shardviz.relate.tolerance import SINGLE, near_ratio
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from shardviz.check.step.evidence import Evidence
    from shardviz.check.step.rules.all_gradients import Part
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding
    from shardviz.layout.mesh import Mesh

    Batch = Mapping[str, bool]


LOSS_SCALE = 16
"""Gradients that are larger by this power of two or a higher one on some ranks only may carry a loss scale."""


@dataclass(frozen=True, slots=True)
class Over:
    """Axes whose sizes multiply to a factor.

    Attributes:
        size: The product of their sizes.
        batch: Whether each of them splits the batch; None if that is not known.
        apart: Those of them whose ranks have different parts of a gradient that has the factor, or different weights.
        labeled: Whether that gradient is a DTensor, as FSDP's are, and FSDP may reduce it over these axes.
        averaged: Whether FSDP was seen to divide it by the number of ranks, so that no other factor was set.
        by_ddp: Whether DistributedDataParallel reduces it over these axes.
        library: What reduces it to shards, if it isn't FSDP.
    """

    axes: tuple[str, ...]
    size: int
    batch: bool | None
    apart: tuple[str, ...]
    labeled: bool
    averaged: bool
    by_ddp: bool
    library: str = ""

    @property
    def text(self) -> str:
        """The axes, as sentences call them."""
        return " * ".join(self.axes)


def batch_of(axes: Sequence[str], batch: Batch | None) -> bool | None:
    """Return whether all of some axes split the batch, or none of them; None if that differs or is not known."""
    return the_only({batch.get(axis) for axis in axes}) if batch is not None else None


def check_scale(
    comparison: Compared,
    batch: Batch | None = None,
    gradients_alike: Part | None = None,
    *,
    is_mean: bool = False,
    parted: Collection[str] = (),
) -> Finding | None:
    """Return the finding if every rank is off by the same ratio, or by a number of its own.

    Args:
        batch: Whether each axis of the run splits the batch; None if that is not known.
        gradients_alike: The gradients that have the same factor; None if the others are not known.
        is_mean: Whether the value is known to be a mean over the batch, as the loss is.
        parted: The axes of the batch along which only one rank has the weight, such as an expert.
    """
    ratio = ratio_of(comparison)
    if ratio is None or ratio == 1:
        return _by_numbers(comparison, gradients_alike)
    axes = overs([comparison], ratio, batch, parted)
    size = " or ".join(over.text for over in axes)
    of_all = gradients_alike is not None and gradients_alike.is_all
    if comparison.role == "scalar":
        of_small = DividedMean(size, 1 / ratio) if is_mean else UnsummedValue(size)
        cause: Cause = SummedValue(size) if ratio > 1 else of_small
    elif (of_parts := _of_shared(comparison, ratio) or _of_divisors(comparison, ratio)) is not None:
        cause = of_parts
    elif comparison.role == "output":
        of_axes = (RepeatedForwardSum if ratio > 1 else AveragedForward)("the model itself", size)
        cause = of_axes if size and ratio > 0 else ScaledForward()
    else:
        cause = _of_gradient(comparison.mesh, ratio, axes, of_all=of_all)
    sentence = f"the {comparison.what} is {times_text(ratio)} {comparison.whose}{size_clause(ratio, size)}"
    return comparison.finding(
        cause, sentence, details=(gradients_alike.text,) if gradients_alike is not None and gradients_alike.text else ()
    )


def check_whole_sequence(evidence: Evidence, comparison: Compared) -> Finding | None:
    """Return the finding if placements sum equal gradients of a module that is given the whole on each rank."""
    axes = [axis for axis, op in comparison.claimed_partial if op == "sum"]
    calls = evidence.calls.by_module.get(comparison.name.rpartition(".")[0], ()) if axes else ()
    inputs = [call.point("input", "right") for call in calls]
    layouts = [parse(point.layout).chains for point in inputs if point is not None and point.layout]
    is_whole = (
        bool(calls) and len(layouts) == len(calls) and not any({*axes_in(c)} & {*axes} for d in layouts for c in d)
    )
    values = comparison.values.items()
    if not is_whole or not all(comparison.near(held, comparison.wanted_of(rank)) for rank, held in values):
        return None
    size = comparison.mesh.size_over(axes)
    sentence = f"the gradient is {size} times {comparison.whose}{size_clause(size, ' * '.join(axes))}"
    alike = evidence.parts.part_with(comparison).text
    cause = SequenceOfWhole(" and ".join(axes), size)
    return comparison.finding(cause, sentence, details=(alike,) if alike else ())


def _of_gradient(mesh: Mesh, ratio: Fraction, axes: Sequence[Over], *, of_all: bool) -> Cause:
    if axes:
        return cause_of_axes(ratio, axes, of_all=of_all)
    is_size = bool(_products(mesh, ratio))  # of stages, along which nothing is reduced
    if ratio > 1:
        return SummedContributions(ratio, of_all, is_size=is_size)
    return LostContributions(ratio, 1 / ratio, is_size=is_size)


def _of_shared(comparison: Compared, ratio: Fraction) -> Cause | None:
    """Return the cause if the factor is the number of ranks that hold each part, and these are those of no axis."""
    holders = comparison.holders
    count = len(holders[0]) if holders else 0
    is_shared = count > 1 and all(len(ranks) == count for ranks in holders) and len(holders) > 1
    axes = [group for axis in comparison.mesh.axes for group in comparison.mesh.groups(axis)]
    if not is_shared or ratio not in (count, Fraction(1, count)) or holders[0] in axes:
        return None
    return ScaledSharedPart(len(holders), len(comparison.reduced), count, tuple(holders), is_sum=ratio > 1)


def _of_divisors(comparison: Compared, ratio: Fraction) -> Cause | None:
    """Return the cause if FSDP divides other gradients by another number, which would make this one right."""
    fsdp = (comparison.wrappers or {}).get("fsdp")
    if fsdp is None or fsdp.divides_by is None:
        return None
    right = next((other for other in comparison.other_divisors if other == ratio * fsdp.divides_by), None)
    return None if right is None else DivideFactorOfSome(fsdp.divides_by, right)


def cause_of_ratio(comparison: Compared, ratio: Fraction, apart: Sequence[str], batch: Batch | None) -> Cause:
    """Explain a gradient that is scaled and whose copies also differ along some axes.

    Nothing was reduced over these; if another axis has the size, it is the other.
    """
    candidates = overs([comparison], ratio, batch)
    others = [over for over in candidates if not {*over.axes} & {*apart}]
    return _of_gradient(comparison.mesh, ratio, others or candidates, of_all=False)


def overs(
    gradients: Sequence[Compared], ratio: Fraction, batch: Batch | None, parted: Collection[str] = ()
) -> list[Over]:
    """Return the fewest axes whose sizes multiply to the ratio, or to one over it, in all ways.

    Axes along which some ranks have no such gradient, as stages of a pipeline, are left out: nothing reduces over them.
    Experts of which each rank has some get gradients of all ranks' rows all the same: `parted` has their axes.
    """
    mesh = gradients[0].mesh
    spread = {axis for axis in mesh.axes for gradient in gradients if gradient.has_group(axis)} | {*parted}
    return [
        Over(
            axes,
            _size(ratio),
            batch_of(axes, batch),
            tuple(axis for axis in axes if axis in parted or any(one.is_split(axis) for one in gradients)),
            any(
                gradient.claimed is not None
                and (gradient.wrappers is None or gradient.sharding is not None)
                and gradient.wrapped_over(axes) not in ("none", "alone")
                and any(gradient.is_split(axis) for axis in axes)
                for gradient in gradients
            ),
            all(gradient.is_averaged_by_fsdp for gradient in gradients),
            all(gradient.wrapped_over(axes) == "ddp" for gradient in gradients),
            "DeepSpeed" if all("zero" in (gradient.wrappers or {}) for gradient in gradients) else "",
        )
        for axes in _products(mesh, ratio)
        if set(axes) <= spread
    ]


def cause_of_axes(ratio: Fraction, axes: Sequence[Over], *, of_all: bool, or_else: Cause | None = None) -> Cause:
    """Return the cause of gradients that have a factor, with all axes that it may come of.

    Args:
        of_all: Whether all gradients of the step have it; what all come from, as the loss, cannot be off by it else.
        or_else: What else it may come of.
    """
    causes = [(_too_large if ratio > 1 else _too_small)(over, of_all=of_all) for over in axes]
    causes.sort(key=lambda cause: isinstance(cause, MultipliedTerm))
    if or_else is not None:  # it says what multiplies the loss
        causes = [cause for cause in causes if not isinstance(cause, MultipliedTerm)]
        if not causes:
            return or_else
    return replace(causes[0], or_over=tuple(causes[1:]), or_else=or_else)


def _too_large(over: Over, *, of_all: bool) -> FactorOfAxes:
    axes, size = over.text, over.size
    if over.batch is False:
        return RepeatedSum(axes)
    if over.apart:
        if over.labeled:
            return (MultipliedTerm if over.averaged else FsdpSumsGradients)(axes, size, of_all)
        return UndividedShardGradient(axes, size, of_all, " and ".join(over.apart))
    return SummedNotAveraged(axes)


def _too_small(over: Over, *, of_all: bool) -> FactorOfAxes:
    axes, size = over.text, over.size
    if over.batch is False and not over.apart:
        return DividedByWorldSize(axes)
    if over.apart and over.labeled and over.batch is not False:
        return FsdpDividedAgain(axes, size, of_all, axes if over.averaged else "", over.library)
    if over.apart:
        return DividedShardGradient(axes, size)
    return DdpAveragesShares(axes, size) if over.by_ddp else AveragedNotSummed(axes, not of_all)


def _by_numbers(comparison: Compared, gradients_alike: Part | None) -> Finding | None:
    """Return the finding if every rank's values are those wanted, times any number."""
    factors = factors_of_ranks(comparison)
    if not factors:
        return None
    low, high = min(factors.values()), max(factors.values())
    alike = high - low <= near_ratio(comparison.rounding.epsilon) * abs(high)
    shown = listed(f"{number(factor)} on rank {rank}" for rank, factor in factors.items())
    times = f"{number(high)} times {comparison.whose} on every rank" if alike else f"scaled by {shown}"
    cause: Cause = ClippedByParts() if comparison.role == "grad" else ScaledByOwnCount()
    if comparison.role == "grad" and len(comparison.wrong) < len(factors) and high > 1 + SINGLE:  # clipping lessens
        cause = RankDependentCode(comparison.wrong)
    if _is_loss_scale(factors.values()):
        cause = LossScaleLeft()
    if alike:
        of_all = gradients_alike is None or not gradients_alike.is_beside_right
        cause = ScaledForward() if comparison.role == "output" else ScaledInStep(of_all)
    return comparison.finding(cause, f"the {comparison.what} is {times}", kind="wrong-scale")


def _is_loss_scale(factors: Iterable[float]) -> bool:
    """Whether some ranks' factor is 1 and that of all others one large power of two."""
    high = {factor for factor in factors if abs(factor - 1) > SINGLE}
    scale = max(high, default=0.0)
    power = 2.0 ** round(math.log2(scale)) if scale >= LOSS_SCALE else 0.0
    return bool(power) and all(abs(factor - power) <= SINGLE * power for factor in high)


def size_in_words(mesh: Mesh, ratio: Fraction, without: Collection[str] = ()) -> str:
    """Name the fewest axes whose sizes multiply to the ratio or to one over it; `without` last."""
    products = _products(mesh, ratio)
    likely = [axes for axes in products if not {*axes} & {*without}]
    return " or ".join(" * ".join(axes) for axes in likely or products)


def _size(ratio: Fraction) -> int:
    return ratio.numerator if ratio > 1 else ratio.denominator


def _products(mesh: Mesh, ratio: Fraction) -> list[tuple[str, ...]]:
    """Return the sets of the fewest axes whose sizes multiply to the ratio, or to one over it."""
    return axes_of_size(mesh, _size(ratio)) if 1 in (ratio.numerator, ratio.denominator) else []


def size_clause(ratio: Fraction | float, axes: str) -> str:
    """Return the clause that names the axes whose size explains a ratio; empty if none does."""
    return f", {'' if ratio > 1 else '1 over '}the size of {axes}" if axes else ""


TORCH_OPS: Mapping[Reduction, str] = {"mean": "AVG", "sum": "SUM", "norm": "SUM"}
"""Reductions, as torch calls what is sent."""


@dataclass(frozen=True)
class Unreduced:
    """A result that ranks hold unreduced, with the reduction that makes it right.

    Attributes:
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


def _waits(evidence: Evidence, comparison: Compared) -> bool:
    """Whether the DDP that has a parameter has another one that got no gradient, and waits for it."""
    ddp, dump = (comparison.wrappers or {}).get("ddp"), evidence.dump
    held = dump.by_name("step", "grad").keys()
    return (
        ddp is not None
        and not ddp.finds_unused
        and any(held.isdisjoint((name, *dump.ties.get(name, ()))) for name in ddp.names)
    )


def check_unreduced(evidence: Evidence | None, comparison: Compared) -> Finding | None:
    """Return the finding if copies of a gradient or output differ along an axis, and a reduction makes them right."""
    missing = reduction_of(comparison) if comparison.copies_differ_along else None
    if missing is None:
        return _among_holders(comparison)
    reduction, over, ratio = missing
    if ratio != 1 and len(comparison.wrong) < len(comparison.values):
        return None  # a rank that has the whole gradient has not just its own part of it
    op = TORCH_OPS[reduction]
    cause: Cause = OutputNotReduced(over, op)
    if comparison.role == "grad":
        wrapper = comparison.wrapped_over(over)
        if wrapper == "ddp" and evidence is not None and _waits(evidence, comparison):
            wrapper = "unused"
        style = _style(evidence, comparison, over) if evidence is not None else ""
        part: Literal["", ".to_local()"] = ".to_local()" if comparison.is_dtensor else ""
        cause = GradientNotReduced(over, op, wrapper=wrapper, style=style, part=part)
        batch = evidence.batch if evidence is not None else None
        if ratio != 1:  # two things are wrong, and mending one of them leaves the other
            cause = replace(cause, ratio=ratio, rest=cause_of_ratio(comparison, ratio, over, batch))
    return unreduced_finding(cause, Unreduced(comparison, reduction, over, ratio))


def unreduced_finding(cause: Cause, unreduced: Unreduced) -> Finding:
    """Return the finding of copies that a reduction makes right."""
    comparison, axes = unreduced.comparison, " and ".join(unreduced.axes)
    low, high, worst = _farthest(comparison, comparison.mesh.groups(comparison.copies_differ_along[0]))
    whole = comparison.whose if unreduced.ratio == 1 else f"{times_text(unreduced.ratio)} {comparison.whose}"
    return comparison.finding(
        cause,
        f"the {comparison.what} differs along {axes}: {apart_text(low, high, worst)}",
        details=(f"their {unreduced.kind} is {whole}",),
        held=own_part(unreduced.kind, unreduced.axes),
    ).seen_in(unreduced)


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
    if comparison.role != "grad" or len(holders) < 2 or max(map(len, holders)) < 2:
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
