"""The order of long stretches of a tensor's elements, in little memory.

A window of neighbors is looked for, and what follows it is compared for as long as it is equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.checkpoint.comparing.agreement import BLOCK

if TYPE_CHECKING:
    from numpy.typing import NDArray

WINDOW = 16
"""Neighbors that are looked for."""

MAX_STRETCHES = 64
"""Stretches that are followed: each takes a pass over the tensor."""

MAX_LISTED = 16


@dataclass(frozen=True, slots=True)
class Stretch:
    """Elements that stand one behind the other in both.

    Attributes:
        start: The first one's place in the tensor that is made.
        source: Its place in the other.
        size: How many there are.
    """

    start: int
    source: int
    size: int


def name_stretches(before: NDArray[Any], after: NDArray[Any]) -> str:
    """Say in which order one tensor has another's elements; empty if that is not an order of long stretches.

    Args:
        before: The bits of the first tensor.
        after: The bits of the second, of the same shape.

    Example:
        >>> before = np.arange(100, dtype=np.uint32)
        >>> name_stretches(before, np.roll(before, 30))
        'dim 0 is rolled by 30'
    """
    flat_before, flat_after = before.reshape(-1), after.reshape(-1)
    first = _stretch(flat_before, flat_after, 0) or _behind(flat_before, flat_after, 0)
    if first is None:
        return ""
    if (words := _by_transposition(flat_before, flat_after, first)) or (
        stretches := _stretches(flat_before, flat_after, first)
    ) is None:
        return words
    long = [dim for dim, size in enumerate(before.shape) if size > 1]
    return _in_words(stretches, long[0], flat_before.size) if len(long) == 1 else _count_of(len(stretches))


def _count_of(num: int) -> str:
    return f"all of its elements, in another order: {num:,} stretches"


def _in_words(stretches: list[Stretch], dim: int, size: int) -> str:
    if len(stretches) == 2:
        by = stretches[1].start
        return f"dim {dim} is rolled by {by if by <= size // 2 else by - size}"
    if {stretch.size for stretch in stretches} == {stretches[0].size}:
        order = [stretch.source // stretches[0].size for stretch in stretches]
        listed = " ".join(map(str, order[:MAX_LISTED])) + (" ..." if len(order) > MAX_LISTED else "")
        return f"dim {dim}'s blocks of {stretches[0].size} come in the order {listed}"
    return _count_of(len(stretches))


def _stretches(before: NDArray[Any], after: NDArray[Any], first: Stretch) -> list[Stretch] | None:
    """Return the stretches that make up a tensor, each place once; None if there are more, or it is not that."""
    stretches, at = [first], first.start + first.size
    while at < after.size:
        stretch = _stretch(before, after, at) or _behind(before, after, at)
        if stretch is None or len(stretches) == MAX_STRETCHES:
            return None
        stretches.append(stretch)
        at = stretch.start + stretch.size
    return _completed(before, after, stretches)


def _completed(before: NDArray[Any], after: NDArray[Any], stretches: list[Stretch]) -> list[Stretch] | None:
    """Return stretches with those that are too short to be looked for; None if a place is left, or taken twice."""
    gaps = _left({stretch.start: stretch.size for stretch in stretches}, before.size)
    sources = _left({stretch.source: stretch.size for stretch in stretches}, before.size)
    if gaps is None or sources is None or len(gaps) != len(sources):
        return None
    for (start, size), (source, room) in zip(gaps, sources, strict=True):
        if size != room or not np.array_equal(before[source : source + size], after[start : start + size]):
            return None
        stretches.append(Stretch(start, source, size))
    return sorted(stretches, key=lambda stretch: stretch.start)


def _left(sizes: dict[int, int], end: int) -> list[tuple[int, int]] | None:
    """Return the starts and sizes of what stretches leave of a tensor; None if they overlap."""
    at, gaps = 0, []
    for start, size in sorted(sizes.items()):
        if start < at:
            return None
        gaps += [(at, start - at)] if start > at else []
        at = start + size
    return gaps + ([(at, end - at)] if at < end else [])


def _behind(before: NDArray[Any], after: NDArray[Any], at: int) -> Stretch | None:
    """Return the stretch that begins within a window from a place, behind one that is too short to be looked for."""
    later = at + WINDOW
    if later + WINDOW > after.size or (stretch := _stretch(before, after, later)) is None:
        return None
    most = min(WINDOW, stretch.source)
    odd = (by for by in range(most) if before[stretch.source - by - 1] != after[later - by - 1])
    back = next(odd, most)
    return Stretch(later - back, stretch.source - back, stretch.size + back)


def _stretch(before: NDArray[Any], after: NDArray[Any], at: int) -> Stretch | None:
    """Return the stretch that begins at a place; None unless its first elements occur once before."""
    source = _place(before, after[at : at + WINDOW])
    return None if source < 0 else Stretch(at, source, _equal_length(before[source:], after[at:]))


def _place(before: NDArray[Any], window: NDArray[Any]) -> int:
    """Return the offset of some elements in a tensor; -1 if it lacks them, or has them more than once."""
    places: list[int] = []
    for start in range(0, before.size, BLOCK):
        part = before[start : start + BLOCK + len(window) - 1]
        at = np.flatnonzero(part[: len(part) - len(window) + 1] == window[0])
        for offset in range(1, len(window)):
            at = at[part[at + offset] == window[offset]]
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


def _by_transposition(before: NDArray[Any], after: NDArray[Any], first: Stretch) -> str:
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
    wanted = after.reshape(view.shape)
    if not all(np.array_equal(mine, theirs) for mine, theirs in zip(view, wanted, strict=True)):
        return ""
    return f"its elements are in the order of view({len(view)}, {rows}, {columns}, {inner}).transpose(1, 2)"
