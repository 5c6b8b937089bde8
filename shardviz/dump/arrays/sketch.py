"""Sketches: sixteen numbers for a tensor, to compare two runs without their values.

Each number is the sum of the elements with signs drawn for their positions, so that elements in another order give
other numbers. The numbers of two tensors are about as far apart as the tensors themselves are (an AMS sketch; Alon,
Matias and Szegedy 1996), to a third of the distance; those of a tensor times a number are its own times that number.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

SIZE = 16
DIGITS = 12
"""Digits of each number: enough for steps in float64, which may be apart by a billionth."""
MAX_ELEMENTS = 1 << 14
"""Of a larger tensor, so many elements are looked at, at places drawn for its size."""


def sketch(values: NDArray[np.float64]) -> tuple[float, ...]:
    """Return a tensor's sketch; empty if it has no elements or its squares overflow.

    Squares overflow if an inspected element is NaN or infinite, and in an attention mask, which has the most negative
    float64.
    """
    places, signs = _places_and_signs(values.size)
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = values.ravel()[places] @ signs
        if not places.size or not np.isfinite(numbers @ numbers):
            return ()
    return tuple(float(f"{number:.{DIGITS}g}") for number in numbers.tolist())


def num_looked_at(size: int) -> int:
    """Return how many elements of a tensor of a size are looked at."""
    return min(size, MAX_ELEMENTS)


@lru_cache(maxsize=16)
def _places_and_signs(size: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the places that are looked at in a tensor of a size, and the signs of each."""
    count = num_looked_at(size)
    numbers = np.arange(count, dtype=np.uint64)
    starts = (numbers * size // max(count, 1)).astype(np.int64)
    lengths = np.maximum(np.diff(starts, append=size), 1).astype(np.uint64)
    places = starts + (_mixed(numbers + np.uint64(size)) % lengths).astype(np.int64)
    bits = _mixed(places.astype(np.uint64))[:, None] >> np.arange(SIZE, dtype=np.uint64)
    return places, 1.0 - 2.0 * (bits & np.uint64(1)).astype(np.float64)


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of each number (SplitMix64), the same in all versions of numpy."""
    with np.errstate(over="ignore"):
        mixed: NDArray[np.uint64] = numbers + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
    return mixed


def apart(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the relative distance of two sketches; infinite if one is empty."""
    if not first or not second:
        return 0.0 if not first and not second else float("inf")
    first_numbers, second_numbers = np.array(first), np.array(second)
    size = max(float(np.linalg.norm(first_numbers)), float(np.linalg.norm(second_numbers)))
    return float(np.linalg.norm(first_numbers - second_numbers)) / size if size else 0.0
