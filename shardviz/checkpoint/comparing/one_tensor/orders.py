"""What was done to a tensor's elements between two checkpoints, named, and what undoes it.

It is read off where each element of the one is in the other; the names are those that a check of a dump gives. Of large
tensors it is the order of long stretches, found in little memory: a window of neighbors is looked for, and what follows
it is compared for as long as it is equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.check.order.infer.orders import (
    as_text,
    blocks_of,
    name_order,
    period_of,
    segments_of_parts,
    transposed_digits,
    transpositions,
)
from shardviz.explain.checkpoints.conversion import OneShardRepeated, ReorderedInConversion
from shardviz.layout.region import gaps_in, length
from shardviz.reference.lookup import UNPLACED, locate
from shardviz.relate.orders import orders_of_slices
from shardviz.relate.values import BLOCK, is_alike
from shardviz.text import join_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardviz.checkpoint.records import StoredTensor
    from shardviz.explain.cause import Cause

    Order = NDArray[np.int64]

MAX_LOCATED = 1 << 22
"""Elements of a tensor whose places are looked for one by one: that takes twenty times its memory."""

LOW = np.uint16
"""The low bits of a value: most values that are not looked for have others."""

SAMPLES = 1024
"""Values of a tensor that are looked for in another, before all are."""

MAX_SHARDS = 16
"""Saved shards whose order is written out."""

MAX_PERMUTED = 4
"""Dims of a tensor whose dims are exchanged in every way."""

WINDOW = 16
"""Neighbors that are looked for."""

MAX_STRETCHES = 64
"""Stretches that are followed: each takes a pass over the tensor."""

MAX_LISTED = 16

MOST_WRITTEN = 16
"""Blocks whose order is written out."""


def name_change(before: NDArray[Any], after: NDArray[Any], cuts: tuple[StoredTensor, ...] = ()) -> str:
    """Name the reordering between two tensors of one size; empty if there isn't one.

    Args:
        before: Its bits in the first checkpoint.
        after: Its bits in the second.
        cuts: The tensors, whose chunks say what ranks held.
    """
    if before.size != after.size or is_alike(before) or is_alike(after):
        return ""
    if before.shape != after.shape and np.array_equal(before.reshape(-1), after.reshape(-1)):
        return f"reshaped from {list(before.shape)} to {list(after.shape)}, in the same order"
    if (axes := _dim_order(before, after)) is not None:
        return f"its dims are exchanged: permute({', '.join(map(str, axes))})"
    if before.shape != after.shape or not _shares_values(before, after):
        return ""
    if is_long_line(before):
        return name_stretches(before, after)
    if (orders := orders_of_slices(before, after)) is not None:
        return _words_of(orders, before.shape, cuts)
    return _by_transposition(before, after) or _by_places(before, after, cuts)


def is_long_line(array: NDArray[Any]) -> bool:
    """Whether a tensor is one long line, whose order would take as much memory as the places of its elements."""
    return array.size > MAX_LOCATED and max(array.shape) == array.size


def _by_places(before: NDArray[Any], after: NDArray[Any], cuts: tuple[StoredTensor, ...]) -> str:
    """Name an order by the place of every element; in a large tensor only long stretches."""
    if before.size > MAX_LOCATED:
        return name_stretches(before, after)
    ids = locate(after, before)
    if (ids == UNPLACED).any():
        return ""
    return _by_dims(ids, before.shape, cuts) or _by_stretches(ids.ravel(), before.shape)


def _shares_values(before: NDArray[Any], after: NDArray[Any]) -> bool:
    """Whether a tensor has a sample of a second one's values, which takes little memory."""
    places = np.linspace(0, after.size - 1, SAMPLES).astype(np.int64)
    sample = np.unique(after[np.unravel_index(places, after.shape)])
    like = np.zeros(1 << 16, np.bool_)
    like[sample.astype(LOW)] = True
    is_present = np.zeros(len(sample), np.bool_)
    flat = before.reshape(-1)
    for at in range(0, flat.size, BLOCK):
        block = flat[at : at + BLOCK]
        is_present |= np.isin(sample, block[like[block.astype(LOW)]])
    return bool(is_present.all())


def _dim_order(before: NDArray[Any], after: NDArray[Any]) -> tuple[int, ...] | None:
    """Return the order of dims that makes one of the other; None if none does."""
    if not 2 <= before.ndim <= MAX_PERMUTED:
        return None
    for axes in list(permutations(range(before.ndim)))[1:]:
        if tuple(before.shape[axis] for axis in axes) == after.shape and np.array_equal(before.transpose(axes), after):
            return axes
    return None


def _by_dims(ids: NDArray[np.int64], shape: tuple[int, ...], cuts: tuple[StoredTensor, ...]) -> str:
    """Name the order along each dim; empty if elements are not permuted dim by dim."""
    orders = [_order_along(ids, shape, dim) for dim in range(len(shape))]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    expected: NDArray[np.int64] = np.ones((), np.int64)
    for order, stride in zip(orders, strides, strict=True):
        expected = np.add.outer(expected, order * stride)
    return _words_of(orders, shape, cuts) if np.array_equal(expected, ids) else ""


def _words_of(orders: Sequence[NDArray[np.int64]], shape: tuple[int, ...], cuts: tuple[StoredTensor, ...]) -> str:
    words = []
    for dim, order in enumerate(orders):
        if np.array_equal(np.sort(order), np.arange(shape[dim])):
            if not np.array_equal(order, np.arange(shape[dim])):
                words.append(_name_order(order, dim, cuts))
        else:
            words.append(_name_repeats(order, dim))
    return " and ".join(words)


def _name_repeats(order: NDArray[np.int64], dim: int) -> str:
    """Say which indices of a dim are lost, and which are there several times."""
    counts = np.bincount(order, minlength=len(order))
    again, lost = (join_numbers(np.flatnonzero(some).tolist()) for some in (counts > 1, counts == 0))
    most = int(counts.max())
    times = "several times" if (counts[counts > 1] != most).any() else "twice" if most == 2 else f"{most} times"
    words = f"dim {dim} has only {int((counts > 0).sum()):,} of its {len(order):,} indices: {again} {times}, "
    words += f"{lost} never"
    return words


def _order_along(ids: NDArray[np.int64], shape: tuple[int, ...], dim: int) -> NDArray[np.int64]:
    line = ids[tuple(slice(None) if other == dim else 0 for other in range(len(shape)))]
    order: NDArray[np.int64] = (line - 1) // math.prod(shape[dim + 1 :]) % shape[dim]
    return order


def _name_order(order: NDArray[np.int64], dim: int, cuts: tuple[StoredTensor, ...]) -> str:
    stretches = next((spans for cut in cuts if len(spans := _spans_of_chunks(cut, dim)) > 1), [])
    shards = _order_of_shards(order, stretches)
    _, words = name_order(order, dim, stretches)
    if shards:
        numbers = " ".join(map(str, shards[:MAX_SHARDS])) + " ..." * (len(shards) > MAX_SHARDS)
        words = f"the {len(shards)} shards that were saved of dim {dim} come in the order {numbers}"
    digits = transposed_digits(order)
    if digits is not None and (name := _usual_reason(*digits)):
        words += name
    elif digits is not None and digits[0] == 1:
        words += (
            f": {digits[1] * digits[2]} shards joined in this order, or the shards of {digits[2]} ranks with "
            f"{digits[1]} parts each, or of {digits[1]} ranks with {digits[2]}"
        )
    return words


def _usual_reason(outer: int, rows: int, columns: int, inner: int) -> str:
    """Say what makes such an order of single indices; empty if nothing is known to."""
    if inner != 1 or 2 not in (rows, columns):
        return ""
    if outer > 1:
        size, way = 2 * max(rows, columns), "pairs to halves" if columns == 2 else "halves to pairs"
        return f", as rotary embeddings' rows in heads of {size} go from {way}"
    if rows == columns:  # four slices show no difference between these
        return ", as when 2 pieces of the dim are joined along another dim and reshaped, or when pairs are separated"
    if columns == 2:
        return ": the even indices come first, then the odd ones, as if interleaved gate and up were separated"
    return ", as if gate and up were interleaved: one index of the first half, then one of the second"


def _spans_of_chunks(cut: StoredTensor, dim: int) -> list[tuple[int, int]]:
    """Return the stretches of a dim that chunks are."""
    sides = {(chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim]) for chunk in cut.chunks if chunk.sizes[dim]}
    return sorted(sides)


def _order_of_shards(order: NDArray[np.int64], stretches: Sequence[tuple[int, int]]) -> list[int]:
    """Return the order of the saved stretches; empty if one isn't a stretch of the other side."""
    places = {pair: at for at, pair in enumerate(stretches)}
    sources = []
    for start, stop in stretches:
        first = int(order[start])
        at = places.get((first, first + stop - start))
        if at is None or not np.array_equal(order[start:stop], np.arange(first, first + stop - start)):
            return []
        sources.append(at)
    return sources if len(sources) > 1 else []


def _by_transposition(before: NDArray[Any], after: NDArray[Any]) -> str:
    """Name two dims that were exchanged in a tensor whose shape stayed; empty if none were."""
    flat, expected = before.reshape(-1), after.reshape(-1)
    blocks = [slice(start, min(start + BLOCK, flat.size)) for start in range(0, flat.size, BLOCK)]
    for _, _, text, content in transpositions(before.shape):
        if all(np.array_equal(flat[content(np.arange(at.start, at.stop))], expected[at]) for at in blocks):
            return f"its own {text}"
    return ""


def _by_stretches(flat: NDArray[np.int64], shape: tuple[int, ...]) -> str:
    if text := _by_pieces(flat - 1, shape):
        return text
    num = int((np.diff(flat) != 1).sum()) + 1
    is_all = len(np.unique(flat)) == flat.size
    return _count_of(num) if is_all else ""


def _by_pieces(order: NDArray[np.int64], shape: tuple[int, ...]) -> str:
    """Name pieces of one dim that were joined along another; empty if there are none."""
    digits = transposed_digits(order) or transposed_digits(np.argsort(order))
    if digits is None or len(np.unique(order)) != len(order):
        return ""
    outer, rows, columns, inner = digits
    words = f"view({outer}, {rows}, {columns}, {inner}).transpose(1, 2)"
    for dim in range(1, len(shape)):
        size, after = shape[dim], math.prod(shape[dim + 1 :])
        for pieces, piece in ((columns, inner), (rows, inner)):
            if piece % after == 0 and pieces * piece == size * after:
                joined = f"as when {pieces} pieces of dim {dim} are joined along dim {dim - 1}, or the other way round"
                return f"its elements are in the order of {words}, {joined}"
    return f"its elements are in the order of {words}"


@dataclass(frozen=True, slots=True)
class Stretch:
    """Elements that are contiguous in both tensors.

    Attributes:
        start: The first one's place in the tensor that is made.
        source: Its place in the other.
        size: How many there are.
    """

    start: int
    source: int
    size: int


def name_stretches(before: NDArray[Any], after: NDArray[Any]) -> str:
    """Name the order of a tensor's elements in a second one; empty without long stretches.

    Args:
        before: The bits of the first tensor.
        after: The bits of the second, of the same shape.

    Example:
        >>> before = np.arange(100, dtype=np.uint32)
        >>> name_stretches(before, np.roll(before, 30))
        'dim 0 is rolled by 30'
    """
    flat_before, flat_after = before.reshape(-1), after.reshape(-1)
    first = _stretch(flat_before, flat_after, 0) or _stretch_within(flat_before, flat_after, 0)
    if first is None:
        return ""
    if (words := _by_exchanged_pieces(flat_before, flat_after, first)) or (
        stretches := _stretches(flat_before, flat_after, first)
    ) is None:
        return words
    long = [dim for dim, size in enumerate(before.shape) if size > 1]
    return _stretches_text(stretches, long[0], flat_before.size) if len(long) == 1 else _count_of(len(stretches))


def _count_of(num: int) -> str:
    return f"all of its elements, in a different order: {num:,} stretches"


def _stretches_text(stretches: list[Stretch], dim: int, size: int) -> str:
    if len(stretches) == 2:
        by = stretches[1].start
        return f"dim {dim} is rolled by {by if by <= size // 2 else by - size}"
    if {stretch.size for stretch in stretches} == {stretches[0].size}:
        order = [stretch.source // stretches[0].size for stretch in stretches]
        listed = " ".join(map(str, order[:MAX_LISTED])) + (" ..." if len(order) > MAX_LISTED else "")
        return f"dim {dim}'s blocks of {stretches[0].size} come in the order {listed}"
    return _count_of(len(stretches))


def _stretches(before: NDArray[Any], after: NDArray[Any], first: Stretch) -> list[Stretch] | None:
    """Return the moved stretches that make up a tensor; None if it has too many or a gap."""
    stretches, at = [first], first.start + first.size
    while at < after.size:
        stretch = _stretch(before, after, at) or _stretch_within(before, after, at)
        if stretch is None or len(stretches) == MAX_STRETCHES:
            return None
        stretches.append(stretch)
        at = stretch.start + stretch.size
    # Stretches that are too short to be searched for fill the gaps.
    gaps = gaps_in([(stretch.start, stretch.start + stretch.size) for stretch in stretches], before.size)
    sources = gaps_in([(stretch.source, stretch.source + stretch.size) for stretch in stretches], before.size)
    num_left = before.size - sum(stretch.size for stretch in stretches)
    if len(gaps) != len(sources) or {length(gaps), length(sources)} != {num_left}:
        return None
    for (start, stop), (source, end) in zip(gaps, sources, strict=True):
        if not np.array_equal(before[source:end], after[start:stop]):
            return None
        stretches.append(Stretch(start, source, stop - start))
    return sorted(stretches, key=lambda stretch: stretch.start)


def _stretch_within(before: NDArray[Any], after: NDArray[Any], at: int) -> Stretch | None:
    """Return the stretch that begins within one window of a place."""
    later = at + WINDOW
    if later + WINDOW > after.size or (stretch := _stretch(before, after, later)) is None:
        return None
    most = min(WINDOW, stretch.source)
    odd = (by for by in range(most) if before[stretch.source - by - 1] != after[later - by - 1])
    back = next(odd, most)
    return Stretch(later - back, stretch.source - back, stretch.size + back)


def _stretch(before: NDArray[Any], after: NDArray[Any], at: int) -> Stretch | None:
    """Return the stretch that begins at a place; None unless its start occurs once before."""
    source = _place(before, after[at : at + WINDOW])
    return None if source < 0 else Stretch(at, source, _equal_length(before[source:], after[at:]))


def _place(before: NDArray[Any], window: NDArray[Any]) -> int:
    """Return the offset of a window in a tensor; -1 unless it occurs exactly once."""
    places: list[int] = []
    for start in range(0, before.size, BLOCK):
        window_block = before[start : start + BLOCK + len(window) - 1]
        at = np.flatnonzero(window_block[: len(window_block) - len(window) + 1] == window[0])
        for offset in range(1, len(window)):
            at = at[window_block[at + offset] == window[offset]]
        places += (at + start).tolist()
        if len(places) > 1:
            return -1
    return places[0] if places else -1


def _equal_length(first: NDArray[Any], second: NDArray[Any]) -> int:
    size = min(first.size, second.size)
    for start in range(0, size, BLOCK):
        odd = first[start : start + BLOCK][: size - start] != second[start : start + BLOCK][: size - start]
        if odd.any():
            return start + int(odd.argmax())
    return size


def _by_exchanged_pieces(before: NDArray[Any], after: NDArray[Any], first: Stretch) -> str:
    """Name pieces that were joined in another order: two dims of a view that were exchanged."""
    inner = first.size
    second = (
        _place(before, after[inner : inner + WINDOW]) if first.start == first.source == 0 and inner >= WINDOW else -1
    )
    if second <= 0 or second % inner or inner >= before.size:
        return ""
    columns = second // inner
    at = _place(after, before[inner : inner + WINDOW])
    rows = at // inner if at > 0 and at % inner == 0 else 0
    if rows < 2 or columns < 2 or before.size % (rows * columns * inner):
        return ""
    view = before.reshape(-1, rows, columns, inner).swapaxes(1, 2)
    expected = after.reshape(view.shape)
    if not all(np.array_equal(mine, theirs) for mine, theirs in zip(view, expected, strict=True)):
        return ""
    return f"its elements are in the order of view({len(view)}, {rows}, {columns}, {inner}).transpose(1, 2)"


def cause_of_order(before: NDArray[np.generic], after: NDArray[np.generic]) -> Cause | None:
    """Return what reordered one dim, or repeats a shard of it; None if it is not one dim, or in no short words."""
    if before.shape != after.shape or is_long_line(before):
        return None
    if (repeated := _repeated_shard(before, after)) is not None:
        return repeated
    if (orders := orders_of_slices(before, after)) is None:
        return None
    odd = [(dim, order) for dim, order in enumerate(orders) if not np.array_equal(order, np.arange(len(order)))]
    if len(odd) != 1 or not np.array_equal(np.sort(odd[0][1]), np.arange(len(odd[0][1]))):
        return None
    named = _undone(odd[0][1], odd[0][0])
    return ReorderedInConversion(*named) if named is not None else None


def _repeated_shard(before: NDArray[np.generic], after: NDArray[np.generic]) -> OneShardRepeated | None:
    """Return the cause if the second tensor is one shard of the first, several times over.

    A shard whose elements are all equal doesn't say where it belongs.
    """
    for dim, size in enumerate(before.shape):
        for times in (times for times in range(2, MAX_SHARDS + 1) if size % times == 0):
            shards, of_after = (np.split(side, times, dim) for side in (before, after))
            is_repeated = all(np.array_equal(shard, of_after[0]) for shard in of_after[1:])
            is_one = sum(np.array_equal(shard, of_after[0]) for shard in shards) == 1
            if is_repeated and is_one and not is_alike(of_after[0]):
                return OneShardRepeated(dim, times)
    return None


def _undone(order: Order, dim: int) -> tuple[str, str] | None:
    """Return the kind of an order and the call that undoes it on a tensor w."""
    size = len(order)
    if as_text(order) is not None:
        return "text", "join the parts sorted by their numbers"
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
    within = _undone(order[:period], dim + 1) if period < size else None
    if within is not None and within[0] != "text":
        return within[0], f"w.unflatten({dim}, (-1, {period})){within[1].removeprefix('w')}.flatten({dim}, {dim + 1})"
    if (parts := segments_of_parts(order)) is not None and len({*parts[1]}) > 1:
        count, segments = parts
        of_segments = f"w.unflatten({dim}, ({count}, -1)).split({list(segments)}, {dim + 1})"
        return "segments", f"torch.cat([part.flatten({dim}, {dim + 1}) for part in {of_segments}], {dim})"
    _, blocks = blocks_of(order)
    if len(blocks) > MOST_WRITTEN:
        return None
    places = ", ".join(map(str, np.argsort(blocks).tolist()))
    chosen = f".index_select({dim}, torch.tensor([{places}]))"
    return "blocks", f"w.unflatten({dim}, ({len(blocks)}, -1)){chosen}.flatten({dim}, {dim + 1})"
