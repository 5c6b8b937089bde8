"""Find a shard's content in its reference: several neighboring values identify a place.

Values are compared as bits, so that NaN equals itself and no tolerance is guessed. Windows of neighbors along one dim
are looked up (`windows`); pieces shorter than a window are looked for along the other dims, and then value by value.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.reference.windows import MIN_WINDOW, UNPLACED, WINDOW, LineTable, by_windows, only_place
from shardviz.relate.values import part_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from shardviz.layout.region import Region

MAX_SINGLE = 1 << 22
"""The largest reference, in elements, in which single values are looked up."""

FEW_SAMPLES = 3
"""Lines per tensor whose windows are looked up in tensors of other names."""

SINGLE_BYTES = 4
"""Single values of fewer bytes are not looked up: equal ones are found by chance."""

MOSTLY = 1 / 2
"""Where a smaller part of the values that are left is found singly, they are another tensor's, and found by chance."""

FEW_EQUAL = 1 / 8
"""A smaller part of a shard's narrow values that is equal where it is claimed is so by chance."""

MOST = 1 << 16
"""Elements of a tensor in which values are looked up singly: no type that needs it has more values."""

USUAL = 3
"""Bits of a value that hardly vary: weights have the same few exponents."""

ROUNDS = 3
"""The most values in a row that the reference has several times, and that are placed anyway."""

CHANCE = 0.01
"""How likely a tensor of other values may be to pass."""


def bits_of(values: NDArray[Any]) -> NDArray[Any]:
    """Return an array's bits as unsigned integers of the same width.

    Example:
        >>> bits_of(np.array([1.0, -0.0], np.float32)).tolist()
        [1065353216, 2147483648]
    """
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def locate(
    local: NDArray[Any], reference: NDArray[Any], claimed: Region | None = None, *, singly: bool = True
) -> NDArray[np.int64]:
    """Return where each element of a shard is in its reference.

    Args:
        local: The shard's bits, of any shape with the reference's number of dims.
        reference: The whole tensor's bits; may be mapped from a file.
        claimed: The part that the shard claims to be. It is compared first, and is the answer if the same content is
            in several places.
        singly: Whether values without a window are looked up one by one; in another tensor some are found by chance.

    Returns:
        Ids in the local shape: row-major positions in the reference, from 1; `UNPLACED` if the place is not known.

    Example:
        >>> whole = bits_of(np.arange(64, dtype=np.float32).reshape(4, 16))
        >>> locate(whole[2:], whole, Region((((0, 2),), ((0, 16),))))[:, 0].tolist()
        [33, 49]
    """
    if claimed is not None and claimed.shape == local.shape:
        wanted = part_of(reference, claimed)
        expected = claimed.flat_ids(reference.shape) + 1
        if np.array_equal(wanted, local):
            return expected
    else:
        expected = None
    ids = np.zeros(local.shape, np.int64)
    for dim, others in _orientations(local, reference):
        if not (ids == UNPLACED).any():
            break
        places = by_windows(np.moveaxis(local, dim, -1), np.moveaxis(reference, others, -1))
        if places is not None:
            places = np.moveaxis(_in_order(places, reference.shape, others), -1, dim)
            ids = np.where(ids == UNPLACED, places, ids)
    ids = _fill_gaps(local, reference, _one_by_one(local, reference, ids) if singly else ids)
    if expected is not None and (ids == UNPLACED).any():
        equal = (ids == UNPLACED) & (wanted == local)
        # Of narrow values some are equal by chance: a shard of another tensor has no element of this one.
        if local.itemsize >= SINGLE_BYTES or equal.sum() >= FEW_EQUAL * (ids == UNPLACED).sum():
            ids = np.where(equal, expected, ids)
    return ids


def has_windows_of(local: NDArray[Any], reference: NDArray[Any]) -> bool:
    """Whether a reference contains any of a few windows of a shard, before all are looked up."""
    for own, others in _orientations(local, reference):
        lines = np.moveaxis(local, own, -1).reshape(-1, local.shape[own])
        whole = np.moveaxis(reference, others, -1)
        width = min(WINDOW, lines.shape[1], whole.shape[-1])
        if width >= MIN_WINDOW and len(lines):
            table = LineTable(whole.reshape(-1, whole.shape[-1]), width)
            samples = lines[np.unique(np.linspace(0, len(lines) - 1, FEW_SAMPLES).astype(np.int64)), :width]
            if any(only_place(table, sample) >= 0 for sample in samples):
                return True
    return False


def _orientations(local: NDArray[Any], reference: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Yield pairs of dims to cut windows along, of shard and reference, last dims first."""
    if local.ndim != reference.ndim:
        return
    dims = range(local.ndim - 1, -1, -1)
    yield from ((dim, dim) for dim in dims)
    if local.ndim > 1:  # transposed, or each of a stack of experts
        last = local.ndim - 1
        yield from ((last, last - 1), (last - 1, last))


def _in_order(ids: NDArray[np.int64], shape: Sequence[int], dim: int) -> NDArray[np.int64]:
    """Convert positions in a reference with `dim` moved last to positions in the reference."""
    if dim == len(shape) - 1:
        return ids
    moved = np.moveaxis(np.arange(math.prod(shape), dtype=np.int64).reshape(shape), dim, -1).ravel()
    return np.where(ids == UNPLACED, UNPLACED, moved[np.maximum(ids, 1) - 1] + 1)


def _one_by_one(local: NDArray[Any], reference: NDArray[Any], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Place leftover values that are unique in the reference, if most of them are."""
    left = ids == UNPLACED
    if not left.any() or reference.size > MAX_SINGLE or reference.itemsize < SINGLE_BYTES:
        return ids
    values, first, counts = np.unique(reference.ravel(), return_index=True, return_counts=True)
    at = np.minimum(np.searchsorted(values, local[left]), len(values) - 1)
    good = (values[at] == local[left]) & (counts[at] == 1)
    if good.sum() < MOSTLY * good.size:
        return ids
    ids = ids.copy()
    ids[left] = np.where(good, first[at] + 1, UNPLACED)
    return ids


def _fill_gaps(local: NDArray[Any], reference: NDArray[Any], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Fill a shard's gaps as a product of indices, if the reference has the same bits there."""
    gaps = ids == UNPLACED
    if not gaps.any() or gaps.all() or local.ndim != reference.ndim:
        return ids
    places = np.unravel_index(np.maximum(ids, 1) - 1, reference.shape)
    lists = [_indices_along(place, gaps, dim) for dim, place in enumerate(places)]
    if any(found is None for found in lists):
        return ids
    wanted = np.ix_(*(found for found in lists if found is not None))
    whole = np.ravel_multi_index(np.broadcast_arrays(*wanted), reference.shape) + 1
    return np.where(gaps & (reference[wanted] == local), whole, ids)


def _indices_along(place: NDArray[np.intp], gaps: NDArray[np.bool_], dim: int) -> NDArray[np.int64] | None:
    """Return each slice's index along a dim of the reference; None unless each has exactly one."""
    others = tuple(other for other in range(place.ndim) if other != dim)
    low = np.where(gaps, np.iinfo(np.int64).max, place).min(others)
    high = np.where(gaps, -1, place).max(others)
    return np.asarray(high, np.int64) if np.array_equal(low, high) else None


def place_single_values(local: NDArray[Any], reference: NDArray[Any], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ids completed by single values; unchanged if one is absent or too few are unique.

    Args:
        local: A shard's bits.
        reference: The whole tensor's bits.
        ids: What windows showed: positions from 1, `UNPLACED` if they showed nothing.

    Example:
        >>> place_single_values(np.array([7, 5], "u2"), np.array([5, 6, 7], "u2"), np.zeros(2, np.int64)).tolist()
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
    """Place repeated values by their neighbors: the next place in the reference must match."""
    flat, values, whole = ids.reshape(-1), local.reshape(-1), reference.reshape(-1)
    for step in (1, -1):
        for _ in range(ROUNDS):
            known = np.roll(flat, step)
            known[0 if step == 1 else -1] = UNPLACED
            place = np.clip(known + step, 1, len(whole))
            good = (flat == UNPLACED) & (known != UNPLACED) & (whole[place - 1] == values)
            flat = np.where(good, place, flat)
    return flat.reshape(ids.shape)
