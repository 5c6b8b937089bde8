"""Measures between two sides: a factor, a different rank's part, a reduction, lost slices.

Each function looks for one relation, in the values of all ranks together, and returns it without words. Rules ask these
if `Sides.related` does not say it: it keeps to one rank's own part of what is wanted, and to chains of few links.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shardviz.groups import the_only
from shardviz.layout.region import Region, indices
from shardviz.relate.factors import common_factor, factor_of, factors_of_rows, ratio_near, whole_multiple
from shardviz.relate.relations import Permuted
from shardviz.relate.tolerance import (
    EXACT,
    EXPLAINED,
    EXPLAINED_BY_LINE,
    LEAST_STATISTIC,
    LEFT,
    SMALLEST_FACTOR,
    least_factor,
    near_ratio,
)
from shardviz.relate.values import farthest, magnitude

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from fractions import Fraction

    from numpy.typing import NDArray

    from shardviz.layout.mesh import Mesh
    from shardviz.relate.sides import Sides

    Values = NDArray[np.float64]
    Slices = Mapping[int, int]
    """The index of the slice that stands at each index along a dim."""

Reduction = Literal["mean", "sum", "norm"]

OPS: Mapping[Reduction, str] = {"mean": "avg", "sum": "sum", "norm": "sum"}
"""What a reduction does to the terms; the norm is the root of the sum of their squares."""


MANY_IN_SLICE = 6
"""Numbers that share a factor and an offset: any three are near to a line through two."""

LEAST_OFF = 8.0
"""Means that are so many times as far apart as rounding may take an element are different ones."""

SPREAD = 0.02
"""What is added to a variance before its root is taken moves the spread of normalized numbers by less."""


def axis_sets(axes: Sequence[str], least: int = 1) -> Iterator[tuple[str, ...]]:
    """Yield all sets of at least so many axes, those of the fewest first."""
    for count in range(least, len(axes) + 1):
        yield from combinations(axes, count)


def axes_of_size(mesh: Mesh, size: int) -> list[tuple[str, ...]]:
    """Return the sets of the fewest axes whose sizes multiply to a number."""
    fitting = [axes for axes in axis_sets(mesh.axes) if mesh.size_over(axes) == size > 1]
    return [axes for axes in fitting if len(axes) == len(fitting[0])]


def ratio_of(sides: Sides, values: Mapping[int, Values] | None = None) -> Fraction | None:
    """Return the ratio of small numbers between all ranks' values and the expected; or None."""
    held = sides.reduced if values is None else values
    return the_only({_ratio(sides, rank, got) for rank, got in held.items() if not _are_zeros(sides, rank, got)})


def _are_zeros(sides: Sides, rank: int, got: Values) -> bool:
    """Whether zeros are wanted and there, which any ratio gives."""
    expected = sides.wanted_of(rank)
    return not np.any(expected) and sides.near(got, expected)


def _ratio(sides: Sides, rank: int, got: Values) -> Fraction | None:
    expected = sides.wanted_of(rank)
    factor = factor_of(got, expected)
    ratio = ratio_near(factor, sides.mesh.size, near_ratio(sides.rounding.epsilon)) if factor is not None else None
    if ratio is None or not sides.near(got, expected * float(ratio), scale=float(ratio)):
        return None
    left, off = magnitude(got - float(ratio) * expected), magnitude(got - expected)
    return ratio if ratio == 1 or left <= LEFT * off else None


def factors_of_ranks(sides: Sides) -> dict[int, float]:
    """Return each rank's factor to its expected values; empty if factors don't explain them.

    Of a rank with fewer than two numbers other than zero nothing is known. Rounding alone has some factor, too: factors
    must leave little of the differences, and of what is there.
    """
    factors: dict[int, float] = {}
    off = residual = there = most_off = most_left = 0.0
    for rank, got in sides.reduced.items():
        expected = sides.wanted_of(rank)
        if np.count_nonzero(expected) < 2:
            continue
        factor = factor_of(got, expected)
        if not factor or abs(factor) < SMALLEST_FACTOR or not sides.near(got, expected * factor, scale=abs(factor)):
            return {}
        factors[rank] = factor
        most_off = max(most_off, magnitude(got - expected))
        most_left = max(most_left, magnitude(got - factor * expected))
        off += float(np.sum(np.square(got - expected)))
        residual += float(np.sum(np.square(got - factor * expected)))
        there += float(np.sum(np.square(got)))
    is_enough = len(factors) > 1 and residual <= EXPLAINED * min(off, there) and most_left <= LEFT * most_off
    least = least_factor(sides.rounding.epsilon)
    return factors if is_enough and max(abs(factor - 1) for factor in factors.values()) >= least else {}


def factor_of_all(results: Collection[Sides], ranks: Collection[int] | None = None) -> float | None:
    """Return the factor between all values of some results and the expected; or None.

    Where rounding allows much, some factor always fits: that of values that are off leaves little of the differences.
    """
    pairs = [
        (side, held, side.wanted_of(rank))
        for side in results
        for rank, held in side.reduced.items()
        if ranks is None or rank in ranks
    ]
    factor = common_factor((held, expected) for _, held, expected in pairs)
    if not factor or not all(
        result.near(held, factor * expected, scale=abs(factor)) for result, held, expected in pairs
    ):
        return None
    off, left = (max(magnitude(held - times * wanted) for _, held, wanted in pairs) for times in (1.0, factor))
    return factor if left <= LEFT * off or left <= EXACT * max(magnitude(wanted) for _, _, wanted in pairs) else None


def factors_of_slices(sides: Sides, rank: int, dims: tuple[int, ...]) -> Values | None:
    """Return each slice's factor if all slices are the expected ones, scaled and shifted."""
    got, expected = (_rows(values, dims) for values in (sides.reduced[rank], sides.wanted_of(rank)))
    if got.shape != expected.shape or got.shape[1] < MANY_IN_SLICE or not np.all(np.isfinite(got)):
        return None
    centered, centered_expected = got - got.mean(1, keepdims=True), expected - expected.mean(1, keepdims=True)
    factors = factors_of_rows(centered, centered_expected)
    if factors is None:
        return None
    residual = float(np.abs(centered - factors * centered_expected).max())
    apart = float(np.abs(got - expected).max())
    fits = residual <= min(4 * sides.tolerance * max(1.0, float(np.abs(factors).max())), EXPLAINED_BY_LINE * apart)
    return factors.ravel() if fits and np.any(np.abs(factors - 1) > LEAST_STATISTIC) else None


def is_normalized(sides: Sides, rank: int, dims: tuple[int, ...]) -> bool:
    """Whether each slice of a rank's part has the mean and spread of that slice of the whole, unlike the part due."""
    arrays = (sides.reduced[rank], sides.wanted_of(rank), sides.wanted)
    got, expected, whole = (_rows(values, dims) for values in arrays)
    if got.shape != expected.shape or len(got) != len(whole) or not got.size or not np.all(np.isfinite(got)):
        return False
    means, near = whole.mean(1), sides.tolerance
    is_off = farthest(expected.mean(1), means) > LEAST_OFF * near and bool(np.any(np.ptp(got, 1) > LEAST_OFF * near))
    return is_off and farthest(got.mean(1), means) <= near and np.allclose(got.std(1), whole.std(1), SPREAD, near)


def _rows(values: Values, dims: tuple[int, ...]) -> Values:
    """Return a row for every index in some dims."""
    moved = np.moveaxis(values, dims, range(len(dims)))
    return moved.reshape(int(np.prod(moved.shape[: len(dims)])), -1)


def reduction_of(sides: Sides) -> tuple[Reduction, tuple[str, ...], Fraction] | None:
    """Return the reduction that makes every rank right, over the fewest axes.

    Returns:
        The reduction, its axes, and what ratio to what is wanted is left, which is 1 if nothing else is wrong; None if
        no reduction fits. `norm`, the root of the sum of squares, is tried for scalars.
    """
    fits = list(_reductions(sides))
    return next((fit for fit in fits if fit[2] == 1), next(iter(fits), None))


def _reductions(sides: Sides) -> Iterator[tuple[Reduction, tuple[str, ...], Fraction]]:
    kinds: tuple[Reduction, ...] = ("mean", "sum", "norm") if sides.role == "scalar" else ("mean", "sum")
    for axes in axis_sets(sides.copies_differ_along):
        for kind in kinds:
            ratio = ratio_of(sides, reduced_over(sides, kind, axes))
            if ratio is not None and (ratio == 1 or sides.role != "scalar"):
                yield kind, axes, ratio


def reduced_over(sides: Sides, kind: Reduction, axes: Iterable[str]) -> Mapping[int, Values]:
    """Return each rank's values after a reduction over axes; none for an incomplete group."""
    if kind != "norm":
        return sides.over(axes, OPS[kind])
    squares = sides.over(axes, OPS[kind], {rank: value**2 for rank, value in sides.reduced.items()})
    return {rank: np.sqrt(square) for rank, square in squares.items()}


def reduction_among_holders(sides: Sides) -> Literal["mean", "sum"] | None:
    """Return the reduction among ranks with the same part that makes every rank right, if any."""
    for kind in ("mean", "sum"):
        with np.errstate(invalid="ignore"):  # the sum of two infinities
            totals = {
                rank: (np.mean if kind == "mean" else np.sum)([sides.reduced[at] for at in ranks], axis=0)
                for ranks in sides.holders
                for rank in ranks
            }
        if all(sides.is_right(rank, values) for rank, values in totals.items()):
            return kind
    return None


def mixed_over(sides: Sides) -> tuple[str, Literal["mean", "sum"]] | None:
    """Return the axis over which different shards were summed or averaged, if there is one."""
    expected = {rank: sides.wanted_of(rank) for rank in sides.reduced}
    for axis in sides.mesh.axes:
        groups = [group for group in sides.mesh.groups(axis) if all(rank in expected for rank in group)]
        alike = all(len({expected[rank].shape for rank in group}) == 1 for group in groups)
        if not groups or not alike or not sides.is_split(axis):
            continue
        for kind, mixed in _mixtures(sides, axis, expected, groups):
            if set(mixed) == set(sides.reduced) and all(is_nearer(sides, rank, mixed[rank]) for rank in mixed):
                return axis, kind
    return None


def _mixtures(
    sides: Sides, axis: str, expected: Mapping[int, Values], groups: Sequence[Sequence[int]]
) -> Iterator[tuple[Literal["mean", "sum"], Mapping[int, Values]]]:
    """Yield reductions of the parts along an axis: one a rank, or each distinct part once.

    A part that several ranks share is counted once if each of them had its own contribution to it.
    """
    yield "mean", sides.over((axis,), "avg", expected)
    yield "sum", sides.over((axis,), "sum", expected)
    once: dict[int, Values] = {}
    for group in groups:
        parts = {sides.regions[rank]: expected[rank] for rank in group}
        once |= dict.fromkeys(group, np.sum(list(parts.values()), axis=0))
    yield "sum", once
    yield "mean", {rank: once[rank] / len(group) for group in groups for rank in group}


def is_nearer(sides: Sides, rank: int, other: Values, scale: float = 1.0) -> bool:
    """Whether a rank has this, of a scale, and is not merely as near to it as to what is wanted."""
    held = sides.reduced[rank]
    if held.shape != other.shape or not sides.near(held, other, scale=scale):
        return False
    return rank not in sides.wrong or magnitude(held - other) <= LEFT * magnitude(held - sides.wanted_of(rank))


def vector_added(sides: Sides, vectors: Values) -> tuple[int, int] | None:
    """Return the index of the vector in every row's excess, and how often; None if none fits.

    A count of -1 says that each row of the first wrong rank lacks the vector.

    All vectors are tried at once: the mean row of the excess is a whole number of times the one that was added.
    """
    rank = sides.wrong[0]
    excess = sides.reduced[rank] - sides.wanted_of(rank)
    if not excess.size or not len(vectors) or not np.all(np.isfinite(excess)):
        return None
    mean = excess.reshape(-1, vectors.shape[1]).mean(0)
    squares = np.sum(vectors * vectors, axis=1)
    counts = np.rint(np.divide(vectors @ mean, squares, out=np.zeros_like(squares), where=squares > 0))
    with np.errstate(invalid="ignore"):  # a vector with infinity
        off = np.max(np.abs(mean - counts[:, None] * vectors), axis=1)
    for index in np.flatnonzero(counts).tolist():
        # The rows are each as near as this, and the mean nearer still; twice as far for what rounding does to it.
        if off[index] <= 2 * sides.tolerance * abs(counts[index]):
            term = np.broadcast_to(vectors[index], excess.shape)
            if times := whole_multiple(excess, term, sides.tolerance):
                return index, times
    return None


def owner_of(sides: Sides, rank: int) -> int | None:
    """Return the rank that should hold what this one holds; None if there isn't one."""
    held = sides.reduced[rank]
    for owner in sides.reduced:
        if sides.regions[owner] != sides.regions[rank] and _is_near(sides, held, sides.wanted_of(owner)):
            return owner
    return None


def _is_near(sides: Sides, held: Values, due: Values) -> bool:
    return held.shape == due.shape and sides.near(held, due)


@dataclass(frozen=True)
class WrongResults:
    """The wrong results of some, looked up by what a rank holds instead of comparing all pairs."""

    results: Sequence[Sides]

    def near(self, sides: Sides, axis: str) -> list[Sides]:
        """Return the results that other ranks along an axis may hold in place of a wrong rank's.

        Near arrays have near means. So those that may be near are neighbors among the sorted means.
        """
        rank = next((rank for rank in sides.wrong if rank in sides.mesh), None)
        if rank is None or (mean := _mean(sides.reduced[rank])) is None:
            return []
        allowed = sides.tolerance + EXACT * magnitude(sides.reduced[rank])
        indices_near: set[int] = set()
        for at in sides.mesh.group_of(rank, axis):
            if at not in sides.reduced:
                means, numbers = self._sorted_means.get((at, sides.reduced[rank].shape), ([], []))
                indices_near.update(numbers[bisect_left(means, mean - allowed) : bisect_right(means, mean + allowed)])
        return [self.results[number] for number in sorted(indices_near) if rank not in self.results[number].reduced]

    @cached_property
    def _sorted_means(self) -> Mapping[tuple[int, tuple[int, ...]], tuple[list[float], list[int]]]:
        """Sorted means and indices of the wrong results, for each rank and shape."""
        by_place: dict[tuple[int, tuple[int, ...]], list[tuple[float, int]]] = {}
        for number, side in enumerate(self.results):
            for rank, values in side.reduced.items() if side.wrong else ():
                if (mean := _mean(values)) is not None:
                    by_place.setdefault((rank, values.shape), []).append((mean, number))
        pairs = ((place, sorted(means)) for place, means in by_place.items())
        return {place: ([mean for mean, _ in means], [number for _, number in means]) for place, means in pairs}


def _mean(values: Values) -> float | None:
    """Return the mean; None if an element or the mean is not finite."""
    if not np.isfinite(values).all():
        return None
    mean = float(np.mean(values)) if values.size else 0.0
    return mean if math.isfinite(mean) else None


def is_shared_with(sides: Sides, other_sides: Sides, axis: str) -> bool:
    """Whether two tensors on different ranks of an axis have one value on all wrong ranks."""
    for group in sides.mesh.groups(axis):
        for rank in set(group) & set(sides.wrong):
            held = sides.reduced[rank]
            elsewhere = [
                other_sides.reduced[at] for at in group if at in other_sides.reduced and at not in sides.reduced
            ]
            equal = any(_is_near(sides, held, values) for values in elsewhere)
            if not equal or not np.any(held) or rank in other_sides.reduced:
                return False
    return bool(sides.wrong)


def is_of_other_parts(sides: Sides, other_sides: Sides) -> bool:
    """Whether each wrong rank holds a different rank's values of a second tensor's other part."""

    def is_elsewhere(rank: int) -> bool:
        held = sides.reduced[rank]
        return bool(np.any(held)) and any(
            values.size == held.size
            and other_sides.regions[at] != sides.regions[rank]
            and sides.near(held.ravel(), values.ravel())
            for at, values in other_sides.reduced.items()
            if at != rank
        )

    return all(map(is_elsewhere, sides.wrong))


def is_right_with(sides: Sides, others: Sequence[Sides]) -> bool:
    """Whether every rank is right once the same part of some other tensors is added."""
    for rank, total in sides.reduced.items():
        for other_sides in others:
            holder = next((at for at in other_sides.reduced if other_sides.regions[at] == sides.regions[rank]), None)
            if holder is None:
                return False
            total = total + other_sides.reduced[holder]
        if not sides.is_right(rank, total):
            return False
    return True


def columns_of(sides: Sides, parts: Sequence[NDArray[Any]], rank: int) -> Values:
    """Return a rank's part of several whole tensors, one in each column."""
    return np.stack([sides.part(part, rank).ravel() for part in parts], axis=1)


def weights_between(columns: Values, held: Values) -> Values | None:
    """Return how often each column counts in values, by least squares; None if they do not tell."""
    if not np.all(np.isfinite(held)):
        return None
    weights, _, num_known, _ = np.linalg.lstsq(columns, held, rcond=1e-9)
    return np.asarray(weights, np.float64) if num_known == columns.shape[1] else None


def has_wanted_numbers(sides: Sides, rank: int) -> bool:
    """Whether each number of a rank is somewhere in what is wanted: moving slices leaves numbers as they are."""
    wanted, held = np.sort(sides.wanted, axis=None), sides.reduced[rank].ravel()
    if not wanted.size:
        return not held.size
    above = np.searchsorted(wanted, held).clip(max=wanted.size - 1)
    with np.errstate(invalid="ignore"):  # infinity less infinity
        apart = np.minimum(np.abs(wanted[above] - held), np.abs(wanted[above - (above > 0)] - held))
    return bool(np.all((apart <= sides.tolerance * (1 + EXACT)) | (wanted[above] == held)))


def moved_slices(sides: Sides, rank: int, dim: int) -> Slices:
    """Return the slice at each index of a rank's part; empty if it isn't just reordered."""
    region, held = sides.regions[rank], sides.held_by(rank)
    if held is None or not isinstance(region, Region) or _differ_elsewhere(region, held[0], dim):
        return {}
    order = [link.order for link in held[1] if isinstance(link, Permuted) and link.dim == dim]
    if len(order) < len(held[1]) or len(order) > 1:
        return {}
    places, source = indices(region.dims[dim]).tolist(), indices(held[0].dims[dim]).tolist()
    slices = [order[0][at] for at in source] if order else source
    is_once = len(set(slices)) == len(slices)
    moved = [at for at, (place, origin) in enumerate(zip(places, slices, strict=True)) if place != origin]
    is_seen = all(sides.reduced[rank].take(at, dim).any() for at in moved)  # zeros are no slice's own
    fits = is_once and is_seen and len(slices) > 1 < region.size // len(slices)
    return dict(zip(places, slices, strict=True)) if fits else {}


def _differ_elsewhere(region: Region, second: Region, dim: int) -> bool:
    pairs = zip(region.dims, second.dims, strict=True)
    return region.shape != second.shape or any(
        ranges != second_ranges for at, (ranges, second_ranges) in enumerate(pairs) if at != dim
    )


def lost_slices(sides: Sides) -> tuple[int, list[int]] | None:
    """Return a dim and its slices that are zero on every holder, if all others are right."""
    regions = {rank: region for rank, region in sides.regions.items() if isinstance(region, Region)}
    for dim in range(sides.wanted.ndim if len(regions) == len(sides.regions) and sides.wanted.ndim > 1 else 0):
        lost = {rank: _zero_slices(sides, rank, dim, regions[rank]) for rank in sides.wrong}
        slices = {at for places in lost.values() for at in places}
        held = {rank: {*indices(region.dims[dim]).tolist()} for rank, region in regions.items()}
        if slices and all(lost.values()) and all(slices & held[rank] == {*lost.get(rank, ())} for rank in held):
            return dim, sorted(slices)
    return None


def _zero_slices(sides: Sides, rank: int, dim: int, region: Region) -> list[int]:
    """Return the slices of a rank's part that are wrongly zero, if all others are right."""
    held, expected = sides.reduced[rank], sides.wanted_of(rank)
    other_axes = tuple(axis for axis in range(held.ndim) if axis != dim)
    off = np.any(np.abs(held - expected) > sides.tolerance, axis=other_axes)
    is_zero = not np.any(held.take(np.flatnonzero(off), dim))
    return np.array(indices(region.dims[dim]))[off].tolist() if is_zero and not np.all(off) else []
