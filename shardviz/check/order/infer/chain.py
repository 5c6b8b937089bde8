"""One dim's chain of splits, derived from the index ranges that each coordinate holds.

The chain is peeled from the outside. Taken over all other axes, the ranges of one position of the outermost axis are
one chunk of the whole dim; if they are several intervals instead, the distance between them is the size of the
segments that a number cut before. Each link is proved against the ranges before the next one is looked for, so that
nothing is enumerated but orders that fit so far.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING

from shardviz.layout.region import Ranges, length, merged
from shardviz.layout.splits import JOIN, MAX_SEGMENTS, Chain, Link, chunk

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

Place = tuple[int, ...]
Table = dict[Place, Ranges]
"""What each position on a dim's axes holds; positions that nobody has seen are left out."""

MAX_CHAINS = 64
MAX_STEPS = 300
"""Links that are tried if missing positions leave so much open that dead ends have no end."""
MAX_NUMBERS = 8
"""Numbers tried if uneven segments leave several that give the same step."""


Try = tuple[bool, bool]
TRIES: tuple[Try, ...] = ((False, False), (True, False), (True, True))
"""Whether chains may have numbers, and joins: the simplest kind first."""


@dataclass(frozen=True, slots=True)
class _Peeled:
    """A chain as far as it is known.

    Attributes:
        links: The links found.
        axes: The axes among them, in their order.
        segments: For each position on those axes the segments that the next link splits.
    """

    links: Chain
    axes: tuple[str, ...]
    segments: dict[Place, tuple[Ranges, ...]]


def derive_chain(size: int, axes: Mapping[str, int], table: Table, prefer: Chain = ()) -> Chain | None:
    """Find the simplest chain that gives every position what it holds.

    Args:
        size: The dim's size.
        axes: The axes that what is held depends on, with their sizes, in the order of the table's positions.
        table: What each position holds, rising.
        prefer: The chain that is claimed: it wins over others as simple.

    Returns:
        The chain without trailing numbers; None if no chain fits.
    """
    if any(start < stop for ranges in table.values() for (_, stop), (start, _) in pairwise(ranges)):
        return None
    start = _Peeled((), (), {(): (((0, size),) if size else (),)})
    for kind in TRIES:
        found = list(islice(_peel(start, _Wanted(axes, table, *kind)), MAX_CHAINS))
        if found:
            return min(found, key=lambda chain: _effort(chain, prefer))
    return None


def fitting_chains(size: int, axes: Mapping[str, int], table: Table, prefer: Chain, kind: Try) -> list[Chain]:
    """Return the chains of one kind over just these axes that give every known position what it holds.

    If positions are unknown, several may fit; another dim, or empty shards, may rule some of them out.
    """
    start = _Peeled((), (), {(): (((0, size),) if size else (),)})
    found = set(islice(_peel(start, _Wanted(axes, table, *kind, most_steps=MAX_STEPS)), MAX_CHAINS))
    return sorted(found, key=lambda chain: (_effort(chain, prefer), str(chain)))


def _effort(chain: Chain, prefer: Chain) -> tuple[int, bool, int]:
    order = [link for link in prefer if link in chain and isinstance(link, str)]
    numbers = sum(isinstance(link, int) for link in chain)
    return chain.count(JOIN) + numbers, order != [link for link in chain if isinstance(link, str)], len(chain)


class _Wanted:
    """The table, summed up over the axes that are not peeled yet, and which links may be tried on it."""

    def __init__(
        self, axes: Mapping[str, int], table: Table, numbers: bool, joins: bool, most_steps: float = math.inf
    ) -> None:
        self.axes = axes
        self.table = table
        self.numbers = numbers
        self.joins = joins
        self.steps_left = most_steps
        self.complete = len(table) == math.prod(axes.values())
        self._unions: dict[tuple[str, ...], Table] = {}

    def union(self, axes: tuple[str, ...]) -> Table:
        """Return for every position on `axes` all that is held there, rising."""
        if axes not in self._unions:
            columns = [list(self.axes).index(axis) for axis in axes]
            groups: dict[Place, list[Ranges]] = {}
            for place, ranges in self.table.items():
                groups.setdefault(tuple(place[column] for column in columns), []).append(ranges)
            self._unions[axes] = {place: _union(parts) for place, parts in groups.items()}
        return self._unions[axes]

    def fits(self, held: Ranges, segments: Iterable[Ranges], *, last: bool) -> bool:
        """Whether the segments hold just that; before the last axis, and if positions are unknown, at least that."""
        covered = merged(range_ for segment in segments for range_ in segment)
        return held == covered if self.complete or last else _union([held, covered]) == _union([covered])


def _peel(peeled: _Peeled, wanted: _Wanted) -> Iterator[Chain]:
    left = [axis for axis in wanted.axes if axis not in peeled.axes]
    if not left:
        yield peeled.links
    for axis in left:
        for glued in _glued(peeled) if wanted.joins else (peeled,):
            yield from _peel_axis(glued, axis, wanted)


def _glued(peeled: _Peeled) -> Iterator[_Peeled]:
    yield peeled
    if any(len(segments) > 1 for segments in peeled.segments.values()):
        whole: dict[Place, tuple[Ranges, ...]] = {}
        for place, segments in peeled.segments.items():
            whole[place] = (merged(range_ for segment in segments for range_ in segment),)
        yield _Peeled((*peeled.links, JOIN), peeled.axes, whole)


def _peel_axis(peeled: _Peeled, axis: str, wanted: _Wanted) -> Iterator[Chain]:
    axes = (*peeled.axes, axis)
    held = wanted.union(axes)
    parts = wanted.axes[axis]
    pieces = max((sum(map(len, segments)) for segments in peeled.segments.values()), default=1)
    for number in (1, *(_numbers(peeled, held, parts, complete=wanted.complete) if wanted.numbers else ())):
        if wanted.steps_left <= 0 or (number > 1 and number * pieces > MAX_SEGMENTS):
            break
        wanted.steps_left -= 1
        links: tuple[Link, ...] = (number, axis) if number > 1 else (axis,)
        cut = {place: _cut(segments, number) for place, segments in peeled.segments.items()}
        split = {place: tuple(chunk(segment, parts, place[-1]) for segment in cut[place[:-1]]) for place in held}
        last = len(axes) == len(wanted.axes)
        if all(wanted.fits(held[place], segments, last=last) for place, segments in split.items()):
            yield from _peel(_Peeled((*peeled.links, *links), axes, split), wanted)


def _numbers(peeled: _Peeled, held: Table, parts: int, *, complete: bool) -> list[int]:
    """Read the size of the segments off the distance between the first two intervals that a position holds.

    If positions are unknown, what lies between may be theirs: small numbers are tried too.
    """
    longest = max((length(segment) for segments in peeled.segments.values() for segment in segments), default=0)
    more = () if complete else range(2, min(longest, MAX_NUMBERS) + 1)
    return sorted({*_numbers_seen(peeled, held, parts), *more})


def _numbers_seen(peeled: _Peeled, held: Table, parts: int) -> list[int]:
    for place, ranges in sorted(held.items()):  # the first part of a segment starts where the segment does
        segment = peeled.segments[place[:-1]][0]
        inside = _within(segment, ranges)
        total = length(segment)
        if len(inside) > 1:
            step = inside[1][0] - inside[0][0]
            fewest = -(-total // step)
            most = (total - 1) // (step - 1) if step > 1 else total
            return list(range(fewest, min(most, fewest + MAX_NUMBERS) + 1))
        if inside == ((0, total),) and parts > 1 and total > 1:
            return [total]
    return []


def _cut(segments: Sequence[Ranges], number: int) -> tuple[Ranges, ...]:
    if number == 1:
        return tuple(segments)
    return tuple(chunk(segment, number, part) for segment in segments for part in range(number))


def _within(segment: Ranges, ranges: Ranges) -> Ranges:
    """Count the part of `ranges` inside `segment` from the segment's own start."""
    inside, before = [], 0
    for start, stop in segment:
        cut = ((max(start, low), min(stop, high)) for low, high in ranges)
        inside += [(before + low - start, before + high - start) for low, high in cut if low < high]
        before += stop - start
    return merged(inside)


def _union(parts: Iterable[Ranges]) -> Ranges:
    """Return everything covered, rising and without overlaps."""
    covered: list[tuple[int, int]] = []
    for start, stop in sorted(range_ for ranges in parts for range_ in ranges):
        if covered and start <= covered[-1][1]:
            covered[-1] = (covered[-1][0], max(stop, covered[-1][1]))
        else:
            covered.append((start, stop))
    return tuple(covered)
