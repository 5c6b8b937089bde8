"""Elements placed one by one in narrow types: only if the reference has most values once, and all of them are found.

`lookup` places runs of neighbors. A permuted bias or norm has none left; in a stamped checkpoint all of its values
differ, so that each of them shows where it belongs. Values of other origin are found too, by chance: hence all or none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.reference.windows import UNPLACED

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST = 1 << 16
"""Elements of a tensor in which values are looked up singly: no type that needs it has more values."""

USUAL = 3
"""Bits of a value that hardly vary: weights have the same few exponents."""

ROUNDS = 3
"""The most values in a row that the reference has several times, and that are placed anyway."""

CHANCE = 0.01
"""How likely a tensor of other values may be to pass."""


def singly(local: NDArray[Any], reference: NDArray[Any], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ids completed by single values, unless one of them is not in the reference, or too few are there once.

    Args:
        local: A shard's bits.
        reference: The whole tensor's bits.
        ids: What windows showed: positions from 1, `UNPLACED` if they showed nothing.

    Example:
        >>> singly(np.array([7, 5], "u2"), np.array([5, 6, 7], "u2"), np.zeros(2, np.int64)).tolist()
        [3, 1]
    """
    left = ids == UNPLACED
    if not left.any() or not 0 < reference.size <= MOST:
        return ids
    if (reference.size / 2 ** (8 * reference.itemsize - USUAL)) ** int(left.sum()) > CHANCE:
        return ids
    order = np.argsort(reference, None, kind="stable")
    values, wanted = reference.reshape(-1)[order], local[left]
    low, count = np.searchsorted(values, wanted), np.searchsorted(values, wanted, "right")
    count -= low
    once = count == 1
    places = np.where(once, order[np.minimum(low, len(order) - 1)] + 1, UNPLACED)
    used = np.concatenate([places[once], ids[~left]])
    if (count == 0).any() or 2 * once.sum() < len(once) or len(np.unique(used)) < len(used):
        return ids
    ids = ids.copy()
    ids[left] = places
    return _beside_others(local, reference, ids)


def _beside_others(local: NDArray[Any], reference: NDArray[Any], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Place values that the reference has several times if a neighbor's place says that one of them is."""
    flat, values, whole = ids.reshape(-1), local.reshape(-1), reference.reshape(-1)
    for step in (1, -1):
        for _ in range(ROUNDS):
            known = np.roll(flat, step)
            known[0 if step == 1 else -1] = UNPLACED
            place = np.clip(known + step, 1, len(whole))
            good = (flat == UNPLACED) & (known != UNPLACED) & (whole[place - 1] == values)
            flat = np.where(good, place, flat)
    return flat.reshape(ids.shape)
