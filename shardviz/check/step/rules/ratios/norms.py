"""`wrong-scale` of a logged gradient norm: its squares were summed over another set of axes than those that split.

A norm over shards is the root of the sum of all squares, each counted once. Summed over an axis that keeps copies too,
it counts those once a rank (torchtune#2420); not summed over an axis that splits, it is a part's (RLinf#1558). Norms
of parts are not summed or averaged: only their squares add up.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.rules.ratios.factors import splits
from shardviz.check.step.words import claimed_text
from shardviz.explain.factors import NormOverWrongAxes
from shardviz.explain.losses import NormOfPart
from shardviz.relate.tolerance import EXACT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.check.step.compared import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.explain.finding import Finding

    Values = Mapping[int, NDArray[np.float64]]


def check_norm(evidence: Evidence, result: Compared) -> Finding | None:
    """Return the finding if a value should be the norm of all gradients, and is put together in another way."""
    gradients = list(evidence.gradients.values())
    whole = np.array(total(gradient.wanted for gradient in gradients))
    if result.wanted.ndim or not gradients or not result.near(result.wanted, whole):
        return None
    squares = {rank: _square(gradients, rank) for rank in result.reduced}
    for axes in _sets(result.mesh.axes):
        if _is(result, _over(result, axes, "sum", squares), root=True):
            return _finding(result, gradients, axes)
    norms = {rank: np.sqrt(square) for rank, square in squares.items()}
    for axes in _sets(result.mesh.axes)[1:]:
        for op, name in (("avg", "mean"), ("sum", "sum")):
            if _is(result, _over(result, axes, op, norms)):
                return _of_norms(result, f"the {name} over {' and '.join(axes)} of each rank's own norm", axes)
    return None


def total(parts: Iterable[NDArray[np.float64]]) -> float:
    """Return the norm of all parts together."""
    return math.sqrt(sum(float(np.sum(part**2)) for part in parts))


def norms_of_parts(gradients: list[Compared]) -> Iterator[tuple[str, float]]:
    """Yield norms that are not the whole's but equal on all ranks, as sentences call them."""
    ranks = sorted({rank for gradient in gradients for rank in gradient.reduced})
    first = gradients[0]
    squares = {rank: _square(gradients, rank) for rank in ranks}
    roots = {rank: np.sqrt(square) for rank, square in squares.items()}
    for axes in _sets(first.mesh.axes)[1:]:
        over = " and ".join(axes)
        ways = (("avg", "mean", roots), ("sum", "sum", roots), ("sum", "root of the sum of squares", squares))
        for op, name, values in ways:
            norms = [float(value) for value in _over(first, axes, op, values).values()]
            norms = [math.sqrt(value) for value in norms] if values is squares else norms
            if norms and max(norms) - min(norms) <= EXACT * max(norms):
                yield f"the {name} over {over} of each rank's own", norms[0]


def _over(result: Compared, axes: tuple[str, ...], op: str, values: Values) -> Values:
    for axis in axes:
        values = result.over(axis, op, values)
    return values


def _is(result: Compared, values: Values, *, root: bool = False) -> bool:
    """Whether every rank has logged such a value."""
    found = {rank: np.sqrt(value) for rank, value in values.items()} if root else values
    return set(found) == set(result.reduced) and all(result.near(result.reduced[rank], found[rank]) for rank in found)


def _of_norms(result: Compared, what: str, axes: tuple[str, ...]) -> Finding:
    return NormOfPart(" and ".join(axes), is_reduced=True).finding(
        result.name,
        result.wrong,
        f"the value is {what}; the norm of all gradients is the root of the sum of all squares",
        kind="wrong-scale",
        claimed=claimed_text(result),
    )


def _sets(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [chosen for count in range(len(axes) + 1) for chosen in combinations(axes, count)]


def _square(gradients: list[Compared], rank: int) -> NDArray[np.float64]:
    """Return the sum of the squares of what a rank has."""
    squares = [float(np.sum(one.reduced[rank] ** 2)) for one in gradients if rank in one.reduced]
    return np.array(sum(squares))


def _finding(result: Compared, gradients: list[Compared], axes: tuple[str, ...]) -> Finding:
    copied = next(((name, axis) for axis in axes for name in _names(gradients, axis, split=False)), ("", ""))
    others = [axis for axis in result.mesh.axes if axis not in axes]
    left = next(((name, axis) for axis in others for name in _names(gradients, axis)), ("", ""))
    over = f"summed over {' and '.join(axes)}" if axes else "not summed over any axis"
    return NormOverWrongAxes(*copied, *left).finding(
        result.name,
        result.wrong,
        f"the value is the norm of all gradients with the squares of each rank's {over}",
        claimed=claimed_text(result),
    )


def _names(gradients: list[Compared], axis: str, *, split: bool = True) -> Iterator[str]:
    """Yield the gradients that an axis splits, or those that it keeps copies of."""
    yield from (one.name for one in gradients if splits(one, axis) == split)
