"""`wrong-scale`: a result is the unsharded model's, times an axis's size too many or too few.

A sum where a mean belongs multiplies by the number of ranks, a mean where a sum belongs divides by it, and a bias that
every rank adds before the sum counts as often as there are ranks. What no ratio explains is `wrong-value`.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.finding import Finding
from shardviz.check.step.words import claimed_text, number

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.check.step.compared import Compared
    from shardviz.dump.tensors import Model
    from shardviz.mesh import Mesh

RATIO_PRECISION = 1e-6
"""A ratio this near to one of small numbers is that one: real ratios are axis sizes and their products."""


def check_scale(one: Compared) -> Finding | None:
    """Return the finding if every rank is off by the same ratio."""
    ratios = {_ratio(one, rank) for rank in one.reduced}
    if len(ratios) != 1 or (ratio := ratios.pop()) is None or ratio == 1:
        return None
    axes = _axes_of_size(one.mesh, ratio)
    which = (
        f", the size of {' * '.join(axes)}" if axes and ratio > 1 else f", 1 over {' * '.join(axes)}" if axes else ""
    )
    what = {"grad": "gradient", "output": "output", "scalar": "value"}[one.role]
    return Finding(
        "wrong-scale",
        "error",
        one.name,
        one.wrong,
        f"the {what} is {_times(ratio)} the unsharded model's{which}",
        claimed=claimed_text(one),
        cause=_cause(ratio, axes),
        fix=_fix(ratio, axes),
        refs=("gpt-neox#1259",),
    )


def _times(ratio: Fraction) -> str:
    return f"{ratio.numerator} times" if ratio.denominator == 1 else f"{ratio} of"


def _cause(ratio: Fraction, axes: tuple[str, ...]) -> str:
    over = f" over {' and '.join(axes)}" if axes else ""
    if ratio > 1:
        return f"Equal contributions were summed{over}, or a sum was taken where each rank's mean should be averaged"
    return f"An average was taken{over} where the ranks' contributions should be summed"


def _fix(ratio: Fraction, axes: tuple[str, ...]) -> str:
    over = f" over {' and '.join(axes)}" if axes else ""
    if ratio > 1:
        return f"reduce{over} with ReduceOp.AVG, or reduce once only"
    return f"reduce{over} with ReduceOp.SUM; for FSDP2, set_gradient_divide_factor(1.0)"


def _ratio(one: Compared, rank: int) -> Fraction | None:
    """Return the ratio of a rank's values to those wanted, where it is one of small numbers for every element."""
    got, wanted = one.reduced[rank], one.wanted_of(rank)
    square = float(np.sum(wanted * wanted))
    if not square or not np.all(np.isfinite(got)):
        return None
    raw = float(np.sum(got * wanted)) / square
    ratio = Fraction(raw).limit_denominator(max(one.mesh.size, 1))
    if not ratio or abs(raw - ratio) > RATIO_PRECISION * max(1.0, abs(raw)):
        return None
    return ratio if one.near(got, wanted * float(ratio), scale=float(ratio)) else None


def _axes_of_size(mesh: Mesh, ratio: Fraction) -> tuple[str, ...]:
    """Return the fewest axes whose sizes multiply to the ratio or to one over it."""
    size = ratio.numerator if ratio > 1 else ratio.denominator
    if ratio not in (Fraction(size), Fraction(1, size)):
        return ()
    for count in range(1, mesh.ndim + 1):
        for axes in combinations(mesh.axes, count):
            if math.prod(mesh.axis_size(axis) for axis in axes) == size:
                return axes
    return ()


def check_terms(model: Model, one: Compared) -> Finding:
    """Return the finding where no single ratio explains it: a parameter added too often, or just a wrong value."""
    rank = one.wrong[0]
    excess = one.reduced[rank] - one.wanted_of(rank)
    for name, bias in _vectors(model, excess.shape[-1:] if excess.ndim else ()):
        times = _times_added(one, excess, bias)
        if times:
            return _added_too_often(one, name, times)
    worst = float(np.max(np.abs(excess), initial=0.0)) if np.all(np.isfinite(excess)) else math.nan
    size = float(np.max(np.abs(one.wanted), initial=0.0))
    return Finding(
        "wrong-value",
        "error",
        one.name,
        one.wrong,
        f"the {one.role} is off by up to {number(worst)} on rank {rank}, where the largest is {number(size)} and "
        f"rounding allows {number(one.tolerance)}",
        claimed=claimed_text(one),
        cause="The sharded step computes something else than the unsharded model",
        fix="compare the outputs module by module, first to last, and look at the first that differs",
    )


def _vectors(model: Model, shape: tuple[int, ...]) -> list[tuple[str, NDArray[np.float64]]]:
    return [
        (name, model.values(tensor, tensor.first, name))
        for tensor in model.stage("reference")
        if tensor.role == "param" and tensor.shape == shape
        for name in tensor.names
    ]


def _times_added(one: Compared, excess: NDArray[np.float64], bias: NDArray[np.float64]) -> int:
    """Return how often too many a vector was added to every row; 0 where that does not explain the excess."""
    square = float(np.sum(bias * bias))
    if not square:
        return 0
    rows = excess.reshape(-1, bias.size)
    times = round(float(np.mean(rows @ bias)) / square)
    return times if times and one.near(rows, np.broadcast_to(times * bias, rows.shape), scale=abs(times)) else 0


def _added_too_often(one: Compared, name: str, times: int) -> Finding:
    axes = _axes_of_size(one.mesh, Fraction(times + 1))
    over = f" of {' * '.join(axes)}" if axes else ""
    return Finding(
        "wrong-scale",
        "error",
        name,
        one.wrong,
        f"the {one.role} is off by {times} times {name}: it is added {times + 1} times, once on every rank{over}",
        claimed=claimed_text(one),
        cause=f"Every rank{over} adds the whole of {name} before the sum over ranks",
        fix=f"add {name} after the sum, as RowwiseParallel does, or on one rank only",
        refs=("TGI#1036",),
    )
