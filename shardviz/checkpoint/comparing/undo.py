"""What puts the indices of a dim back in order, in torch's own words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.infer.orders import blocks_of, period_of, transposed_digits
from shardviz.checkpoint.comparing.orders import is_long_line
from shardviz.explain.checkpoints.conversion import ReorderedInConversion
from shardviz.relate.orders import orders_of_slices

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Order = NDArray[np.int64]

MOST_WRITTEN = 16
"""Blocks whose order is written out."""


def cause_of_order(before: NDArray[np.generic], after: NDArray[np.generic]) -> ReorderedInConversion | None:
    """Return what reordered one dim, with its undoing; None if it is not one dim, or in no short words."""
    if before.shape != after.shape or is_long_line(before) or (orders := orders_of_slices(before, after)) is None:
        return None
    odd = [(dim, order) for dim, order in enumerate(orders) if not np.array_equal(order, np.arange(len(order)))]
    if len(odd) != 1 or not np.array_equal(np.sort(odd[0][1]), np.arange(len(odd[0][1]))):
        return None
    named = _undone(odd[0][1], odd[0][0])
    return ReorderedInConversion(*named) if named is not None else None


def _undone(order: Order, dim: int) -> tuple[str, str] | None:
    """Return the kind of an order and the call that undoes it on a tensor w."""
    size = len(order)
    if np.array_equal(order, np.arange(size)[::-1]):
        return "flip", f"w.flip({dim})"
    if np.array_equal(order, (np.arange(size) + order[0]) % size):
        by = int(order[0])
        return "halves" if 2 * by == size else "roll", f"w.roll({by if 2 * by <= size else by - size}, {dim})"
    if (digits := transposed_digits(order)) is not None:
        outer, rows, columns, inner = digits
        kind = "rotary" if outer > 1 and inner == 1 and 2 in (rows, columns) else "blocks"
        view = f"w.unflatten({dim}, ({outer}, {columns}, {rows}, {inner}))"
        return kind, f"{view}.transpose({dim + 1}, {dim + 2}).flatten({dim}, {dim + 3})"
    period = period_of(order)
    if period < size and (within := _undone(order[:period], dim + 1)) is not None:
        return within[0], f"w.unflatten({dim}, (-1, {period})){within[1].removeprefix('w')}.flatten({dim}, {dim + 1})"
    _, blocks = blocks_of(order)
    if len(blocks) > MOST_WRITTEN:
        return None
    places = ", ".join(map(str, np.argsort(blocks).tolist()))
    chosen = f".index_select({dim}, torch.tensor([{places}]))"
    return "blocks", f"w.unflatten({dim}, ({len(blocks)}, -1)){chosen}.flatten({dim}, {dim + 1})"
