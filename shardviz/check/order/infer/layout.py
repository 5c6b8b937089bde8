"""The held layout, derived from what each coordinate holds, then proved against it.

Each dim's chain of splits is peeled from the outside. Taken over all other axes, the ranges of one position of the
outermost axis are one chunk of the whole dim; if they are several intervals instead, the distance between them is the
size of the segments that a number cut before. Each link is proved against the ranges before the next one is looked for,
so that nothing is enumerated but orders that fit so far.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations, islice, permutations, product
from typing import TYPE_CHECKING

from shardviz.errors import LayoutError
from shardviz.groups import in_groups
from shardviz.layout.layout import Layout
from shardviz.layout.region import Ranges, Region, length, merge_ranges
from shardviz.layout.splits import JOIN, MAX_SEGMENTS, Chain, Link, chunk

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

    from shardviz.layout.mesh import Coord, Mesh

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
class _PartialChain:
    """A chain as far as it is known.

    Attributes:
        axes: The axes among them, in their order.
        segments: For each position on those axes the segments that the next link splits.
    """

    links: Chain
    axes: tuple[str, ...]
    segments: dict[Place, tuple[Ranges, ...]]


def derive_chain(size: int, axes: Mapping[str, int], table: Table, prefer: Chain = ()) -> Chain | None:
    """Find the simplest chain that gives every position what it holds.

    Args:
        axes: The axes that what is held depends on, with their sizes, in the order of the table's positions.
        table: What each position holds.
        prefer: The chain that is claimed: it wins over others as simple.

    Returns:
        The chain without trailing numbers; None if no chain fits.
    """
    start = _PartialChain((), (), {(): (((0, size),) if size else (),)})
    for kind in TRIES:
        chains = list(islice(_peel(start, _PeelTask(axes, table, *kind)), MAX_CHAINS))
        if chains:
            return min(chains, key=lambda chain: _complexity(chain, prefer))
    return None


def fitting_chains(size: int, axes: Mapping[str, int], table: Table, prefer: Chain, kind: Try) -> list[Chain]:
    """Return the chains of one kind over these axes that give each known position what it holds.

    If positions are unknown, several may fit; another dim, or empty shards, may rule some of them out.
    """
    start = _PartialChain((), (), {(): (((0, size),) if size else (),)})
    chains = set(islice(_peel(start, _PeelTask(axes, table, *kind, most_steps=MAX_STEPS)), MAX_CHAINS))
    return sorted(chains, key=lambda chain: (_complexity(chain, prefer), str(chain)))


def _complexity(chain: Chain, prefer: Chain) -> tuple[int, bool, int]:
    order = [link for link in prefer if link in chain and isinstance(link, str)]
    numbers = sum(isinstance(link, int) for link in chain)
    return chain.count(JOIN) + numbers, order != [link for link in chain if isinstance(link, str)], len(chain)


class _PeelTask:
    """The table, summed over the axes that aren't peeled yet, and the links to try on it."""

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
            groups = in_groups(
                (tuple(place[column] for column in columns), ranges) for place, ranges in self.table.items()
            )
            self._unions[axes] = {place: _union(parts) for place, parts in groups.items()}
        return self._unions[axes]

    def fits(self, held: Ranges, segments: Iterable[Ranges], *, last: bool) -> bool:
        """Whether segments hold just these ranges; with axes or positions left, at least these."""
        covered = merge_ranges(range_ for segment in segments for range_ in segment)
        return held == covered if self.complete or last else _union([held, covered]) == _union([covered])


def _peel(peeled: _PartialChain, target: _PeelTask) -> Iterator[Chain]:
    axes_left = [axis for axis in target.axes if axis not in peeled.axes]
    if not axes_left:
        yield peeled.links
    for axis in axes_left:
        for glued in _joins(peeled) if target.joins else (peeled,):
            yield from _peel_axis(glued, axis, target)


def _joins(peeled: _PartialChain) -> Iterator[_PartialChain]:
    yield peeled
    if any(len(segments) > 1 for segments in peeled.segments.values()):
        whole: dict[Place, tuple[Ranges, ...]] = {}
        for place, segments in peeled.segments.items():
            whole[place] = (merge_ranges(range_ for segment in segments for range_ in segment),)
        yield _PartialChain((*peeled.links, JOIN), peeled.axes, whole)


def _peel_axis(peeled: _PartialChain, axis: str, target: _PeelTask) -> Iterator[Chain]:
    axes = (*peeled.axes, axis)
    held = target.union(axes)
    parts = target.axes[axis]
    pieces = max((sum(map(len, segments)) for segments in peeled.segments.values()), default=1)
    for number in (1, *(_numbers(peeled, held, parts, complete=target.complete) if target.numbers else ())):
        if target.steps_left <= 0 or (number > 1 and number * pieces > MAX_SEGMENTS):
            break
        target.steps_left -= 1
        links: tuple[Link, ...] = (number, axis) if number > 1 else (axis,)
        cut = {
            place: tuple(chunk(segment, number, part) for segment in segments for part in range(number))
            for place, segments in peeled.segments.items()
        }
        split = {place: tuple(chunk(segment, parts, place[-1]) for segment in cut[place[:-1]]) for place in held}
        last = len(axes) == len(target.axes)
        if all(target.fits(held[place], segments, last=last) for place, segments in split.items()):
            yield from _peel(_PartialChain((*peeled.links, *links), axes, split), target)


def _numbers(peeled: _PartialChain, held: Table, parts: int, *, complete: bool) -> list[int]:
    """Return segment sizes to try, from the distance between a position's first two intervals.

    If positions are unknown, what lies between may be theirs: small numbers are tried too.
    """
    longest = max((length(segment) for segments in peeled.segments.values() for segment in segments), default=0)
    more = () if complete else range(2, min(longest, MAX_NUMBERS) + 1)
    return sorted({*_numbers_seen(peeled, held, parts), *more})


def _numbers_seen(peeled: _PartialChain, held: Table, parts: int) -> list[int]:
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


def _within(segment: Ranges, ranges: Ranges) -> Ranges:
    """Count the part of `ranges` inside `segment` from the segment's own start."""
    inside, before = [], 0
    for start, stop in segment:
        cut = ((max(start, low), min(stop, high)) for low, high in ranges)
        inside += [(before + low - start, before + high - start) for low, high in cut if low < high]
        before += stop - start
    return merge_ranges(inside)


def _union(parts: Iterable[Ranges]) -> Ranges:
    """Return everything covered, rising and without overlaps."""
    covered: list[tuple[int, int]] = []
    for start, stop in sorted(range_ for ranges in parts for range_ in ranges):
        if covered and start <= covered[-1][1]:
            covered[-1] = (covered[-1][0], max(stop, covered[-1][1]))
        else:
            covered.append((start, stop))
    return tuple(covered)


MAX_AXIS_SETS = 64
MAX_LAYOUTS = 4096
"""Sets of axes of a dim, and layouts, that are tried if what is known leaves several open."""


def infer_layout(
    mesh: Mesh, shape: Sequence[int], held: Mapping[Coord, Region], claimed: Layout | None = None
) -> Layout | None:
    """Find the layout that puts on every coordinate what it holds.

    Args:
        shape: The tensor's global shape; its number of elements as the one size for a flat view.
        held: What each known coordinate holds, in `shape`.
        claimed: What the placements say; it wins if it fits, and breaks ties.

    Returns:
        The simplest layout that fits every known coordinate exactly; None if the notation has none.
    """
    if claimed is not None and holds(claimed, held):
        return claimed
    if claimed is not None and claimed.flat is not None:
        axes = claimed.mesh.axes
        orders = (order for count in range(len(axes) + 1) for order in permutations(axes, count))
        layouts = (Layout(claimed.mesh, claimed.shape, (order,), flat=claimed.flat) for order in orders)
        return next((layout for layout in layouts if holds(layout, held)), None)
    tables = [
        {coord: ranges for coord, region in held.items() if (ranges := _known_ranges(region, dim)) is not None}
        for dim in range(len(shape))
    ]
    prefer = claimed.chains if claimed is not None else ((),) * len(shape)
    chains = [
        _simplest_chain(mesh, *dim, all_known=len(held) == mesh.size) for dim in zip(shape, tables, prefer, strict=True)
    ]
    if all(chain is not None for chain in chains):
        layout = _proven_layout(mesh, shape, [chain for chain in chains if chain is not None], held)
        if layout is not None:
            return layout
    is_open = any(not region.size for region in held.values()) or any(
        set(_axes_that_may_matter(mesh, table)) - set(axes_of_change(mesh, table)) for table in tables
    )
    return _search_layout(mesh, shape, held, tables, prefer) if is_open else None


def _simplest_chain(
    mesh: Mesh, size: int, table: Mapping[Coord, Ranges], prefer: Chain, *, all_known: bool
) -> Chain | None:
    """Return a dim's chain over the axes that matter, and over claimed ones that may."""
    axes = [axis for axis in mesh.axes if axis in axes_of_change(mesh, table) or (axis in prefer and not all_known)]
    return derive_chain(size, *_table_over(mesh, axes, table), prefer)


def _table_over(mesh: Mesh, axes: Sequence[str], table: Mapping[Coord, Ranges]) -> tuple[dict[str, int], Table]:
    """Return the sizes of some axes, and what is held at each place on them."""
    columns = [mesh.axis_index(axis) for axis in axes]
    by_place = {tuple(coord[column] for column in columns): ranges for coord, ranges in table.items()}
    return {axis: mesh.axis_size(axis) for axis in axes}, by_place


def _proven_layout(
    mesh: Mesh, shape: Sequence[int], chains: Sequence[Chain], held: Mapping[Coord, Region]
) -> Layout | None:
    """Return the layout of some chains if it has each axis once and fits every known coordinate."""
    try:
        layout = Layout(mesh, tuple(shape), tuple(chains))
    except LayoutError:
        return None
    return layout if holds(layout, held) else None


def _search_layout(
    mesh: Mesh,
    shape: Sequence[int],
    held: Mapping[Coord, Region],
    tables: Sequence[Mapping[Coord, Ranges]],
    prefer: Sequence[Chain],
) -> Layout | None:
    """Find a layout by trying all axes that missing or empty shards leave open."""
    for kind in TRIES:
        chains = [_open_chains(mesh, *dim, kind) for dim in zip(shape, tables, prefer, strict=True)]
        simplest_first = sorted(islice(product(*chains), MAX_LAYOUTS), key=lambda chains: sum(map(len, chains)))
        proved = (_proven_layout(mesh, shape, choice, held) for choice in simplest_first)
        if layout := next((layout for layout in proved if layout is not None), None):
            return layout
    return None


def _open_chains(mesh: Mesh, size: int, table: Mapping[Coord, Ranges], prefer: Chain, kind: Try) -> list[Chain]:
    """Return chains of a dim over the axes that matter, and those that may, fewest axes first."""
    certain = axes_of_change(mesh, table)
    maybe = [axis for axis in _axes_that_may_matter(mesh, table) if axis not in certain]
    sets = [{*certain, *more} for count in range(len(maybe) + 1) for more in combinations(maybe, count)]
    chains: list[Chain] = []
    for axes in sets[:MAX_AXIS_SETS]:
        places = _table_over(mesh, [axis for axis in mesh.axes if axis in axes], table)
        chains += fitting_chains(size, *places, prefer, kind)
    return chains


def holds(layout: Layout, held: Mapping[Coord, Region]) -> bool:
    """Whether a layout gives every known coordinate what it holds; empty regions are equal."""
    return all(same_region(layout.region(coord), region) for coord, region in held.items())


def same_region(first: Region, second: Region) -> bool:
    """Whether two regions hold the same elements in the same order."""
    return first.dims == second.dims or (first.size == 0 == second.size)


def _known_ranges(region: Region, dim: int) -> Ranges | None:
    """Return a region's ranges of a dim; None if the region is empty in a different dim."""
    ranges = region.dims[dim]
    return ranges if region.size or not ranges else None


def axes_of_change(mesh: Mesh, held: Mapping[Coord, Hashable]) -> list[str]:
    """Return the axes along which coordinates hold different things, all else being equal."""
    axes = []
    for index, axis in enumerate(mesh.axes):
        first_held: dict[Coord, Hashable] = {}
        if any(
            first_held.setdefault((*coord[:index], *coord[index + 1 :]), content) != content
            for coord, content in held.items()
        ):
            axes.append(axis)
    return axes


def _axes_that_may_matter(mesh: Mesh, table: Mapping[Coord, Ranges]) -> list[str]:
    """Return the axes that may split a dim: along each, at most one rank of a line holds a part.

    Chunks of a dim have no element in common: an axis that keeps a part does not split the dim.
    """
    axes = []
    for index, axis in enumerate(mesh.axes):
        places = [(*coord[:index], *coord[index + 1 :]) for coord, ranges in table.items() if ranges]
        if mesh.axis_size(axis) > 1 and len(set(places)) == len(places):
            axes.append(axis)
    return axes
