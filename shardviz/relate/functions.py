"""Functions that make each element of one tensor of the same element of another: exp, log, a square, a sigmoid.

Formats keep a number, its logarithm or what a positive function makes of it. A conversion that leaves that out, or does
it twice, has tensors of the right shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.groups import the_only
from shardviz.relate.casts import values_of
from shardviz.relate.tolerance import EPSILON, FLOATS, ROUNDINGS_OF_SCALE
from shardviz.relate.values import blocks, sampled

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Array = NDArray[np.float64]

FEWEST_VALUES = 4
"""Different numbers of a tensor: functions have fewer values in common by chance, as 1 and its square."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function of each element.

    Attributes:
        text: It in torch's words, of `x`.
        inverse: What takes it back, of `y`.
    """

    text: str
    inverse: str
    of: Callable[[Array], Array]


def _softplus(values: Array) -> Array:
    return np.logaddexp(values, 0)


FUNCTIONS = (
    Function("x.exp()", "y.log()", np.exp),
    Function("-x.exp()", "(-y).log()", lambda values: -np.exp(values)),
    Function("(-x).exp()", "-y.log()", lambda values: np.exp(-values)),
    Function("x.log()", "y.exp()", np.log),
    Function("(-x).log()", "-y.exp()", lambda values: np.log(-values)),
    Function("-x.log()", "(-y).exp()", lambda values: -np.log(values)),
    Function("x.square()", "y.sqrt()", lambda values: np.where(values < 0, np.nan, np.square(values))),
    Function("x.sqrt()", "y.square()", np.sqrt),
    Function("x.reciprocal()", "y.reciprocal()", np.reciprocal),
    Function("x.rsqrt()", "y.square().reciprocal()", lambda values: 1 / np.sqrt(values)),
    Function("x.sigmoid()", "y.logit()", lambda values: np.exp(-_softplus(-values))),
    Function("x.logit()", "y.sigmoid()", lambda values: np.log(values / (1 - values))),
    Function("F.softplus(x)", "y.expm1().log()", _softplus),
    Function("x.expm1().log()", "F.softplus(y)", lambda values: np.log(np.expm1(values))),
    Function("x.exp2()", "y.log2()", np.exp2),
    Function("x.log2()", "y.exp2()", np.log2),
    Function("x.tanh()", "y.atanh()", np.tanh),
)
"""Of each number those that the inverse takes back: a root has no sign."""


def function_between(before: NDArray[Any], dtype: str, after: NDArray[Any], to: str) -> Function | None:
    """Return the only function that makes all values of one tensor of another's.

    Args:
        before: The bits of the tensor.
        after: The bits that it became.
        to: Their dtype.

    Returns:
        None if none does, or several do; or if the tensor has few different values.
    """
    if dtype not in FLOATS or to not in FLOATS or before.shape != after.shape:
        return None
    pairs = [(values_of(sampled(before), dtype), values_of(sampled(after), to))]
    if len(np.unique(pairs[0][0])) < FEWEST_VALUES or not all(np.isfinite(side).all() for side in pairs[0]):
        return None
    epsilons = EPSILON[dtype], EPSILON[to]
    is_line = _makes(_line_between(*pairs[0]), *pairs[0], epsilons)
    fitting = [function for function in FUNCTIONS if not is_line and _makes(function.of, *pairs[0], epsilons)]
    function = the_only(fitting)
    every = zip(blocks(before), blocks(after), strict=True)
    is_of_all = function is not None and all(
        _makes(function.of, values_of(old, dtype).ravel(), values_of(new, to).ravel(), epsilons) for old, new in every
    )
    return function if is_of_all else None


def _line_between(before: Array, after: Array) -> Callable[[Array], Array]:
    """Return the line that is nearest to a function: of small numbers, or large ones, many functions are one."""
    columns = np.stack([before, np.ones_like(before)], axis=-1).astype(np.float64)
    slope, start = np.linalg.lstsq(columns, after.astype(np.float64), rcond=None)[0]
    return lambda values: slope * values + start


def _makes(function: Callable[[Array], Array], before: Array, after: Array, epsilons: tuple[float, float]) -> bool:
    """Whether a function makes some numbers of others, but for the roundings of both."""
    with np.errstate(all="ignore"):
        made = function(before.astype(np.float64))
        near = np.abs(function(before * (1 + epsilons[0])) - made) + epsilons[1] * np.abs(made)
        return bool(np.all(np.abs(made - after) <= ROUNDINGS_OF_SCALE * near))
