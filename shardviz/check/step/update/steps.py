"""What an optimizer added to a weight on each rank, beside what the unsharded model's added to the same elements."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.compared import laid_out
from shardviz.relate.factors import factor_of
from shardviz.relate.tolerance import EXPLAINED_UPDATE, FEW

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shardviz.check.step.compared import Compared
    from shardviz.dump.dump import Dump
    from shardviz.explain.cause import Cause


@dataclass(frozen=True)
class Why:
    """An explanation of a wrong weight or state.

    Attributes:
        sentence: What is wrong, in numbers.
        cause: The most likely cause.
    """

    sentence: str
    cause: Cause


def steps_of(dump: Dump, result: Compared) -> dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Return for each rank the step of a weight and the unsharded model's step of the same elements."""
    before, after = dump.find("reference", "param", result.name), dump.find("updated", "param", result.name)
    if before is None or after is None:
        return {}
    start, end = (dump.values(tensor.first, result.name) for tensor in (before, after))
    steps = {}
    for rank, values in result.reduced.items():
        initial = result.part(start, rank)
        steps[rank] = values - initial, result.part(end, rank) - initial
    return steps


def factors_of(dump: Dump, result: Compared) -> dict[int, float]:
    """Return the number of unsharded steps that each rank's step is; empty if some rank's is not such a multiple."""
    steps = steps_of(dump, result)
    factors = {rank: factor_to(got, due) for rank, (got, due) in steps.items() if np.any(due)}
    known = {rank: factor for rank, factor in factors.items() if factor is not None}
    enough = sum(np.count_nonzero(due) for _, due in steps.values()) >= FEW
    return known if enough and len(known) == len(factors) else {}


def factor_to(got: NDArray[np.float64], due: NDArray[np.float64]) -> float | None:
    """Return by what one array is a multiple of another; None if it is none."""
    factor = factor_of(got, due)
    return factor if factor is not None and is_near(got, factor * due) else None


def is_near(got: NDArray[np.float64], other: NDArray[np.float64]) -> bool:
    """Whether two arrays are near to each other, measured by the larger one."""
    size = max(float(np.max(np.abs(one), initial=0.0)) for one in (got, other))
    return bool(np.max(np.abs(got - other), initial=0.0) <= EXPLAINED_UPDATE * size)


def is_equal(left: float, right: float) -> bool:
    """Whether two numbers are equal, as far as an update shows it."""
    return math.isclose(left, right, rel_tol=EXPLAINED_UPDATE)


def other_weights(dump: Dump, result: Compared) -> Iterator[Compared]:
    """Yield the other weights of which both models' steps are known."""
    for tensor in dump.at("step"):
        for name in tensor.names if tensor.role == "param" else ():
            after = dump.find("updated", "param", name)
            if name != result.name and after is not None:
                yield laid_out(dump, tensor, name, dump.values(after.first, name), result.rounding)


def is_stepped_once(dump: Dump, result: Compared) -> bool:
    """Whether every rank steps a weight as the unsharded model does."""
    factors = {} if result.incomparable else factors_of(dump, result)
    return bool(factors) and all(is_equal(factor, 1.0) for factor in factors.values())
