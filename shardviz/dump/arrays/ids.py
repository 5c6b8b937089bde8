"""Runs of ids laid out as arrays, with a limit: a few bytes can stand for gigabytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

ID_NONE = -1
"""Stands in id arrays for a value that is not an id: NaN, a fraction, or beyond every stamp. Zeros stay 0."""

MAX_ELEMENTS = 1 << 26
"""No array of ids longer than this is made from a dump's ranges or runs."""

MAX_OF_ALL = 1 << 27
"""The arrays that all ranks' ranges or runs of one tensor are laid out to are together no longer than this."""

MAX_DENSE = 1 << 28
"""The longest array of ids that is made from dense values beside the JSON."""


def most_ids(num_ranks: int, *, dense: bool) -> int:
    """Return how many ids of one rank are laid out, if so many ranks hold a tensor."""
    return MAX_DENSE if dense else min(MAX_ELEMENTS, MAX_OF_ALL // max(1, num_ranks))


def expand_runs(runs: Iterable[tuple[int, int, int]]) -> NDArray[np.int64]:
    """Lay out runs `(first, step, count)` one after the other."""
    run_list = list(runs)
    ids = np.empty(sum(count for _, _, count in run_list), np.int64)
    start = 0
    for first, step, count in run_list:
        stretch = ids[start : start + count]
        stretch[:] = np.arange(count, dtype=np.int64)
        stretch *= step
        stretch += first
        start += count
    return ids


def whole_ids(values: NDArray[np.generic], last: int) -> NDArray[np.int64]:
    """Return values as ids: 0 for zero, `ID_NONE` for values that aren't integers up to `last`."""
    numbers: NDArray[Any] = values.astype(np.float64) if values.dtype.kind == "f" else values
    if numbers.dtype.kind not in "fiu":
        return np.full(numbers.shape, ID_NONE, np.int64)
    whole = (numbers >= 0) & (numbers <= last) & (np.floor(numbers) == numbers)
    ids = np.full(numbers.shape, ID_NONE, np.int64)
    np.copyto(ids, numbers, casting="unsafe", where=whole)  # np.where would put -1 into numpy 2.5's own unsigned type
    return ids


def own_ids(ids: NDArray[np.int64], first: int, numel: int) -> NDArray[np.int64]:
    """Count ids from 1 within the tensor that starts at `first`; foreign ids become `-1 - id`."""
    is_foreign = (ids > 0) & ((ids < first) | (ids >= first + numel))
    shifted = np.asarray(ids - (first - 1))  # numpy makes a number of the difference of an array without dims
    np.copyto(shifted, ids, where=ids <= 0)
    np.copyto(shifted, -1 - ids, where=is_foreign)
    return shifted
