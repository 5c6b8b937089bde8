"""An output that is right but for a sum over ranks, once a vector that is added to every row is set aside.

A row-parallel layer adds its bias after the sum over ranks. So a sum left out, an average in its place or a sum taken
twice is not a ratio of the output, but one of the output less the bias.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.forward.reason import Reason
from shardviz.check.step.rules.factors import size_in_words
from shardviz.check.step.rules.reductions import own_part
from shardviz.explain.modules import AveragedForward, RepeatedForwardSum
from shardviz.explain.sums import (
    ConcatenatedTerms,
    UnreducedBesideVector,
)
from shardviz.explain.templates import times_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.check.step.compared import Compared
    from shardviz.check.step.evidence import Evidence


def check_sum_beside_a_vector(evidence: Evidence, result: Compared) -> Reason | None:
    """Return the reason if the output less a vector of the model lacks a sum, or is some times too large or small."""
    for name, vector in _vectors(evidence, result.wanted.shape[-1:]):
        added = _of_ranks(result, np.broadcast_to(vector, result.wanted.shape))
        terms = {rank: result.reduced[rank] - added[rank] for rank in result.reduced}
        wanted = {rank: result.wanted_of(rank) - added[rank] for rank in result.reduced}
        for axis in result.copies_differ_along:
            for op in ("sum", "avg"):
                total = result.over((axis,), op, terms)
                if total.keys() == wanted.keys() and all(result.near(total[rank], wanted[rank]) for rank in wanted):
                    return _not_reduced(name, axis, op)
        for ratio in _ratios(result):
            if all(result.near(terms[rank], wanted[rank] * float(ratio), float(ratio)) for rank in wanted):
                return _scaled(result, name, ratio)
    return None


def check_joined(evidence: Evidence, result: Compared) -> Reason | None:
    """Return the reason if an output is larger than the unsharded model's, and its parts along a dim add up to that."""
    whole = next(iter(result.values.values()))
    if result.role != "output" or whole.ndim != result.wanted.ndim or not np.all(np.isfinite(result.wanted)):
        return None
    for dim, (length, due) in enumerate(zip(whole.shape, result.wanted.shape, strict=True)):
        for axis in result.mesh.axes:
            size = result.mesh.axis_size(axis)
            if size > 1 and length == due * size:
                for name, vector in [("", np.zeros(())), *_vectors(evidence, result.wanted.shape[-1:])]:
                    if all(_adds_up(result, values, dim, size, vector) for values in result.values.values()):
                        return _put_side_by_side(dim, axis, size, name)
    return None


def _adds_up(result: Compared, values: NDArray[np.float64], dim: int, size: int, vector: NDArray[np.float64]) -> bool:
    if values.shape[dim] != result.wanted.shape[dim] * size:
        return False
    total = np.sum(np.split(values, size, dim), axis=0)
    return total.shape == result.wanted.shape and result.near(total + vector, result.wanted)


def _vectors(evidence: Evidence, shape: tuple[int, ...]) -> Iterator[tuple[str, NDArray[np.float64]]]:
    names, vectors = evidence.dump.vectors(shape)
    return ((name, vector) for name, vector in zip(names, vectors, strict=True) if np.any(vector))


def _of_ranks(result: Compared, whole: NDArray[np.float64]) -> Mapping[int, NDArray[np.float64]]:
    return {rank: result.part(whole, rank) for rank in result.reduced}


def _ratios(result: Compared) -> list[Fraction]:
    """Return what an average in place of a sum, or a sum taken twice, may multiply by: sizes of sets of axes."""
    sizes = {1}
    for axis in result.mesh.axes:
        sizes |= {size * result.mesh.axis_size(axis) for size in sizes}
    return [ratio for size in sorted(sizes - {1}) for ratio in (Fraction(1, size), Fraction(size))]


def _not_reduced(name: str, axis: str, op: str) -> Reason:
    what = "sum" if op == "sum" else "mean"
    return Reason(
        UnreducedBesideVector(name, axis, op),
        f"without {name}, the {what} of the ranks' outputs over {axis} is the unsharded model's",
        held=own_part("sum" if op == "sum" else "mean", (axis,)),
    )


def _scaled(result: Compared, name: str, ratio: Fraction) -> Reason:
    cause = AveragedForward if ratio < 1 else RepeatedForwardSum
    return Reason(
        cause("", size_in_words(result.mesh, ratio), name),
        f"without {name}, it is {times_text(ratio)} the unsharded model's without {name}",
    )


def _put_side_by_side(dim: int, axis: str, size: int, name: str) -> Reason:
    less = f" without {name}" if name else ""
    return Reason(
        ConcatenatedTerms(axis, dim, name),
        f"the sum of its {size} parts along dim {dim} is the unsharded model's output{less}",
    )
