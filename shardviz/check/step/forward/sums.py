"""An output that is right but for a sum over ranks, once a vector that is added to every row is set aside.

A row-parallel layer adds its bias after the sum over ranks. So a sum left out, an average in its place or a sum taken
twice is not a ratio of the output, but one of the output less the bias.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Literal

import numpy as np

from shardviz.check.step.forward.reason import Reason
from shardviz.check.step.rules.factors import size_in_words
from shardviz.check.step.rules.reductions import own_part
from shardviz.explain.step.modules import AveragedForward, RepeatedForwardSum
from shardviz.explain.step.sums import ConcatenatedTerms, UnreducedBesideVector
from shardviz.explain.templates import times_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shardviz.check.step.comparison import Compared
    from shardviz.check.step.evidence import Evidence


def check_sum_beside_a_vector(evidence: Evidence, comparison: Compared) -> Reason | None:
    """Return the reason if the output less a vector of the model lacks a sum, or is some times too large or small."""
    for name, vector in _vectors(evidence, comparison.wanted.shape[-1:]):
        whole = np.broadcast_to(vector, comparison.wanted.shape)
        added = {rank: comparison.part(whole, rank) for rank in comparison.reduced}
        terms = {rank: comparison.reduced[rank] - added[rank] for rank in comparison.reduced}
        expected = {rank: comparison.wanted_of(rank) - added[rank] for rank in comparison.reduced}
        for axis in comparison.copies_differ_along:
            for op in ("sum", "avg"):
                total = comparison.over((axis,), op, terms)
                is_known = total.keys() == expected.keys()
                if is_known and all(comparison.near(total[rank], expected[rank]) for rank in expected):
                    what: Literal["sum", "mean"] = "sum" if op == "sum" else "mean"
                    sentence = f"without {name}, the {what} of the ranks' outputs over {axis} is the unsharded model's"
                    return Reason(UnreducedBesideVector(name, axis, op), sentence, held=own_part(what, (axis,)))
        for ratio in _ratios(comparison):
            if all(comparison.near(terms[rank], expected[rank] * float(ratio), float(ratio)) for rank in expected):
                cause = AveragedForward if ratio < 1 else RepeatedForwardSum
                sentence = f"without {name}, it is {times_text(ratio)} the unsharded model's without {name}"
                return Reason(cause("", size_in_words(comparison.mesh, ratio), name), sentence)
    return None


def check_joined(evidence: Evidence, comparison: Compared) -> Reason | None:
    """Return the reason if an output is larger than the unsharded model's, and its parts along a dim add up to that."""
    whole = next(iter(comparison.values.values()))
    is_output = comparison.role == "output" and whole.ndim == comparison.wanted.ndim
    if not is_output or not np.all(np.isfinite(comparison.wanted)):
        return None
    for dim, (length, expected) in enumerate(zip(whole.shape, comparison.wanted.shape, strict=True)):
        for axis in comparison.mesh.axes:
            size = comparison.mesh.axis_size(axis)
            if size > 1 and length == expected * size:
                for name, vector in [("", np.zeros(())), *_vectors(evidence, comparison.wanted.shape[-1:])]:
                    if all(_adds_up(comparison, values, dim, size, vector) for values in comparison.values.values()):
                        return _put_side_by_side(dim, axis, size, name)
    return None


def _adds_up(
    comparison: Compared, values: NDArray[np.float64], dim: int, size: int, vector: NDArray[np.float64]
) -> bool:
    if values.shape[dim] != comparison.wanted.shape[dim] * size:
        return False
    total = np.sum(np.split(values, size, dim), axis=0)
    return total.shape == comparison.wanted.shape and comparison.near(total + vector, comparison.wanted)


def _vectors(evidence: Evidence, shape: tuple[int, ...]) -> Iterator[tuple[str, NDArray[np.float64]]]:
    names, vectors = evidence.dump.vectors(shape)
    return ((name, vector) for name, vector in zip(names, vectors, strict=True) if np.any(vector))


def _ratios(comparison: Compared) -> list[Fraction]:
    """Return ratios of an average instead of a sum, or of a repeated sum: sizes of sets of axes."""
    sizes = {1}
    for axis in comparison.mesh.axes:
        sizes |= {size * comparison.mesh.axis_size(axis) for size in sizes}
    return [ratio for size in sorted(sizes - {1}) for ratio in (Fraction(1, size), Fraction(size))]


def _put_side_by_side(dim: int, axis: str, size: int, name: str) -> Reason:
    less = f" without {name}" if name else ""
    return Reason(
        ConcatenatedTerms(axis, dim, name),
        f"the sum of its {size} parts along dim {dim} is the unsharded model's output{less}",
    )
