"""What a dim's order is called: read off the index that each of its places holds.

The shortest period is looked at before an order is called irregular: the rows of every head, of every group or of every
shard may be in one and the same order of their own.
"""

from __future__ import annotations

from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.case import Fit
from shardviz.explain.placement.order import (
    AsText,
    Blocks,
    Disorder,
    Grouped,
    Interleaved,
    OneShard,
    PermutedDim,
    ReversedDim,
    Rotary,
    RotatedDim,
    WithinShards,
)
from shardviz.explain.placement.splits import PermutedRanks, Segments
from shardviz.layout.region import Ranges, Region, indices, length
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Coord

    Order = NDArray[np.int64]
    Named = tuple[Disorder, str]
    Ids = NDArray[np.int64]

MAX_LISTED = 8

MAX_UNDONE = 16
"""The fix lists the index that undoes an order of no more places than this."""

MAX_DIGITS = 5
"""Dims of a view whose permutation is recognized."""

FIRST_OF_TWO_DIGITS = 10
"""From ten on, names sorted as text are not in the order of their numbers."""


def name_order(order: Order, dim: int, shards: Sequence[tuple[int, int]] = ()) -> Named:
    """Return the disorder that a dim's order is, and the words for it.

    Args:
        order: The index that each place of the dim holds: all of them once, not in order.
        shards: The stretches of the dim that ranks claim; empty if they claim several each.
    """
    regular = _name_rule(order, dim)
    if regular is not None:
        return regular
    period = period_of(order)
    if period < len(order):
        return _name_period(order[:period], dim, shards)
    if len(shards) > 1 and all(
        int(order[start:stop].min()) >= start and int(order[start:stop].max()) < stop for start, stop in shards
    ):
        return _name_within(order, dim, shards)
    block, blocks = blocks_of(order)
    cause = Blocks() if len(blocks) <= MAX_LISTED else PermutedDim()
    words = f"dim {dim}'s {_pieces(block)} come in the order {_order_text(blocks)}"
    digits = permuted_digits(order) if isinstance(cause, PermutedDim) else None
    if digits is not None:
        words += f": view({', '.join(map(str, digits[0]))}).permute({', '.join(map(str, digits[1]))})"
    return cause, words


def _name_rule(order: Order, dim: int) -> Named | None:
    """Name an order that is a rule of the index."""
    size = len(order)
    if np.array_equal(order, np.arange(size)[::-1]):
        return ReversedDim(dim), f"dim {dim} is reversed"
    if np.array_equal(order, (np.arange(size) + order[0]) % size):
        first = int(order[0])
        if 2 * first == size:
            return Blocks(), f"dim {dim}'s halves are exchanged"
        undo = first if 2 * first < size else first - size
        return RotatedDim(undo, dim), f"dim {dim} is rolled by {-undo}"
    if (text := as_text(order)) is not None:
        blocks = order[order % text == 0] // text
        words = f"dim {dim}'s {_pieces(text)} are in the order of their numbers as text: {_order_text(blocks)}"
        return AsText(), words
    digits = transposed_digits(order)
    return _name_digits(dim, order, *digits) if digits is not None else None


def as_text(order: Order) -> int | None:
    """Return the size of blocks whose numbers were sorted as text; None if none were.

    Numbers count from 0 or from 1. The block with the highest number may be shorter.
    """
    bends = np.flatnonzero(np.diff(order) != 1)
    if order[0] != 0 or not len(bends):
        return None
    run = int(bends[0]) + 1
    for start, block in ((0, run // 2), (1, run)):
        count = -(-len(order) // block) if block else 0
        if count + start > FIRST_OF_TWO_DIGITS:
            blocks = np.array(sorted(range(start, start + count), key=str)) - start
            every = (blocks[:, None] * block + np.arange(block)).ravel()
            if np.array_equal(order, every[every < len(order)]):
                return block
    return None


def period_of(order: Order) -> int:
    """Return the smallest period after which an order repeats; its length if it never does."""
    size = len(order)
    for count in range(size // 2, 1, -1):
        period, remainder = divmod(size, count)
        if not remainder and np.array_equal(order[period:], order[:-period] + period):
            return period
    return size


def _name_period(order: Order, dim: int, shards: Sequence[tuple[int, int]]) -> Named:
    """Name the order that all groups of so many indices have."""
    size = len(order)
    regular = _name_rule(order, dim)
    block, blocks = blocks_of(order)
    what = f"dim {dim}'s blocks of {block} come" if block > 1 else f"dim {dim} comes"
    words = regular[1] if regular is not None else f"{what} in the order [{_order_text(blocks, ', ')}]"
    group = " (the shard of a rank)" if {stop - start for start, stop in shards} == {size} else ""
    inverse = order.argsort().tolist()
    index = f"torch.tensor({inverse})" if size <= MAX_UNDONE else f"the inverse of the order of {size} indices"
    undo = f"weight.unflatten({dim}, (-1, {size})).index_select({dim + 1}, {index}).flatten({dim}, {dim + 1})"
    return Grouped(undo), f"within every {size} indices{group}, {words}"


def _name_within(order: Order, dim: int, shards: Sequence[tuple[int, int]]) -> Named:
    """Name an order that keeps indices within their shards, by one rule for all if there is one."""
    odd = [(start, stop) for start, stop in shards if np.any(np.diff(order[start:stop]) != 1)]
    inner_orders = sorted((order[start:stop] - start for start, stop in odd), key=len, reverse=True)
    which = f"shard{'s' * (len(odd) > 1)} {listed((f'[{start}:{stop}]' for start, stop in odd), MAX_LISTED)}"
    cause: Disorder = OneShard() if len(odd) == 1 else WithinShards(is_alike=True)
    words = _rule_of_all(inner_orders, dim)
    if not words:
        cause = WithinShards(is_alike=False)
        words = f"dim {dim} is reordered, by another order on each: {_order_text(order[slice(*odd[0])])} in the first"
    are_all_read = sum(stop - start for start, stop in shards) == len(order)
    if len(odd) == sum(stop - start > 1 for start, stop in shards):
        return cause, f"within every shard{'' if are_all_read else ' that was read'}, {words}"
    others = "the other is in order" if len(shards) - len(odd) == 1 else "the others are in order"
    count = len(odd) if len(odd) > 1 else "one"
    which += f", {count} of {len(shards)}{'' if are_all_read else ' that were read'}"
    return cause, f"within {which}, {words}; {others}"


def _rule_of_all(orders: Sequence[Order], dim: int) -> str:
    """Name the one rule by which all shards are out of order; empty if there isn't one.

    A shard of two indices that are exchanged is reversed, rolled, and has its halves exchanged; an odd one has none.
    """
    named = {name_order(order, dim)[1] for order in orders}
    if len(named) == 1:
        return named.pop()
    first, size = int(orders[0][0]), len(orders[0])
    rules: dict[str, Callable[[Order], Order]] = {
        f"dim {dim} is reversed": lambda at: at[::-1],
        f"dim {dim}'s halves are exchanged": lambda at: np.roll(at, 0 if len(at) % 2 else len(at) // 2),
    }
    for count in sorted((-first, size - first), key=abs):
        rules[f"dim {dim} is rolled by {count}"] = partial(np.roll, shift=count)
    for words, rule in rules.items():
        if all(np.array_equal(rule(np.arange(len(order))), order) for order in orders):
            return words
    return ""


def transposed_digits(order: Order) -> tuple[int, int, int, int] | None:
    """Recognize `view(a, b, c, d).transpose(1, 2)` of a dim's own order.

    Returns:
        (a, b, c, d), read off the order: d is how long the first run is, c the step to the next one in runs, b how
        many steps it takes to come back; None if the whole order is not so.
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
    expected = np.arange(size).reshape(outer, rows, columns, inner).swapaxes(1, 2).ravel()
    return (outer, rows, columns, inner) if np.array_equal(order, expected) else None


def segments_of_parts(order: Order) -> tuple[int, tuple[int, ...]] | None:
    """Recognize parts that are joined whole, where each is made of segments that belong together.

    Returns:
        How many parts there are, and how long each segment of a part is; None if the order is not so.
    """
    starts = np.concatenate(([0], np.flatnonzero(np.diff(order) != 1) + 1))
    sizes = np.diff(np.append(starts, len(order)))
    for count in (count for count in range(2, len(sizes) // 2 + 1) if len(sizes) % count == 0):
        by_part = sizes.reshape(count, -1)
        segments, begins = by_part[0], np.concatenate(([0], np.cumsum(by_part.sum(0))[:-1]))
        expected = begins + np.arange(count)[:, None] * segments
        if np.all(by_part == segments) and np.array_equal(order[starts].reshape(count, -1), expected):
            return count, tuple(segments.tolist())
    return None


def permuted_digits(order: Order) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Recognize a dim's view with permuted dims, such as `view(2, 48, 2).permute(2, 1, 0)`.

    The number of each place counts up in digits, the last one fastest, and each digit has a step of its own. The steps
    are read off from the inside to the outside; sorted, they must be those of a view.

    Returns:
        The shape of the view and the order of its dims; None if the order is not so.
    """
    digits: list[tuple[int, int]] = []  # how many, and the step
    digits_left = order
    while len(digits_left) > 1:
        bends = np.flatnonzero(np.diff(digits_left) != digits_left[1] - digits_left[0])
        count = int(bends[0]) + 1 if len(bends) else len(digits_left)
        if len(digits_left) % count or count == 1 or len(digits) == MAX_DIGITS:
            return None
        digits.insert(0, (count, int(digits_left[1] - digits_left[0])))
        digits_left = digits_left[::count]
    by_step = sorted(range(len(digits)), key=lambda at: -digits[at][1])
    shape = tuple(digits[at][0] for at in by_step)
    axes = tuple(by_step.index(at) for at in range(len(digits)))
    expected = np.arange(len(order)).reshape(shape).transpose(axes).ravel()
    return (shape, axes) if np.array_equal(order, expected) else None


def _name_digits(dim: int, order: Order, outer: int, rows: int, columns: int, inner: int) -> Named:
    view = f"view({outer}, {rows}, {columns}, {inner}).transpose(1, 2)"
    words = f"dim {dim} is in the order of {view}: its {_pieces(inner)} come as {_order_text(order[::inner] // inner)}"
    indices_in_order = f"torch.arange({len(order)}).view({outer}, {columns}, {rows}, {inner}).transpose(1, 2).flatten()"
    undo = f"weight.index_select({dim}, {indices_in_order})"
    is_rotary = outer > 1 and inner == 1 and 2 in (rows, columns)
    return (Rotary(undo) if is_rotary else Interleaved(undo)), words


def blocks_of(order: Order) -> tuple[int, Order]:
    """Return the largest block that is moved whole, and the order in which such blocks come."""
    bends = np.flatnonzero(np.diff(order) != 1) + 1
    block = int(np.gcd.reduce(np.concatenate((bends, order[bends], order[:1], [len(order)]))))
    return block, order[::block] // block


def _pieces(block: int) -> str:
    return "indices" if block == 1 else f"blocks of {block}"


def _order_text(order: Order, between: str = " ") -> str:
    """Write an order's first indices; if those are in order, the indices where it breaks."""
    bends = np.flatnonzero(np.diff(order) != 1)
    start = int(bends[0]) if len(bends) and bends[0] >= MAX_LISTED - 1 else 0
    shown = [*([order[0], "..."] if start else []), *order[start : start + MAX_LISTED].tolist()]
    return between.join(map(str, [*shown, *(["..."] if start + MAX_LISTED < len(order) else [])]))


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


def explain_dims(claimed: Layout, held: Mapping[Coord, Region], *, besides: Sequence[Fit]) -> Iterator[Fit]:
    """Yield the explanation, if it holds, that dims hold their own indices in another order.

    Args:
        claimed: What the placements say.
        held: What each known coordinate holds.
        besides: What explains the same by shards that moved. Then a dim's order is only given if it is one that
            loaders make: a few segments exchanged, or single rows dealt out in twos.
    """
    named = []
    for dim, size in enumerate(claimed.index_shape):
        pairs = {(claimed.region(coord).dims[dim], region.dims[dim]) for coord, region in held.items() if region.size}
        if all(places == contents for places, contents in pairs):
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
    """Whether loaders make such an order: few segments, rotary conventions or fused halves."""
    if len(blocks_of(order)[1]) <= FEW_SEGMENTS:
        return True
    outer, rows, columns, inner = transposed_digits(order) or (0, 0, 0, 0)
    if not isinstance(rival, SHARDS_OR_ROWS) or inner != 1 or 2 not in (rows, columns) or rows * columns < LEAST_HEAD:
        return False
    return outer > 1 or isinstance(rival, PermutedRanks)


def _order_of_dim(pairs: Pairs, size: int) -> NDArray[np.int64] | None:
    """Return the index that each place of a dim holds; None if ranks disagree or one repeats.

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


def transpositions(shape: tuple[int, ...]) -> Iterator[tuple[int, int, str, Callable[[Ids], Ids]]]:
    """Yield pairs of dims, the code that exchanges them, and what then stands at given places."""
    for first, second in combinations(range(len(shape)), 2):
        swapped = list(shape)
        swapped[first], swapped[second] = swapped[second], swapped[first]
        text = f"view({_sizes(swapped)}).transpose({first}, {second})"
        yield first, second, text, partial(_swap, read=shape, stored=tuple(swapped), dims=(first, second))
        text = f"transpose({first}, {second}).reshape({_sizes(shape)})"
        yield first, second, text, partial(_swap, read=tuple(swapped), stored=shape, dims=(first, second))


def _swap(at: Ids, read: tuple[int, ...], stored: tuple[int, ...], dims: tuple[int, int]) -> Ids:
    """Return the place of element `at` of shape `read` in shape `stored`, with dims exchanged."""
    first, second = dims
    index = list(np.unravel_index(at, read))
    index[first], index[second] = index[second], index[first]
    return np.ravel_multi_index(tuple(index), stored).astype(np.int64)


def _sizes(shape: tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, shape))
