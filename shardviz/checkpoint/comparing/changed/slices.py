"""The order of each dim's slices in another tensor, in little memory: by hashes that no order within one changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.checkpoint.comparing.agreement import BLOCK
from shardviz.reference.windows import mixed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


def orders_of_slices(before: NDArray[Any], after: NDArray[Any]) -> list[NDArray[np.int64]] | None:
    """Return which slices of one tensor another one is made of, dim by dim; None where it is not just that.

    Args:
        before: The bits of the one.
        after: Those of the other, of the same shape with at least one dim.

    Returns:
        For each dim an order with which `before[np.ix_(*orders)]` is the other; slices that are alike keep their order.

    Example:
        >>> before = np.arange(6, dtype=np.uint32).reshape(3, 2)
        >>> [order.tolist() for order in orders_of_slices(before, before[[2, 0, 1]])]
        [[2, 0, 1], [0, 1]]
    """
    long = [dim for dim, size in enumerate(before.shape) if size > 1]
    if len(long) < before.ndim:
        orders = orders_of_slices(before.squeeze(), after.squeeze()) if long else None
        rest = iter(orders or ())
        return None if orders is None else [next(rest) if dim in long else np.arange(1) for dim in range(before.ndim)]
    found = [_matched(*hashes) for hashes in zip(_hashes(before), _hashes(after), strict=True)]
    orders = [order for order in found if order is not None]
    return orders if len(orders) == len(found) and _is_made_of(before, after, orders) else None


def _hashes(bits: NDArray[Any]) -> list[NDArray[np.uint64]]:
    """Return a hash of each slice along each dim: the sum of its values' hashes."""
    hashes = [np.zeros(size, np.uint64) for size in bits.shape]
    dims = range(bits.ndim)
    for rows in _blocks(bits):
        values = mixed(bits[rows].astype(np.uint64) + np.uint64(1))
        for dim in dims:
            sums = values.sum(axis=tuple(other for other in dims if other != dim), dtype=np.uint64)
            if dim:
                hashes[dim] += sums
            else:
                hashes[0][rows] = sums
    return hashes


def _blocks(bits: NDArray[Any]) -> Iterator[slice]:
    step = max(BLOCK * len(bits) // max(bits.size, 1), 1)
    for start in range(0, len(bits), step):
        yield slice(start, min(start + step, len(bits)))


def _matched(before: NDArray[np.uint64], after: NDArray[np.uint64]) -> NDArray[np.int64] | None:
    """Return where each hash stands among others, equal ones in their order; None where they are not the same."""
    if np.array_equal(before, after):
        return np.arange(len(before))
    order, other = np.argsort(before, kind="stable"), np.argsort(after, kind="stable")
    if not np.array_equal(before[order], after[other]):
        return None
    places = np.empty(len(order), np.int64)
    places[other] = order
    return places


def _is_made_of(before: NDArray[Any], after: NDArray[Any], orders: list[NDArray[np.int64]]) -> bool:
    first, *others = orders
    return all(np.array_equal(before[np.ix_(first[rows], *others)], after[rows]) for rows in _blocks(after))
