"""Activations of one process, with their rows and columns in the order in which the ranks of another job have them.

Rows are the batch's, along the first dim. Columns are the tokens of a sequence, along the second: context parallelism
with a causal mask gives each rank a chunk from the head and one from the tail, or every so many tokens.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.trace.traces import Kept
    from shardviz.layout.mesh import Mesh

    Order = NDArray[np.int64]

MAX_ROWS = 1 << 24
"""No longer tensor is put into the order of another job's rows."""


def in_row_order(whole: Kept, dim: int, parts: Sequence[Kept | None], order: Order) -> Kept:
    """Return a tensor with its rows as the ranks have them, if they share its rows.

    Args:
        whole: One process's.
        dim: The dim of its rows.
        parts: What ranks have of it.
        order: Row `order[i]` of one process is the ranks' row `i`.
    """
    is_shared = len(whole.shape) > dim and _is_shared(whole, parts, dim)
    return _in_order(whole, dim, order) if is_shared else whole


def in_column_order(whole: Kept, parts: Sequence[Kept | None], order: Order) -> Kept:
    """Return a tensor with the tokens of each sequence as the ranks have them, if they share these.

    They stand along the first dim that ranks have a part of and that is as long, or each row's stand behind another's.
    """
    long = [dim for dim, size in enumerate(whole.shape) if size == len(order) and _is_shared(whole, parts, dim)]
    if long:
        return _in_order(whole, long[0], order)
    num_rows, rest = divmod(next(iter(whole.shape), 0), len(order))
    if rest or num_rows < 2 or not _is_shared(whole, parts, 0):
        return whole
    return _in_order(whole, 0, (np.arange(num_rows)[:, None] * len(order) + order).ravel())


def _is_shared(whole: Kept, parts: Sequence[Kept | None], dim: int) -> bool:
    """Whether a rank has less than all along a dim."""
    return any(part is not None and part.shape[dim : dim + 1] < (whole.shape[dim],) for part in parts)


def _in_order(whole: Kept, dim: int, order: Order) -> Kept:
    """Return a tensor with the slices of a dim in another order, of which each may have several indices."""
    size = whole.shape[dim]
    if not len(order) <= size <= MAX_ROWS or size % len(order):
        return whole
    per_slice = size // len(order)
    return whole.reordered((order[:, None] * per_slice + np.arange(per_slice)).ravel(), dim)


def column_orders(length: int, mesh: Mesh) -> Iterator[tuple[Order, int]]:
    """Yield orders in which ranks may share the tokens of a sequence, and among how many ranks: none has one stretch.

    Example:
        >>> from shardviz.layout.mesh import Mesh
        >>> [order.tolist() for order, _ in column_orders(4, Mesh(("cp",), (2,)))]
        [[0, 3, 1, 2], [0, 2, 1, 3]]
    """
    for size in sorted({mesh.size, *mesh.shape} - {1}):
        if length % (2 * size) == 0:
            chunks = np.split(np.arange(length), 2 * size)
            yield np.concatenate([*chain(*((chunks[at], chunks[-1 - at]) for at in range(size)))]), size
        if length % size == 0 and length > size:
            yield np.arange(length).reshape(-1, size).T.ravel(), size
