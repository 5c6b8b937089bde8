"""The shards are placed as claimed, but a dim was reordered before it was split: which order, read off its indices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.advice import CATALOGUE
from shardviz.check.order.infer.explanation import Disorder, Explanation
from shardviz.layout.region import Ranges, indices, length

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Coord
    from shardviz.layout.region import Region

MAX_LISTED = 8

MAX_SIZE = 1 << 24
"""A dim of more indices than this is not laid out."""

Pairs = set[tuple[Ranges, Ranges]]
"""For places in a dim, what is held there."""


def explain_dims(
    claimed: Layout, held: Mapping[Coord, Region], *, most_blocks: int | None = None
) -> Iterator[Explanation]:
    """Yield the one explanation there is if every dim of the tensor is its own indices in another order.

    Args:
        claimed: What the placements say.
        held: What each known coordinate holds.
        most_blocks: Pass over orders that move more blocks than this.
    """
    found = []
    for dim, size in enumerate(claimed.index_shape):
        pairs = _pairs(claimed, held, dim)
        if _in_order(pairs, size):
            continue
        order = _order_of_dim(pairs, size) if size <= MAX_SIZE else None
        if order is None:
            return
        if not np.array_equal(order, np.arange(size)):
            if most_blocks is not None and len(_blocks(order)[1]) > most_blocks:
                return
            found.append(_name(order, dim))
    if not found:
        return
    name, _, fix = found[0]
    words = " and ".join(words for _, words, _ in found)
    yield Explanation(name, f"the shards are in place, but {words}", fix, words)


def _pairs(claimed: Layout, held: Mapping[Coord, Region], dim: int) -> Pairs:
    """Return where ranks claim to hold indices of a dim, each with what they hold there."""
    return {(claimed.region(coord).dims[dim], region.dims[dim]) for coord, region in held.items() if region.size}


def _in_order(pairs: Pairs, size: int) -> bool:
    """Whether every place of a dim holds its own index, found without laying them out."""
    reached = 0
    for start, stop in sorted(range_ for places, _ in pairs for range_ in places):
        if start > reached:
            return False
        reached = max(reached, stop)
    return reached == size and all(places == contents for places, contents in pairs)


def _order_of_dim(pairs: Pairs, size: int) -> NDArray[np.int64] | None:
    """Return the index that each place of a dim holds; None where ranks disagree or an index comes twice."""
    order = np.full(size, -1, np.int64)
    for places, contents in pairs:
        if length(places) != length(contents):
            return None
        at, found = indices(places), indices(contents)
        if np.any((order[at] >= 0) & (order[at] != found)):
            return None
        order[at] = found
    return order if np.array_equal(np.sort(order), np.arange(size)) else None


def _name(order: NDArray[np.int64], dim: int) -> tuple[Disorder, str, str]:
    """Return the disorder that a dim's order is, the words for it, and its fix."""
    size = len(order)
    if np.array_equal(order, np.arange(size)[::-1]):
        return "reversed-dim", f"dim {dim} is flipped", CATALOGUE["reversed-dim"].fix.format(dim=dim)
    if np.array_equal(order, (np.arange(size) + order[0]) % size):
        if 2 * order[0] == size:
            return "blocks", f"dim {dim}'s halves are exchanged", CATALOGUE["blocks"].fix
        words = f"dim {dim} is rolled by {-order[0] % size}"
        return "rotated-dim", words, CATALOGUE["rotated-dim"].fix.format(undo=int(order[0]), dim=dim)
    digits = transposed_digits(order)
    if digits is not None:
        return _name_digits(dim, order, *digits)
    block, blocks = _blocks(order)
    name: Disorder = "blocks" if len(blocks) <= MAX_LISTED else "permuted-dim"
    words = f"dim {dim}'s blocks of {block} come in the order {_listed(blocks)}"
    return name, words, CATALOGUE[name].fix


def transposed_digits(order: NDArray[np.int64]) -> tuple[int, int, int, int] | None:
    """Recognise `view(a, b, c, d).transpose(1, 2)` of a dim's own order.

    Returns:
        (a, b, c, d), read off the order: d is how long the first run is, c the step to the next one in runs, b how
        many steps it takes to come back; None where the whole order is not so.
    """
    size = len(order)
    bends = np.flatnonzero(np.diff(order) != 1)
    if order[0] != 0 or not len(bends):
        return None
    inner = int(bends[0]) + 1
    if size % inner:
        return None
    steps = order[::inner] // inner
    columns = int(steps[1])
    back = np.flatnonzero(steps == 1)
    rows = int(back[0]) if len(back) else 0
    if columns < 2 or rows < 2 or size % (rows * columns * inner):
        return None
    outer = size // (rows * columns * inner)
    wanted = np.arange(size).reshape(outer, rows, columns, inner).swapaxes(1, 2).ravel()
    return (outer, rows, columns, inner) if np.array_equal(order, wanted) else None


def _name_digits(
    dim: int, order: NDArray[np.int64], outer: int, rows: int, columns: int, inner: int
) -> tuple[Disorder, str, str]:
    name: Disorder = "rotary" if outer > 1 and inner == 1 and 2 in (rows, columns) else "interleaved"
    view = f"view({outer}, {rows}, {columns}, {inner}).transpose(1, 2)"
    pieces = "indices" if inner == 1 else f"blocks of {inner}"
    words = f"dim {dim} is in the order of {view}: its {pieces} come back {_listed(order[::inner] // inner)}"
    indices_in_order = f"torch.arange({len(order)}).view({outer}, {columns}, {rows}, {inner}).transpose(1, 2).flatten()"
    return name, words, CATALOGUE[name].fix.format(undo=f"weight.index_select({dim}, {indices_in_order})")


def _blocks(order: NDArray[np.int64]) -> tuple[int, NDArray[np.int64]]:
    """Return the largest block that is moved whole, and the order in which such blocks come."""
    bends = np.flatnonzero(np.diff(order) != 1) + 1
    block = int(np.gcd.reduce(np.concatenate((bends, order[bends], order[:1], [len(order)]))))
    return block, order[::block] // block


def _listed(order: NDArray[np.int64]) -> str:
    return " ".join(map(str, order[:MAX_LISTED].tolist())) + (" ..." if len(order) > MAX_LISTED else "")
