"""Elements placed one by one in narrow types: only where the reference has every value once, and all of them are found.

`lookup` places runs of neighbours. A permuted bias or norm has none left; in a stamped checkpoint all of its values
differ, so that each of them shows where it belongs. Values of other origin are found too, by chance: hence all or none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.reference.lookup import UNPLACED

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST = 1 << 16
"""Elements of a tensor in which values are looked up singly: no type that needs it has more values."""

USUAL = 3
"""Bits of a value that hardly vary: weights have the same few exponents."""

CHANCE = 0.01
"""How likely a tensor of other values may be to pass."""


def singly(local: NDArray[Any], reference: NDArray[Any], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ids completed by single values, unless one of them is not found, or is found twice.

    Args:
        local: A shard's bits.
        reference: The whole tensor's bits.
        ids: What windows showed: positions from 1, `UNPLACED` where they showed nothing.

    Example:
        >>> singly(np.array([7, 5], "u2"), np.array([5, 6, 7], "u2"), np.zeros(2, np.int64)).tolist()
        [3, 1]
    """
    left = ids == UNPLACED
    values = np.sort(reference, None) if reference.size <= MOST else reference[:0].reshape(-1)
    if not left.any() or not len(values) or (values[1:] == values[:-1]).any():
        return ids
    if (len(values) / 2 ** (8 * reference.itemsize - USUAL)) ** int(left.sum()) > CHANCE:
        return ids
    order = np.argsort(reference, None)
    at = np.minimum(np.searchsorted(values, local[left]), len(values) - 1)
    found = order[at] + 1
    used = np.concatenate([found, ids[~left]])
    if not (values[at] == local[left]).all() or len(np.unique(used)) < len(used):
        return ids
    ids = ids.copy()
    ids[left] = found
    return ids
