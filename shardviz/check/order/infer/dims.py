"""The shards are placed as claimed, but a dim was reordered before it was split: which order, read off its indices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.infer.fit import Fit
from shardviz.check.order.infer.orders import blocks_of, name_order, transposed_digits
from shardviz.explain.splits import PermutedRanks, Segments
from shardviz.layout.region import Ranges, indices, length

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.explain.order import Disorder
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Coord
    from shardviz.layout.region import Region

MAX_SIZE = 1 << 24
"""A dim of more indices than this is not laid out."""

FEW_SEGMENTS = 3
"""Whole shards that are exchanged are blocks of a dim in another order too; as few as q, k and v may be just that."""

SHARDS_OR_ROWS = (PermutedRanks, Segments)
"""What rows in another order look like if a shard, or a rank's part of a segment, is a single row."""

LEAST_HEAD = 8
"""In an order that repeats after fewer rows than this, four ranks or segments may as well stand in another order."""

Pairs = set[tuple[Ranges, Ranges]]
"""For places in a dim, what is held there."""


def explain_dims(claimed: Layout, held: Mapping[Coord, Region], *, besides: Sequence[Fit] = ()) -> Iterator[Fit]:
    """Yield the one explanation there is if every dim of the tensor is its own indices in another order.

    Args:
        claimed: What the placements say.
        held: What each known coordinate holds.
        besides: What explains the same by shards that moved. Then a dim's order is only given if it is one that
            loaders make: a few segments exchanged, or single rows dealt out in twos.
    """
    named = []
    for dim, size in enumerate(claimed.index_shape):
        pairs = _pairs(claimed, held, dim)
        if _in_order(pairs, size):
            continue
        order = _order_of_dim(pairs, size) if size <= MAX_SIZE else None
        if order is None:
            return
        if not np.array_equal(order, np.arange(size)):
            if besides and not _is_made_by_loaders(order, besides[0].cause):
                return
            named.append(name_order(order, dim, _shards(pairs)))
    if not named:
        return
    words = " and ".join(words for _, words in named)
    yield Fit(named[0][0], words, words)


def _is_made_by_loaders(order: NDArray[np.int64], rival: Disorder) -> bool:
    """Whether an order is that of a few segments, or of rows that the rotary conventions or fused halves deal out."""
    if len(blocks_of(order)[1]) <= FEW_SEGMENTS:
        return True
    outer, rows, columns, inner = transposed_digits(order) or (0, 0, 0, 0)
    if not isinstance(rival, SHARDS_OR_ROWS) or inner != 1 or 2 not in (rows, columns) or rows * columns < LEAST_HEAD:
        return False
    return outer > 1 or isinstance(rival, PermutedRanks)


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
    """Return the index that each place of a dim holds; None if ranks disagree or an index comes twice.

    If all shards that were read have their own indices, the places of the others count as in order.
    """
    order = np.full(size, -1, np.int64)
    for places, contents in pairs:
        if length(places) != length(contents):
            return None
        at, contained = indices(places), indices(contents)
        if np.any((order[at] >= 0) & (order[at] != contained)):
            return None
        order[at] = contained
    if all(np.array_equal(np.sort(indices(places)), np.sort(indices(contents))) for places, contents in pairs):
        order = np.where(order < 0, np.arange(size), order)
    return order if np.array_equal(np.sort(order), np.arange(size)) else None


def _shards(pairs: Pairs) -> list[tuple[int, int]]:
    """Return the stretches of a dim that ranks claim; empty if one claims several."""
    if any(len(places) > 1 for places, _ in pairs):
        return []
    return sorted({places[0] for places, _ in pairs if places})
