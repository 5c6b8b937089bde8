"""`wrong-scale`: a result is the unsharded model's, times a number.

A sum where a mean belongs multiplies by the number of ranks, a mean where a sum belongs divides by it. A number that is
no axis's size comes of what ranks compute by themselves: clipping by the norm of their own shard, a loss scale.
`rules.common` looks at all gradients together, `rules.factors` says what an axis's size comes of.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.compared import ranks_by_part
from shardviz.check.step.rules.ratios.factors import Over, batch_of, cause_of_axes, splits
from shardviz.check.step.words import WHAT, claimed_text, size_clause
from shardviz.explain.factors import (
    ClippedByParts,
    LossScaleLeft,
    LostContributions,
    ScaledByOwnCount,
    ScaledForward,
    ScaledInStep,
    ScaledSharedPart,
    SummedContributions,
)
from shardviz.explain.losses import DividedMean, SummedValue, UnsummedValue
from shardviz.explain.templates import number, times_text
from shardviz.relate.factors import factor_of, ratio_near
from shardviz.relate.tolerance import EXPLAINED, SINGLE, least_factor, near_ratio
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.compared import Compared
    from shardviz.check.step.rules.ratios.factors import Batch
    from shardviz.check.step.rules.ratios.part import Part
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding
    from shardviz.layout.mesh import Mesh

MAX_LISTED = 3
LOSS_SCALE = 16
"""Gradients that are larger by this power of two or a higher one on some ranks only may carry a loss scale."""


def check_scale(
    result: Compared, batch: Batch | None = None, part: Part | None = None, *, is_mean: bool = False
) -> Finding | None:
    """Return the finding if every rank is off by the same ratio, or by a number of its own.

    Args:
        result: The result.
        batch: Whether each axis of the run splits the batch; None if that is not known.
        part: The gradients that have the same factor; None if the others are not known.
        is_mean: Whether the value is known to be a mean over the batch, as the loss is.
    """
    ratio = ratio_to_wanted(result, result.reduced)
    if ratio is None or ratio == 1:
        return _by_numbers(result, part)
    axes = overs([result], ratio, batch)
    size = " or ".join(over.text for over in axes)
    of_all = part is not None and part.is_all
    cause = (
        _of_value(ratio, size, is_mean=is_mean)
        if result.role == "scalar"
        else _of_shared(result, ratio) or _of_gradient(ratio, axes, of_all=of_all)
    )
    return cause.finding(
        result.name,
        result.wrong,
        f"the {WHAT[result.role]} is {times_text(ratio)} {result.whose}{size_clause(ratio, size)}",
        details=(part.text,) if part is not None and part.text else (),
        claimed=claimed_text(result),
    )


def _of_value(ratio: Fraction, axes: str, *, is_mean: bool) -> Cause:
    """Return the cause of a logged number's factor."""
    if ratio > 1:
        return SummedValue(axes)
    return DividedMean(axes, 1 / ratio) if is_mean else UnsummedValue(axes)


def _of_gradient(ratio: Fraction, axes: Sequence[Over], *, of_all: bool) -> Cause:
    if axes:
        return cause_of_axes(ratio, axes, of_all=of_all)
    return SummedContributions(ratio, of_all) if ratio > 1 else LostContributions(ratio, 1 / ratio)


def _of_shared(result: Compared, ratio: Fraction) -> Cause | None:
    """Return the cause if the factor is the number of ranks that hold each part, and these are those of no axis."""
    holders = ranks_by_part(result)
    count = len(holders[0]) if holders else 0
    is_shared = count > 1 and all(len(ranks) == count for ranks in holders) and len(holders) > 1
    axes = [group for axis in result.mesh.axes for group in result.mesh.groups(axis)]
    if not is_shared or ratio not in (count, Fraction(1, count)) or holders[0] in axes:
        return None
    return ScaledSharedPart(len(holders), len(result.reduced), count, tuple(holders), is_sum=ratio > 1)


def cause_of_ratio(result: Compared, ratio: Fraction, apart: Sequence[str], batch: Batch | None) -> Cause:
    """Return the cause of a ratio that a gradient has besides its copies differing along some axes.

    Nothing was reduced over these; if another axis has the size, it is the other.
    """
    found = overs([result], ratio, batch)
    others = [over for over in found if not {*over.axes} & {*apart}]
    return _of_gradient(ratio, others or found, of_all=False)


def overs(gradients: Sequence[Compared], ratio: Fraction, batch: Batch | None) -> list[Over]:
    """Return the fewest axes whose sizes multiply to the ratio, or to one over it, in all ways.

    Axes along which some ranks have no such gradient, as stages of a pipeline, are left out: nothing reduces over them.
    """
    first = gradients[0]
    spread = [axis for axis in first.mesh.axes if any(_spread(one, axis) for one in gradients)]
    return [
        Over(
            axes,
            _size(ratio),
            batch_of(axes, batch),
            any(splits(one, axis) for one in gradients for axis in axes),
            any(one.claimed is not None and any(splits(one, axis) for axis in axes) for one in gradients),
        )
        for axes in _products(first.mesh, ratio)
        if set(axes) <= set(spread)
    ]


def _spread(result: Compared, axis: str) -> bool:
    return axis in result.mesh.axes and any(
        all(rank in result.reduced for rank in group) for group in result.mesh.groups(axis)
    )


def ratio_to_wanted(result: Compared, values: Mapping[int, NDArray[np.float64]]) -> Fraction | None:
    """Return the one ratio of small numbers of every rank's values to those wanted; None if there is none."""
    ratios = {_small(result, rank, got) for rank, got in values.items() if not _are_zeros(result, rank, got)}
    return ratios.pop() if len(ratios) == 1 else None


def _are_zeros(result: Compared, rank: int, got: NDArray[np.float64]) -> bool:
    """Whether zeros are wanted and there, which any ratio gives."""
    wanted = result.wanted_of(rank)
    return not np.any(wanted) and result.near(got, wanted)


def _small(result: Compared, rank: int, got: NDArray[np.float64]) -> Fraction | None:
    wanted = result.wanted_of(rank)
    factor = factor_of(got, wanted)
    ratio = ratio_near(factor, result.mesh.size, near_ratio(result.rounding.epsilon)) if factor is not None else None
    return ratio if ratio is not None and result.near(got, wanted * float(ratio), scale=float(ratio)) else None


def _by_numbers(result: Compared, part: Part | None) -> Finding | None:
    """Return the finding if every rank's values are those wanted, times any number."""
    factors: dict[int, float] = {}
    for rank, got in result.reduced.items():
        wanted = result.wanted_of(rank)
        factor = factor_of(got, wanted)
        if np.count_nonzero(wanted) < 2:  # any number is some other times a factor
            continue
        if not factor or not result.near(got, wanted * factor, scale=abs(factor)):
            return None
        factors[rank] = factor
    if len(factors) < 2 or max(abs(factor - 1) for factor in factors.values()) < least_factor(result.rounding.epsilon):
        return None
    if not _explains(result, factors):
        return None
    low, high = min(factors.values()), max(factors.values())
    alike = high - low <= near_ratio(result.rounding.epsilon) * abs(high)
    shown = listed((f"{number(factor)} on rank {rank}" for rank, factor in factors.items()), MAX_LISTED)
    times = f"{number(high)} times {result.whose} on every rank" if alike else f"scaled by {shown}"
    cause: Cause = ClippedByParts() if result.role == "grad" else ScaledByOwnCount()
    if _is_loss_scale(factors.values()):
        cause = LossScaleLeft()
    if alike:
        of_all = part is None or not part.is_beside_right
        cause = ScaledForward() if result.role == "output" else ScaledInStep(of_all)
    summary = f"the {WHAT[result.role]} is {times}"
    return cause.finding(result.name, result.wrong, summary, claimed=claimed_text(result))


def _explains(result: Compared, factors: Mapping[int, float]) -> bool:
    """Whether factors leave little of the differences, and of what is there: rounding alone has some factor, too."""
    pairs = [(result.reduced[rank], result.wanted_of(rank), factor) for rank, factor in factors.items()]
    off = sum(float(np.sum(np.square(got - wanted))) for got, wanted, _ in pairs)
    left = sum(float(np.sum(np.square(got - factor * wanted))) for got, wanted, factor in pairs)
    there = sum(float(np.sum(np.square(got))) for got, _, _ in pairs)
    return left <= EXPLAINED * min(off, there)


def _is_loss_scale(factors: Iterable[float]) -> bool:
    """Whether some ranks' factor is 1 and that of all others one large power of two."""
    high = {factor for factor in factors if abs(factor - 1) > SINGLE}
    scale = max(high, default=0.0)
    power = 2.0 ** round(math.log2(scale)) if scale >= LOSS_SCALE else 0.0
    return bool(power) and all(abs(factor - power) <= SINGLE * power for factor in high)


def size_in_words(mesh: Mesh, ratio: Fraction) -> str:
    """Name the fewest axes whose sizes multiply to the ratio or to one over it: `dp or tp`, `dp * tp`."""
    return " or ".join(" * ".join(axes) for axes in _products(mesh, ratio))


def _size(ratio: Fraction) -> int:
    return ratio.numerator if ratio > 1 else ratio.denominator


def _products(mesh: Mesh, ratio: Fraction) -> list[tuple[str, ...]]:
    size = _size(ratio)
    if size < 2 or ratio not in (Fraction(size), Fraction(1, size)):
        return []
    for count in range(1, mesh.ndim + 1):
        fitting = [
            axes for axes in combinations(mesh.axes, count) if math.prod(mesh.axis_size(axis) for axis in axes) == size
        ]
        if fitting:
            return fitting
    return []
