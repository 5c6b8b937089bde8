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
        before: The bits of the one.
        after: Those of the other, of the same shape.

    Example:
        >>> before = np.arange(100, dtype=np.uint32)
        >>> name_stretches(before, np.roll(before, 30))
        'dim 0 is rolled by 30'
    """
    own, other = before.reshape(-1), after.reshape(-1)
    first = _stretch(own, other, 0) or _behind(own, other, 0)
    if first is None:
        return ""
    if (words := _by_transposition(own, other, first)) or (found := _stretches(own, other, first)) is None:
        return words
    long = [dim for dim, size in enumerate(before.shape) if size > 1]
    return _in_words(found, long[0], own.size) if len(long) == 1 else _count_of(len(found))


def _count_of(num: int) -> str:
    return f"all of its elements, in another order: {num:,} stretches"


def _in_words(found: list[Stretch], dim: int, size: int) -> str:
    if len(found) == 2:
        by = found[1].start
        return f"dim {dim} is rolled by {by if by <= size // 2 else by - size}"
    if {one.size for one in found} == {found[0].size}:
        order = [one.source // found[0].size for one in found]
        listed = " ".join(map(str, order[:MAX_LISTED])) + (" ..." if len(order) > MAX_LISTED else "")
        return f"dim {dim}'s blocks of {found[0].size} come in the order {listed}"
    return _count_of(len(found))


def _stretches(own: NDArray[Any], other: NDArray[Any], first: Stretch) -> list[Stretch] | None:
    """Return the stretches that make up a tensor, each place once; None if there are more, or it is not that."""
    found, at = [first], first.start + first.size
    while at < other.size:
        one = _stretch(own, other, at) or _behind(own, other, at)
        if one is None or len(found) == MAX_STRETCHES:
            return None
        found.append(one)
        at = one.start + one.size
    return _completed(own, other, found)


def _completed(own: NDArray[Any], other: NDArray[Any], found: list[Stretch]) -> list[Stretch] | None:
    """Return stretches with those that are too short to be looked for; None if a place is left, or taken twice."""
    gaps = _left({one.start: one.size for one in found}, own.size)
    sources = _left({one.source: one.size for one in found}, own.size)
    if gaps is None or sources is None or len(gaps) != len(sources):
        return None
    for (start, size), (source, room) in zip(gaps, sources, strict=True):
        if size != room or not np.array_equal(own[source : source + size], other[start : start + size]):
            return None
        found.append(Stretch(start, source, size))
    return sorted(found, key=lambda one: one.start)


def _left(sizes: dict[int, int], end: int) -> list[tuple[int, int]] | None:
    """Return the starts and sizes of what stretches leave of a tensor; None if they overlap."""
    at, found = 0, []
    for start, size in sorted(sizes.items()):
        if start < at:
            return None
        found += [(at, start - at)] if start > at else []
        at = start + size
    return found + ([(at, end - at)] if at < end else [])


def _behind(own: NDArray[Any], other: NDArray[Any], at: int) -> Stretch | None:
    """Return the stretch that begins within a window from a place, behind one that is too short to be looked for."""
    later = at + WINDOW
    if later + WINDOW > other.size or (one := _stretch(own, other, later)) is None:
        return None
    most = min(WINDOW, one.source)
    odd = (by for by in range(most) if own[one.source - by - 1] != other[later - by - 1])
    back = next(odd, most)
    return Stretch(later - back, one.source - back, one.size + back)


def _stretch(own: NDArray[Any], other: NDArray[Any], at: int) -> Stretch | None:
    """Return the stretch that begins at a place, where the other tensor has its first elements once."""
    source = _place(own, other[at : at + WINDOW])
    return None if source < 0 else Stretch(at, source, _equal_length(own[source:], other[at:]))


def _place(own: NDArray[Any], window: NDArray[Any]) -> int:
    """Return where a tensor has some elements; -1 if it does not, or more than once."""
    places: list[int] = []
    for start in range(0, own.size, BLOCK):
        part = own[start : start + BLOCK + len(window) - 1]
        at = np.flatnonzero(part[: len(part) - len(window) + 1] == window[0])
        for offset in range(1, len(window)):
            at = at[part[at + offset] == window[offset]]
        places += (at + start).tolist()
        if len(places) > 1:
            return -1
    return places[0] if places else -1


def _equal_length(one: NDArray[Any], other: NDArray[Any]) -> int:
    size = min(one.size, other.size)
    for start in range(0, size, BLOCK):
        odd = one[start : start + BLOCK][: size - start] != other[start : start + BLOCK][: size - start]
        if odd.any():
            return start + int(odd.argmax())
    return size


def _by_transposition(own: NDArray[Any], other: NDArray[Any], first: Stretch) -> str:
    """Name pieces that were joined in another order: two dims of a view that were exchanged."""
    inner = first.size
    second = _place(own, other[inner : inner + WINDOW]) if first.start == first.source == 0 and inner >= WINDOW else -1
    if second <= 0 or second % inner or inner >= own.size:
        return ""
    columns = second // inner
    at = _place(other, own[inner : inner + WINDOW])
    rows = at // inner if at > 0 and at % inner == 0 else 0
    if rows < 2 or columns < 2 or own.size % (rows * columns * inner):
        return ""
    view = own.reshape(-1, rows, columns, inner).swapaxes(1, 2)
    wanted = other.reshape(view.shape)
    if not all(np.array_equal(mine, theirs) for mine, theirs in zip(view, wanted, strict=True)):
        return ""
    return f"its elements are in the order of view({len(view)}, {rows}, {columns}, {inner}).transpose(1, 2)"
