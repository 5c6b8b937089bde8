"""Estimates of a number that multiplies values, and of terms that are pending or added.

This is the only place in which "the reference times k" is estimated. Whether the values really are that depends on how
far rounding may take them, which the caller knows.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from shardviz.layout.layout import num_splits
from shardviz.layout.placements import Partial, Replicate
from shardviz.relate.tolerance import COARSE, FEW, LEFT, PROPORTIONAL, SINGLE
from shardviz.relate.values import SAMPLES, error_of, magnitude, sampled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.layout.layout import Placements
    from shardviz.layout.mesh import Mesh
    from shardviz.relate.relations import Pending

    Values = NDArray[Any]

Held = TypeVar("Held")
"""What a rank has."""

MOST_RATIO = 64
"""The largest denominator of a ratio of small numbers: sizes of axes, numbers of micro-batches."""

MANY_SAMPLES = 4 * SAMPLES
"""Of more elements than this a sample is looked at first."""

LARGE = 1e150
"""The square of a larger number is not finite in float64."""


def factor_of(values: Values, expected: Values) -> float | None:
    """Return the number that scales expected values nearest to the actual ones, if there is one.

    Returns:
        The least-squares factor; None if all wanted values are zero, or if either side is not finite.

    Example:
        >>> factor_of(np.array([2.0, 4.0]), np.array([1.0, 2.0]))
        2.0
    """
    return common_factor([(values, expected)])


def common_factor(pairs: Iterable[tuple[Values, Values]]) -> float | None:
    """Return the one number that scales expected values nearest to the actual ones in all pairs.

    Returns:
        The least-squares factor; None if all wanted values are zero, or if any value is not finite.
    """
    dot = square = 0.0
    for values, expected in pairs:
        with np.errstate(over="ignore", invalid="ignore"):
            dot += float(np.sum(values * expected))
            square += float(np.sum(expected * expected))
    return dot / square if square and math.isfinite(square) and math.isfinite(dot) else None


def factor_at_largest(values: Values, expected: Values) -> float:
    """Return the quotient at the largest expected value; infinite or NaN if that value is zero.

    For values that were rounded once this is nearer than least squares, and a single outlier does not move it.
    """
    at = int(np.abs(expected).argmax())
    with np.errstate(all="ignore"):
        return float(np.float64(values[at]) / expected[at])


def ratio_near(factor: float, most: int, near: float) -> Fraction | None:
    """Return the ratio of small numbers that a factor is; None if it is none.

    Args:
        most: The largest denominator. `Fraction.limit_denominator` snaps any number to some ratio: only the error says
            whether that is meant.
        near: How far the factor may be off, relative to it.

    Example:
        >>> ratio_near(0.33333334, 8, 1e-6), ratio_near(0.34, 8, 1e-6)
        (Fraction(1, 3), None)
    """
    if not math.isfinite(factor) or near * abs(factor) >= 1 / 2:  # any number of that size is as near to a whole one
        return None
    ratio = Fraction(factor).limit_denominator(max(most, 1))
    return ratio if ratio and abs(factor - ratio) <= near * abs(factor) else None


def scale_between(values: Values, expected: Values, near: float) -> float | None:
    """Return the number that multiplies all expected values, a simple ratio if one fits.

    Args:
        expected: What is wanted, of the same shape.
        near: How far rounding may take an element, absolute.
    """
    factor = factor_of(values, expected)
    if factor is None:
        return None
    apart = ((scale, np.abs(values - expected * scale)) for scale in (snapped(factor, MOST_RATIO), factor) if scale)
    return next((scale for scale, off in apart if bool(np.all(off <= near * max(1.0, abs(scale))))), None)


def snapped(factor: float, most: int) -> float:
    """Return the nearest ratio to a factor with a denominator up to `most`."""
    return float(Fraction(factor).limit_denominator(most))


def factors_of_rows(values: Values, expected: Values) -> Values | None:
    """Return each row's least-squares factor; None if a row of expected values is zero.

    Args:
        values: Rows of what is held.
        expected: Rows of what is wanted. Without their means, an offset of each row is ignored.
    """
    squares = (expected * expected).sum(1, keepdims=True)
    factors: Values = (values * expected).sum(1, keepdims=True) / np.where(squares, squares, 1.0)
    return factors if np.all(squares > 0) else None


def whole_multiple(excess: Values, term: Values, near: float) -> int:
    """Return how often a term is in the excess: negative if it is missing, 0 if it doesn't fit.

    Args:
        excess: The values less what is wanted.
        term: The term, of the same shape.
        near: How far rounding may take an element, absolute. Where that is much, any term is near by chance: the right
            one leaves little of the excess.
    """
    factor = factor_of(excess, term) or 0.0
    times = round(factor)
    allowed = min(near * max(1, abs(times)), LEFT * magnitude(excess))
    return times if times and bool(np.all(np.abs(excess - times * term) <= allowed)) else 0


def may_be(actual: Values, expected: Values) -> bool:
    """Whether values may be a multiple of the expected ones; of large arrays, a sample is read."""
    if actual.shape != expected.shape or actual.size <= MANY_SAMPLES:
        return True
    few, few_expected = sampled(actual), sampled(expected)
    if not (np.isfinite(few).all() and np.isfinite(few_expected).all()):
        return True
    dot, size = float(np.sum(few * few_expected)), float(np.sum(few * few)) * float(np.sum(few_expected * few_expected))
    return not size or not math.isfinite(size) or dot * dot > PROPORTIONAL**2 * size


def candidates(actual: Values, expected: Values) -> Iterator[float]:
    """Yield factors to try, simplest first; none if the arrays are not nearly proportional."""
    sides = ((actual, expected), (expected, expected), (actual, actual))
    dot, square, norm = (float((first * second).sum()) for first, second in sides)
    if not math.isfinite(norm + square):
        finite = np.isfinite(actual) & np.isfinite(expected) & (np.abs(actual) < LARGE) & (np.abs(expected) < LARGE)
        yield from candidates(actual[finite], expected[finite])
    elif square and norm and dot * dot > PROPORTIONAL * square * norm:
        yield from ratios(dot / square)


def ratios(factor: float) -> Iterator[float]:
    """Yield simple ratios near a factor, then the factor in three digits, then unrounded.

    Example:
        >>> list(ratios(0.2501))
        [0.25, 0.2501]
    """
    number = 1 / factor if abs(factor) < 1 else factor
    near = [float(Fraction(number).limit_denominator(most)) for most in (1, 8, 64)] + [float(f"{number:.3g}"), number]
    for ratio in dict.fromkeys(1 / value if abs(factor) < 1 else value for value in near if value):
        if abs(ratio / factor - 1) < COARSE:
            yield ratio


REDUCTIONS: Mapping[str, Callable[[Values], Values]] = {
    "sum": lambda stacked: stacked.sum(0),
    "avg": lambda stacked: stacked.mean(0),
    "max": lambda stacked: stacked.max(0),
    "min": lambda stacked: stacked.min(0),
    "product": lambda stacked: stacked.prod(0),
}
"""What a pending reduction does to the stacked terms, by the names of torch's `Partial`."""

LIKELY = ("sum", "max", "min")
"""The reductions that are tried if none is claimed: an average is a sum and a factor."""


def reduced(
    held: Mapping[int, Values], mesh: Mesh, pending: Sequence[Pending], limit: float
) -> tuple[dict[int, Values], dict[int, float]]:
    """Reduce what ranks hold over axes.

    A group in which a rank is missing has no result: its sum is not known. Terms that are equal on all ranks of every
    group are copies, and nothing is pending.

    Args:
        pending: The axes, each with its reduction, in turn.
        limit: The relative error up to which terms are equal.

    Returns:
        For each rank the result, and the norm of the terms: a sum that cancels is rounded as its terms are. Both are
        empty if the terms are copies.
    """
    totals = {rank: np.asarray(values, np.float64) for rank, values in held.items()}
    squares = {rank: float(np.square(values).sum()) for rank, values in totals.items()}
    are_terms = False
    for axis, op in ((link.axis, link.op) for link in pending):
        pairs = pairs_along(axis, totals, mesh)
        are_terms = are_terms or any(error_of(other, first) > limit for first, other in pairs)
        totals = over(axis, op, totals, mesh)
        squares = {rank: sum(squares[member] for member in mesh.group_of(rank, axis)) for rank in totals}
    return (totals, {rank: math.sqrt(square) for rank, square in squares.items()}) if are_terms else ({}, {})


def pairs_along(axis: str, held: Mapping[int, Held], mesh: Mesh) -> Iterator[tuple[Held, Held]]:
    """Yield what the first rank of each group along an axis has beside what each other one has; some may have nothing.

    Example:
        >>> from shardviz.layout.mesh import Mesh
        >>> list(pairs_along("tp", {0: "a", 1: "b", 2: "a"}, Mesh(("dp", "tp"), (2, 2))))
        [('a', 'b')]
    """
    for group in mesh.groups(axis):
        present = [held[rank] for rank in group if rank in held]
        yield from ((present[0], other) for other in present[1:])


def over(axis: str, op: str, values: Mapping[int, Values], mesh: Mesh) -> dict[int, Values]:
    """Reduce values over an axis, leaving out groups with a missing rank or different shapes."""
    totals: dict[int, Values] = {}
    for group in mesh.groups(axis):
        terms = [values[rank] for rank in group if rank in values]
        if len(terms) == len(group) and len({term.shape for term in terms}) == 1:
            with np.errstate(invalid="ignore", over="ignore"):
                totals |= dict.fromkeys(group, REDUCTIONS[op](np.stack(terms)))
    return totals


def coefficient_of(actual: Sequence[Values], parts: Sequence[Values], terms: Sequence[Values]) -> float | None:
    """Solve `actual = scale * (part + coefficient * term)` for all ranks together.

    Returns:
        The coefficient; None if the equations do not tell.
    """
    sides = (parts, terms, actual)
    columns = np.stack([np.concatenate([part.ravel() for part in side]) for side in sides]).astype(np.float64)
    if columns.shape[1] < FEW or not np.isfinite(columns).all():
        return None
    (scale, times), _, matrix_rank, _ = np.linalg.lstsq(columns[:2].T, columns[2], rcond=None)
    if matrix_rank < 2 or min(abs(scale), abs(times)) <= SINGLE:
        return None
    return float(times / scale)


def placements_of_sum(
    terms: Mapping[int, Values], mesh: Mesh, fits: Callable[[int, Values], Iterable[Placements]], near: float
) -> Placements | None:
    """Return placements of terms whose sum over one axis is right on every rank; or None.

    Args:
        terms: What every rank has that has the tensor.
        fits: Returns the placements that give a rank these values.
        near: How far an element may be off. Terms that are as near to each other as this are one number times the
            whole on every rank, and no terms of it.
    """
    for axis in mesh.axes if terms and all(rank in mesh for rank in terms) else ():
        at = mesh.axis_index(axis)
        shared: set[Placements] | None = None
        for rank in terms:
            total = _total(terms, mesh.group_of(rank, axis), near)
            fitting = (
                {fit for fit in fits(rank, total) if isinstance(fit[at], Replicate)} if total is not None else set()
            )
            shared = fitting if shared is None else shared & fitting
            if not shared:
                break
        for placements in sorted(shared or (), key=num_splits):
            return (*placements[:at], Partial("sum"), *placements[at + 1 :])
    return None


def _total(terms: Mapping[int, Values], group: Sequence[int], near: float) -> Values | None:
    """Return a group's sum; None if a term is missing or shaped differently, or for copies."""
    present = [terms[rank] for rank in group if rank in terms]
    if len(group) < 2 or len(present) < len(group) or len({term.shape for term in present}) > 1:
        return None
    stacked = np.stack(present)
    if np.all(np.abs(stacked - stacked[:1]) <= near / len(group)):
        return None
    total: Values = stacked.sum(0)
    return total
