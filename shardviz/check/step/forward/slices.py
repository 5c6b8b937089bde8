"""Where the slices of a part stand in the whole, whatever their order: also twice, or not at all."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

MAX_NUMBERS = 1 << 22
"""No more pairs of numbers than this are compared to find where slices belong."""

MAX_SPANS = 4


def places_of(
    part: NDArray[np.float64], whole: NDArray[np.float64], tolerance: float
) -> tuple[int, NDArray[np.int64]] | None:
    """Return a dim, and for each slice of a part along it the index of that slice in the whole, -1 if there is none.

    Of several dims the one along which most slices are found counts. None if no dim has slices of the same shape in
    both, or if slices of the whole are too alike to tell them apart.
    """
    found = [(dim, at) for dim in range(part.ndim) for at in _places(part, whole, dim, tolerance)]
    return max(found, key=lambda one: int(np.count_nonzero(one[1] >= 0)), default=None)


def _places(
    part: NDArray[np.float64], whole: NDArray[np.float64], dim: int, tolerance: float
) -> Iterator[NDArray[np.int64]]:
    if part.ndim != whole.ndim or not part.size or not whole.size:
        return
    own, others = _sliced(part, dim), _sliced(whole, dim)
    width = others.shape[1]
    if own.shape[1] != width or width < 2 or len(own) * len(others) * width > MAX_NUMBERS:
        return
    if any(part.shape[other] != whole.shape[other] for other in range(part.ndim) if other != dim):
        return
    near = np.abs(own[:, None, :] - others[None, :, :]).max(axis=2) <= tolerance
    if len(others) > 1 and np.all(near.sum(axis=1) <= 1):
        yield np.where(near.any(axis=1), near.argmax(axis=1), -1)


def _sliced(array: NDArray[Any], dim: int) -> NDArray[Any]:
    return np.moveaxis(array, dim, 0).reshape(array.shape[dim], -1)


def spans(places: Iterable[int]) -> str:
    """Name indices in their order as ranges: `0:6+18:24`."""
    runs = [
        [at for _, at in run] for _, run in groupby(enumerate(map(int, places)), key=lambda pair: pair[1] - pair[0])
    ]
    named = [f"{run[0]}:{run[-1] + 1}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return "+".join(named[:MAX_SPANS]) + ("+..." if len(named) > MAX_SPANS else "")
