"""Where the elements of a tensor come to stand when two of its dims are exchanged."""

from __future__ import annotations

from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    Ids = NDArray[np.int64]


def transpositions(shape: tuple[int, ...]) -> Iterator[tuple[int, int, str, Callable[[Ids], Ids]]]:
    """Yield pairs of dims with the words for how they were exchanged, and what then stands at given places."""
    for first, second in combinations(range(len(shape)), 2):
        swapped = list(shape)
        swapped[first], swapped[second] = swapped[second], swapped[first]
        text = f"view({_listed(swapped)}).transpose({first}, {second})"
        yield first, second, text, partial(_swap, read=shape, stored=tuple(swapped), dims=(first, second))
        text = f"transpose({first}, {second}).reshape({_listed(shape)})"
        yield first, second, text, partial(_swap, read=tuple(swapped), stored=shape, dims=(first, second))


def _swap(at: Ids, read: tuple[int, ...], stored: tuple[int, ...], dims: tuple[int, int]) -> Ids:
    """Return where the element at `at` of a tensor of shape `read` stands in one of shape `stored`, dims exchanged."""
    first, second = dims
    index = list(np.unravel_index(at, read))
    index[first], index[second] = index[second], index[first]
    return np.ravel_multi_index(tuple(index), stored).astype(np.int64)


def _listed(shape: tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, shape))
