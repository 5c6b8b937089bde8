"""Which reduction over which axes would make values that differ from rank to rank the unsharded model's.

What only lacks a reduction is each rank's own part; where none fits, ranks compute something else.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shardviz.check.step.rules.ratios.scale import ratio_to_wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from fractions import Fraction

    from numpy.typing import NDArray

    from shardviz.check.step.compared import Compared

Values = dict[int, "NDArray[np.float64]"]
Reduction = Literal["mean", "sum", "norm"]


def missing_reduction(one: Compared) -> tuple[Reduction, tuple[str, ...], Fraction] | None:
    """Return the reduction that makes every rank right, over the fewest axes along which copies differ.

    Returns:
        The reduction, its axes, and what ratio to the unsharded model's is left, which is 1 where nothing else is
        wrong; None where no reduction fits. `norm`, the root of the sum of squares, is tried for scalars.
    """
    found = list(_fitting(one))
    return next((fit for fit in found if fit[2] == 1), next(iter(found), None))


def _fitting(one: Compared) -> Iterator[tuple[Reduction, tuple[str, ...], Fraction]]:
    kinds: tuple[Reduction, ...] = ("mean", "sum", "norm") if one.role == "scalar" else ("mean", "sum")
    axes = one.copies_differ_along
    for count in range(1, len(axes) + 1):
        for over in combinations(axes, count):
            for kind in kinds:
                ratio = ratio_to_wanted(one, reduced_over(one, kind, over))
                if ratio is not None and (ratio == 1 or one.role != "scalar"):
                    yield kind, over, ratio


def reduced_over(one: Compared, kind: Reduction, axes: tuple[str, ...]) -> Mapping[int, NDArray[np.float64]]:
    """Return what each rank would have after a reduction over axes; a rank whose group is not whole has nothing."""
    values: Values = dict(one.reduced)
    if kind == "norm":
        values = {rank: value**2 for rank, value in values.items()}
    for axis in axes:
        values = one.over(axis, "avg" if kind == "mean" else "sum", values)
    return {rank: np.sqrt(value) for rank, value in values.items()} if kind == "norm" else values


def own_part(kind: Reduction, axes: tuple[str, ...]) -> str:
    """Say what ranks hold where a reduction over axes is missing, in the notation: `+tp`, or `+tp:avg` for a mean."""
    op = ":avg" if kind == "mean" else ""
    return f"each rank's own part ({', '.join(f'+{axis}{op}' for axis in axes)})"


def reduction_over(one: Compared, groups: Sequence[Sequence[int]]) -> Literal["mean", "sum"] | None:
    """Return the reduction within groups of ranks that makes every rank right; None where neither does."""
    kinds: tuple[tuple[Literal["mean", "sum"], Callable[..., Any]], ...] = (("mean", np.mean), ("sum", np.sum))
    for kind, reduce in kinds:
        with np.errstate(invalid="ignore"):  # the sum of two infinities
            whole = {rank: reduce([one.reduced[at] for at in ranks], axis=0) for ranks in groups for rank in ranks}
        if all(one.is_right(rank, values) for rank, values in whole.items()):
            return kind
    return None
