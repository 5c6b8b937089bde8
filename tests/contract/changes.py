"""Changes of values, for variants of recorded cases: scaled, moved by a little, in another order, rounded, emptied."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from numpy.typing import NDArray

    Change = Callable[[random.Random, NDArray[Any]], NDArray[Any]]

SCALES = (0.0, -1.0, 0.5, 2.0, 3.0, 4.0, 0.25, 1.37, 1 / 3, 1.02, 0.995, 1e6)
SIZES = tuple(10.0**power for power in range(-12, 1))


def scaled(factor: float) -> Change:
    """Return a change that multiplies all values."""
    return lambda _rng, values: values * factor


def moved(size: float) -> Change:
    """Return a change that adds noise, relative to the largest value."""

    def change(rng: random.Random, values: NDArray[Any]) -> NDArray[Any]:
        noise = np.random.default_rng(rng.randrange(1 << 30)).standard_normal(values.shape)
        return values + size * float(np.max(np.abs(values), initial=0.0)) * noise

    return change


def small_change(rng: random.Random, size: float) -> tuple[str, Change]:
    """Return a change of some size: all values times nearly 1, noise, or one element."""
    how = rng.choice(("times", "moved", "one"))
    if how == "times":
        return f"times 1 + {size:g}", scaled(1 + size)
    if how == "moved":
        return f"moved by {size:g}", moved(size)

    def of_one(rng: random.Random, values: NDArray[Any]) -> NDArray[Any]:
        changed = values.copy()
        changed.reshape(-1)[rng.randrange(max(1, values.size))] += size * float(np.max(np.abs(values)))
        return changed

    return f"one element moved by {size:g}", of_one


def _one_element(rng: random.Random, values: NDArray[Any]) -> NDArray[Any]:
    changed = values.copy()
    changed.reshape(-1)[rng.randrange(max(1, values.size))] += rng.choice(SIZES) * float(np.max(np.abs(values)))
    return changed


def _rows_exchanged(rng: random.Random, values: NDArray[Any]) -> NDArray[Any]:
    dim = rng.randrange(values.ndim) if values.ndim else 0
    order = list(range(values.shape[dim] if values.ndim else 0))
    if len(order) < 2:
        return values
    how = rng.randrange(5)
    if how == 0:
        one, other = rng.sample(order, 2)
        order[one], order[other] = order[other], order[one]
    elif how == 1:
        order.reverse()
    elif how == 2:
        order = [*order[len(order) // 2 :], *order[: len(order) // 2]]
    elif how == 3:
        step = rng.choice((2, 3, 4))
        order = [place for start in range(step) for place in order[start::step]]
    else:
        rng.shuffle(order)
    return values.take(order, dim)


def _transposed(_rng: random.Random, values: NDArray[Any]) -> NDArray[Any]:
    return values.T.reshape(values.shape) if values.ndim == 2 else values[..., ::-1].copy() if values.ndim else values


def _repeated(rng: random.Random, values: NDArray[Any]) -> NDArray[Any]:
    if values.ndim == 0 or values.shape[0] < 2:
        return values
    half = values.shape[0] // 2
    changed = values.copy()
    changed[half : 2 * half] = changed[:half] * rng.choice((1.0, 1.0, 0.0))
    return changed


def _rounded(rng: random.Random, values: NDArray[Any]) -> NDArray[Any]:
    bits = values.astype(np.float32).view(np.uint32) & np.uint32(rng.choice((0xFFFF0000, 0xFFFFE000)))
    return bits.view(np.float32).astype(values.dtype)


def _not_finite(rng: random.Random, values: NDArray[Any]) -> NDArray[Any]:
    changed = values.copy()
    if changed.size:
        changed.reshape(-1)[rng.randrange(changed.size)] = rng.choice((math.nan, math.inf, -math.inf))
    return changed


def _constant(rng: random.Random, values: NDArray[Any]) -> NDArray[Any]:
    return np.full_like(values, rng.choice((0.0, 1.0, 0.5, float(values.reshape(-1)[0]) if values.size else 0.0)))


def _added(rng: random.Random, values: NDArray[Any]) -> NDArray[Any]:
    if values.ndim == 0:
        return values + rng.choice((1.0, -0.5))
    other = np.random.default_rng(rng.randrange(1 << 30)).standard_normal(values.shape[-1:])
    return values + other * rng.choice((1.0, 0.1, 1e-3))


def any_change(rng: random.Random) -> tuple[str, Change]:
    """Return a change of values, with its name."""
    plain: list[tuple[str, Change]] = [
        ("one element changed", _one_element),
        ("rows exchanged", _rows_exchanged),
        ("rows exchanged", _rows_exchanged),
        ("transposed", _transposed),
        ("repeated", _repeated),
        ("rounded", _rounded),
        ("not finite", _not_finite),
        ("constant", _constant),
        ("a vector added", _added),
    ]
    factor, size = rng.choice(SCALES), rng.choice(SIZES)
    scales = [(f"times {factor:g}", scaled(factor))] * 4
    return rng.choice([*plain, *scales, *[(f"moved by {size:g}", moved(size))] * 3])
