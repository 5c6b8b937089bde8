"""Which reduction over which axes would make values that differ from rank to rank the unsharded model's.

What only lacks a reduction is each rank's own part; where none fits, ranks compute something else.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shardviz.check.step.rules.ratios.scale import ratio_to_wanted
from shardviz.relate.pair import Group, Related
from shardviz.relate.relations import Pending, Scaled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.compared import Compared

Values = dict[int, "NDArray[np.float64]"]
Reduction = Literal["mean", "sum", "norm"]


@dataclass(frozen=True)
class Unreduced:
    """A result of which ranks have parts that nothing reduced, with the reduction that makes them right.

    Attributes:
        result: The result.
        kind: The reduction.
        axes: The axes to reduce over.
        ratio: What it is of the right one even then.
    """

    result: Compared
    kind: Reduction
    axes: tuple[str, ...]
    ratio: Fraction = Fraction(1)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have it."""
        return self.result.ranks

    @property
    def related(self) -> Related | None:
        """The reductions that are pending; None for a norm."""
        if self.kind == "norm":
            return None
        pending = (Pending(axis, "avg" if self.kind == "mean" else "sum") for axis in self.axes)
        scaled = (Scaled(float(self.ratio)),) if self.ratio != 1 else ()
        return Related((Group(self.ranks, (*pending, *scaled)),))

    def wanted_of(self, rank: int) -> NDArray[np.float64]:
        """Return what a rank should hold."""
        return self.result.wanted_of(rank)

    def held_of(self, rank: int) -> NDArray[np.float64]:
        """Return a rank's own part."""
        return self.result.held_of(rank)

    @cached_property
    def whole(self) -> Mapping[int, NDArray[np.float64]]:
        """What each rank would have once it is reduced."""
        return reduced_over(self.result, self.kind, self.axes)


def missing_reduction(result: Compared) -> tuple[Reduction, tuple[str, ...], Fraction] | None:
    """Return the reduction that makes every rank right, over the fewest axes along which copies differ.

    Returns:
        The reduction, its axes, and what ratio to the unsharded model's is left, which is 1 if nothing else is
        wrong; None if no reduction fits. `norm`, the root of the sum of squares, is tried for scalars.
    """
    found = list(_fitting(result))
    return next((fit for fit in found if fit[2] == 1), next(iter(found), None))


def _fitting(result: Compared) -> Iterator[tuple[Reduction, tuple[str, ...], Fraction]]:
    kinds: tuple[Reduction, ...] = ("mean", "sum", "norm") if result.role == "scalar" else ("mean", "sum")
    axes = result.copies_differ_along
    for count in range(1, len(axes) + 1):
        for over in combinations(axes, count):
            for kind in kinds:
                ratio = ratio_to_wanted(result, reduced_over(result, kind, over))
                if ratio is not None and (ratio == 1 or result.role != "scalar"):
                    yield kind, over, ratio


def reduced_over(result: Compared, kind: Reduction, axes: tuple[str, ...]) -> Mapping[int, NDArray[np.float64]]:
    """Return what each rank would have after a reduction over axes; a rank whose group is not whole has nothing."""
    values: Values = dict(result.reduced)
    if kind == "norm":
        values = {rank: value**2 for rank, value in values.items()}
    for axis in axes:
        values = result.over(axis, "avg" if kind == "mean" else "sum", values)
    return {rank: np.sqrt(value) for rank, value in values.items()} if kind == "norm" else values


def own_part(kind: Reduction, axes: tuple[str, ...]) -> str:
    """Say what ranks hold if a reduction over axes is missing, in the notation: `+tp`, or `+tp:avg` for a mean."""
    op = ":avg" if kind == "mean" else ""
    return f"each rank's own part ({', '.join(f'+{axis}{op}' for axis in axes)})"


def reduction_over(result: Compared, groups: Sequence[Sequence[int]]) -> Literal["mean", "sum"] | None:
    """Return the reduction within groups of ranks that makes every rank right; None if neither does."""
    kinds: tuple[tuple[Literal["mean", "sum"], Callable[..., Any]], ...] = (("mean", np.mean), ("sum", np.sum))
    for kind, reduce in kinds:
        with np.errstate(invalid="ignore"):  # the sum of two infinities
            whole = {rank: reduce([result.reduced[at] for at in ranks], axis=0) for ranks in groups for rank in ranks}
        if all(result.is_right(rank, values) for rank, values in whole.items()):
            return kind
    return None
