"""Gradients of one weight under two names, and of different weights under one reduction.

`unreduced-gradient` of a tied weight whose names went to different ranks: each has the gradient of its own use. On
stages of a pipeline an embedding and a head cannot share storage. They are copies, which stay equal only if the sum
of both gradients is taken on both (Megatron-LM's embedding group).

`wrong-value` of gradients that were reduced over an axis whose ranks have other weights, as stages of a pipeline. Ranks
along such an axis have tensors of the same shapes under other names. A reduction over it runs without a word and leaves
one gradient for different weights: equal numbers under different names tell it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from shardviz.explain.gradients import TiedShardsMisaligned, UnsummedTiedGradients
from shardviz.explain.sums import MixedLayers
from shardviz.relate.measures import ratio_of
from shardviz.relate.tolerance import EXACT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.compared import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.explain.finding import Finding


def check_other_layers(evidence: Evidence, result: Compared) -> Finding | None:
    """Return the finding if every wrong rank's gradient is that of another weight, which another rank has."""
    tied = (result.name, *evidence.tied_to(result.name))
    for axis in result.mesh.axes:
        for other in evidence.wrong_gradients.near(result, axis):
            if other.name not in tied and other.mesh == result.mesh and _is_shared(result, other, axis):
                others = tuple(name for name in result.mesh.axes if name != axis and result.mesh.axis_size(name) > 1)
                which = f"that of {other.name}, another weight, which other ranks along {axis} have"
                return result.finding(MixedLayers(axis, others), f"the gradient is equal to {which}")
    return None


@dataclass(frozen=True)
class WrongGradients:
    """The wrong gradients of a step, found by what a rank holds without comparing each with each.

    Attributes:
        gradients: Every gradient that can be compared.
    """

    gradients: Sequence[Compared]

    def near(self, result: Compared, axis: str) -> list[Compared]:
        """Return the gradients of ranks along an axis that may be near the result on a wrong rank, in the step's order.

        Near arrays have near means. So those that may be near are neighbors among the sorted means.
        """
        rank = next((rank for rank in result.wrong if rank in result.mesh), None)
        if rank is None or (mean := _mean(result.reduced[rank])) is None:
            return []
        allowed = result.tolerance + EXACT * float(np.max(np.abs(result.reduced[rank]), initial=0.0))
        indices: set[int] = set()
        for at in result.mesh.group_of(rank, axis):
            if at not in result.reduced:
                means, numbers = self._by_place.get((at, result.reduced[rank].shape), ([], []))
                indices.update(numbers[bisect_left(means, mean - allowed) : bisect_right(means, mean + allowed)])
        return [self.gradients[number] for number in sorted(indices) if rank not in self.gradients[number].reduced]

    @cached_property
    def _by_place(self) -> Mapping[tuple[int, tuple[int, ...]], tuple[list[float], list[int]]]:
        """For each rank and shape the means of what it holds, rising, and the numbers of the gradients."""
        by_place: dict[tuple[int, tuple[int, ...]], list[tuple[float, int]]] = {}
        for number, one in enumerate(self.gradients):
            for rank, values in one.reduced.items() if one.wrong else ():
                if (mean := _mean(values)) is not None:
                    by_place.setdefault((rank, values.shape), []).append((mean, number))
        pairs = ((place, sorted(means)) for place, means in by_place.items())
        return {place: ([mean for mean, _ in means], [number for _, number in means]) for place, means in pairs}


def _mean(values: NDArray[np.float64]) -> float | None:
    """Return the mean; None if it is not finite, as NaN and infinite elements are near to nothing."""
    if not np.isfinite(values).all():
        return None
    mean = float(np.mean(values)) if values.size else 0.0
    return mean if math.isfinite(mean) else None


def _is_shared(result: Compared, other: Compared, axis: str) -> bool:
    """Whether along an axis ranks have one of two tensors each, and one gradient for both."""
    for group in result.mesh.groups(axis):
        for rank in set(group) & set(result.wrong):
            own = result.reduced[rank]
            elsewhere = [other.reduced[at] for at in group if at in other.reduced and at not in result.reduced]
            equal = any(own.shape == values.shape and result.near(own, values) for values in elsewhere)
            if not equal or not np.any(own) or rank in other.reduced:
                return False
    return bool(result.wrong)


def check_tied(evidence: Evidence, result: Compared) -> Finding | None:
    """Return the finding if the gradients of names that were one tensor were not summed, or not rightly."""
    names = evidence.tied_to(result.name)
    others = [evidence.gradients[name] for name in names if name in evidence.gradients]
    if not others:
        return None
    if not all(_sum_is_right(result, rank, others) for rank in result.reduced):
        return _summed_as_they_lie(result, others)
    listed = " and ".join(other.name for other in others)
    if ratio_of(result) == Fraction(1, 1 + len(others)):
        uses = 1 + len(others)
        return result.finding(
            UnsummedTiedGradients(uses),
            f"the gradient is 1/{uses} of the unsharded model's: the gradients of its {uses} uses were averaged",
            kind="wrong-scale",
            details=(f"it was one tensor with {listed}, which other ranks have",),
        )
    return result.finding(
        UnsummedTiedGradients(),
        f"the gradient is of this name's use only: it was one tensor with {listed}, which other ranks have, and the "
        "sum of their gradients is the unsharded model's",
    )


def _summed_as_they_lie(result: Compared, others: list[Compared]) -> Finding | None:
    """Return the finding if ranks have one gradient for local shards that are different parts of a tied weight."""
    other = next((other for other in others if all(_shared(result, rank, other) for rank in result.wrong)), None)
    if other is None:
        return None
    return result.finding(
        TiedShardsMisaligned(),
        f"the gradient is equal to that of {other.name} on other ranks, with which it was one tensor: but the local "
        "shards are different parts of it",
    )


def _shared(result: Compared, rank: int, other: Compared) -> bool:
    """Whether another rank has a rank's gradient for another part of the other name."""
    gradient = result.reduced[rank]
    return bool(np.any(gradient)) and any(
        values.size == gradient.size
        and other.regions[at] != result.regions[rank]
        and result.near(gradient.ravel(), values.ravel())
        for at, values in other.reduced.items()
        if at != rank
    )


def _sum_is_right(result: Compared, rank: int, others: list[Compared]) -> bool:
    """Whether a rank's gradient and those of the same part under the other names sum to what is wanted."""
    total = result.reduced[rank]
    for other in others:
        holder = next((at for at in other.reduced if other.regions[at] == result.regions[rank]), None)
        if holder is None:
            return False
        total = total + other.reduced[holder]
    return result.is_right(rank, total)
