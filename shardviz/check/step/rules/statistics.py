"""Logged statistics of the model's output: a norm, a deviation, a largest number, of parts in place of the whole.

What the unsharded model logs says which statistic of the whole output it is. What ranks log is that of their parts, or
these are reduced in a way which does not make it that of the whole: a mean of deviations, a sum of norms.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.explain.step.logged import StatisticOfParts
from shardviz.explain.templates import number
from shardviz.relate.measures import axis_sets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.check.step.comparison import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.explain.finding import Finding

    Values = NDArray[np.float64]

MEANS = {"avg": "mean", "sum": "sum"}


@dataclass(frozen=True, slots=True)
class Statistic:
    """A number that is made of all elements of a tensor.

    Attributes:
        name: What sentences call it.
        inner: What it is a function of.
        inner_name: What sentences call that; empty if it is the statistic itself.
        is_root: Whether the statistic is the root of that.
        remedy: How it is made of ranks' parts.
    """

    name: str
    inner: Callable[[Values], np.floating[Any]]
    inner_name: str
    is_root: bool
    remedy: str

    def of(self, inner: Values) -> Values:
        """Return the statistic, given what it is a function of."""
        return np.sqrt(inner) if self.is_root else inner


ROOT = "all_reduce the {} over {{axes}} with ReduceOp.{}, before the square root"
MOMENTS = (
    "all_reduce the number of elements, their sum and the sum of their squares over {axes}, and compute it of these"
)
STATISTICS = (
    Statistic("norm", lambda x: np.sum(x**2), "sum of squares", True, ROOT.format("squares", "SUM")),
    Statistic(
        "root mean square",
        lambda x: np.mean(x**2),
        "mean of squares",
        True,
        ROOT.format("means of squares", "AVG"),
    ),
    Statistic("standard deviation", lambda x: np.var(x, ddof=1), "variance", True, MOMENTS),
    Statistic("standard deviation", np.var, "variance", True, MOMENTS),
    Statistic("variance", lambda x: np.var(x, ddof=1), "", False, MOMENTS),
    Statistic("variance", np.var, "", False, MOMENTS),
    Statistic("largest element", np.max, "", False, "all_reduce it over {axes} with ReduceOp.MAX"),
    Statistic("smallest element", np.min, "", False, "all_reduce it over {axes} with ReduceOp.MIN"),
    Statistic(
        "largest magnitude", lambda x: np.max(np.abs(x)), "", False, "all_reduce it over {axes} with ReduceOp.MAX"
    ),
)


def check_statistic(evidence: Evidence, comparison: Compared) -> Finding | None:
    """Return the finding if a logged number should be a statistic of an output, and is made of that of the parts."""
    outputs = [result for result in evidence.results if result.role == "output" and result.wanted.size > 1]
    for output, statistic in product(outputs if not comparison.wanted.ndim else (), STATISTICS):
        with np.errstate(all="ignore"):
            inner = {rank: np.array(statistic.inner(values)) for rank, values in output.reduced.items()}
            whole = statistic.of(np.array(statistic.inner(output.wanted)))
        split = [axis for axis in output.mesh.axes if output.is_split(axis)]
        if not comparison.near(comparison.wanted, whole):
            continue
        for way, values in _ways(statistic, comparison, inner):
            if comparison.is_held(values):
                axes = " and ".join(split) or "no axis"
                logs = f"the unsharded model logs the output's {statistic.name}, {number(float(whole))}"
                cause = StatisticOfParts(statistic.name, way, statistic.remedy.format(axes=axes))
                return comparison.finding(cause, f"the value is {way}; {logs}")
    return None


def _ways(
    statistic: Statistic, comparison: Compared, inner: Mapping[int, Values]
) -> Iterator[tuple[str, Mapping[int, Values]]]:
    """Yield how ranks may make a statistic of their parts, with what each of them has then."""
    with np.errstate(all="ignore"):
        of_parts = {rank: statistic.of(values) for rank, values in inner.items()}
        if statistic.name != "norm":
            yield f"the {statistic.name} of each rank's own part", of_parts
        for axes, (op, mean) in product(axis_sets(comparison.mesh.axes), MEANS.items()):
            over = f"the {mean} over {' and '.join(axes)}"
            yield f"{over} of each rank's own {statistic.name}", comparison.over(axes, op, of_parts)
            if statistic.is_root:
                reduced = comparison.over(axes, op, inner)
                yield (
                    f"the root of {over} of each rank's own {statistic.inner_name}",
                    {rank: np.sqrt(values) for rank, values in reduced.items()},
                )
