"""`wrong-scale` of a logged gradient norm: its squares were summed over another set of axes than those that split.

A norm over shards is the root of the sum of all squares, each counted once. Summed over an axis that keeps copies too,
it counts those once a rank (torchtune#2420); not summed over an axis that splits, it is a part's (RLinf#1558).
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.finding import Finding
from shardviz.check.step.words import claimed_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shardviz.check.step.compared import Compared
    from shardviz.check.step.evidence import Evidence


def check_norm(evidence: Evidence, one: Compared) -> Finding | None:
    """Return the finding if a value should be the norm of all gradients, and is one over other axes."""
    gradients = list(evidence.gradients.values())
    whole = np.sqrt(np.array(sum(float(np.sum(gradient.wanted**2)) for gradient in gradients)))
    if one.wanted.ndim or not gradients or not one.near(one.wanted, whole):
        return None
    own = {rank: _square(gradients, rank) for rank in one.reduced}
    for axes in _sets(one.mesh.axes):
        summed = own
        for axis in axes:
            summed = one.over(axis, "sum", summed)
        if set(summed) == set(own) and all(one.near(one.reduced[rank], np.sqrt(summed[rank])) for rank in own):
            return _finding(one, gradients, axes)
    return None


def _sets(axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for count in range(len(axes) + 1):
        yield from combinations(axes, count)


def _square(gradients: list[Compared], rank: int) -> NDArray[np.float64]:
    """Return the sum of the squares of what a rank has."""
    squares = [float(np.sum(one.reduced[rank] ** 2)) for one in gradients if rank in one.reduced]
    return np.array(sum(squares))


def _finding(one: Compared, gradients: list[Compared], axes: tuple[str, ...]) -> Finding:
    copied = next(((name, axis) for axis in axes for name in _names(gradients, axis, split=False)), None)
    left = next(((name, axis) for axis in one.mesh.axes if axis not in axes for name in _names(gradients, axis)), None)
    causes = []
    if copied:
        causes.append(f"Ranks along {copied[1]} have copies of the gradient of {copied[0]}, and each copy was counted")
    if left:
        causes.append(f"{left[1]} splits the gradient of {left[0]}, and the other parts were left out")
    over = f"summed over {' and '.join(axes)}" if axes else "not summed over any axis"
    return Finding(
        "wrong-scale",
        "error",
        one.name,
        one.wrong,
        f"the value is the norm of all gradients with the squares of each rank's {over}",
        claimed=claimed_text(one),
        cause="; ".join(causes),
        fix="for each gradient all_reduce the squares over the axes that split it, and no others, before the root; "
        "torch.nn.utils.get_total_norm does so for DTensors",
        refs=("RLinf#1558", "torchtune#2420"),
    )


def _names(gradients: list[Compared], axis: str, *, split: bool = True) -> Iterator[str]:
    """Yield the gradients that an axis splits, or those of which it keeps copies."""
    for one in gradients:
        groups = one.mesh.groups(axis) if axis in one.mesh.axes else []
        parts = {len({one.regions[rank] for rank in group if rank in one.regions}) > 1 for group in groups}
        if (True in parts) == split:
            yield one.name
