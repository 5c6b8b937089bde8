"""Chains of splits of a dim, outermost first: `("tp", "fsdp")` for `12/tp/fsdp`.

Each split follows `torch.chunk`, level by level. This module finds the indices that a chain gives a coordinate, and
translates chains from and to torch's placements, which apply from the first mesh axis to the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Literal

import numpy as np

from shardviz.errors import LayoutError
from shardviz.layout.placements import Placement, Shard, StridedShard
from shardviz.layout.region import Range, Ranges, length, merge_ranges

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.layout.mesh import Mesh

    Indices = NDArray[np.int64]

JOIN: Literal["|"] = "|"
"""A link that glues the segments of a number before the next split: `(9/2/fsdp)/tp`."""

Link = str | int
"""One split of a chain: an axis's name, a number of segments that are not distributed, or `JOIN`."""

Chain = tuple[Link, ...]

Split = Callable[[Ranges, int, int], Ranges]
"""A rule that returns one of so many parts of some indices, as `chunk` does."""

MAX_SEGMENTS = 1 << 16
"""A dim is cut into at most this many segments that are not distributed, until they are joined again."""

COMPARED_SEGMENTS = 1 << 16
"""Two chains are compared if they have at most this many segments over all coordinates."""


def axes_in(chain: Iterable[object]) -> list[str]:
    """Return the axes of a chain, outermost first.

    Example:
        >>> axes_in((2, "fsdp", JOIN, "tp")), numbers_in((2, "fsdp", JOIN, "tp"))
        (['fsdp', 'tp'], [2])
    """
    return [link for link in chain if isinstance(link, str) and link != JOIN]


def numbers_in(chain: Iterable[object]) -> list[int]:
    """Return the numbers of segments in a chain, outermost first."""
    return [link for link in chain if isinstance(link, int)]


def check_segments(chain: Chain) -> None:
    """Make sure that a chain's numbers can be followed.

    Raises:
        LayoutError: They cut the dim into less than one segment, or more than `MAX_SEGMENTS`.
    """
    segments = 1
    for link in chain:
        if isinstance(link, int):
            segments *= link
        elif link == JOIN:
            segments = 1
        if not 0 < segments <= MAX_SEGMENTS:
            raise LayoutError(f"a dim is cut into {segments:,} segments, expected 1 to {MAX_SEGMENTS:,}")


def bind_chain(chain: Chain, position: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
    """Return (parts, chosen part) for each link; -1 means all parts, (0, 0) a join."""
    links = []
    for link in chain:
        if link == JOIN:
            links.append((0, 0))
        elif isinstance(link, int):
            links.append((link, -1))
        else:
            links.append((sizes[link], position[link]))
    return tuple(links)


@lru_cache(maxsize=1 << 16)
def follow_chain(size: int, links: tuple[tuple[int, int], ...]) -> Ranges:
    """Follow a bound chain from the whole dim to the indices that are left."""
    return follow_with_splits(size, links, {})


def follow_with_splits(size: int, links: Sequence[tuple[int, int]], splits: Mapping[int, Split]) -> Ranges:
    """Follow a bound chain; `splits` replaces torch.chunk at some places of the chain."""
    segments: list[Ranges] = [((0, size),)]
    for place, (parts, chosen) in enumerate(links):
        if parts == 0:
            segments = [merge_ranges(range_ for segment in segments for range_ in segment)]
        elif chosen < 0:
            segments = [part for segment in segments for part in chunks(segment, parts)]
        else:
            split = splits.get(place, chunk)
            segments = [split(segment, parts, chosen) for segment in segments]
    return merge_ranges(range_ for segment in segments for range_ in segment)


def chunk(ranges: Ranges, parts: int, part: int) -> Ranges:
    """Return the part that `torch.chunk(indices, parts)[part]` is; empty past the last chunk.

    Example:
        >>> [chunk(((0, 5),), 4, part) for part in range(4)]
        [((0, 2),), ((2, 4),), ((4, 5),), ()]
    """
    step = -(-length(ranges) // parts)
    return slice_ranges(ranges, part * step, (part + 1) * step)


def slice_ranges(ranges: Ranges, first: int, last: int) -> Ranges:
    """Return the indices from number `first` up to number `last`, counted within the ranges.

    Example:
        >>> slice_ranges(((0, 2), (6, 9)), 1, 4)
        ((1, 2), (6, 8))
    """
    kept, before = [], 0
    for start, stop in ranges:
        low, high = max(first - before, 0), min(last - before, stop - start)
        if low < high:
            kept.append((start + low, start + high))
        before += stop - start
    return tuple(kept)


def chunks(ranges: Ranges, parts: int) -> list[Ranges]:
    """Return all that `torch.chunk` would give, without the empty parts at the end, in one pass."""
    step = -(-length(ranges) // parts)
    pieces: list[list[Range]] = []
    room = 0
    for start, stop in ranges:
        while start < stop:
            if not room:
                pieces.append([])
                room = step
            end = min(stop, start + room)
            pieces[-1].append((start, end))
            room -= end - start
            start = end
    return [tuple(piece) for piece in pieces]


def _literal_chain(steps: Sequence[tuple[str, Shard | StridedShard]]) -> Chain:
    """Spell placements exactly as torch applies them: left to right, gluing before each axis."""
    chain: list[Link] = []
    for axis, placement in steps:
        if numbers_in(chain):
            chain.append(JOIN)
        if isinstance(placement, StridedShard) and placement.split_factor > 1:
            chain.append(placement.split_factor)
        chain.append(axis)
    return tuple(chain)


def _nested_chain(steps: Sequence[tuple[str, Shard | StridedShard]], sizes: Mapping[str, int]) -> Chain | None:
    """Spell placements as nested splits by undoing split factors; None if they don't nest."""
    chain: list[Link] = []
    for axis, placement in reversed(steps):
        factor = placement.split_factor if isinstance(placement, StridedShard) else 1
        before = [math.prod(_parts(link, sizes) for link in chain[:count]) for count in range(len(chain) + 1)]
        if factor in before:
            chain.insert(before.index(factor), axis)
        elif factor % before[-1] == 0:
            chain += [factor // before[-1], axis]
        else:
            return None
    return tuple(chain)


def _parts(link: Link, sizes: Mapping[str, int]) -> int:
    return link if isinstance(link, int) else sizes[link]


def readable_chain(size: int, steps: tuple[tuple[str, Shard | StridedShard], ...], sizes: Mapping[str, int]) -> Chain:
    """Return the nested chain, or the literal one if nesting would change the elements.

    With even splits they are the same by algebra; the others are compared, unless that takes too long.
    """
    literal = _literal_chain(steps)
    if not numbers_in(literal):
        return literal
    nested = _nested_chain(steps, sizes)
    if nested is None or size % math.prod(_parts(link, sizes) for link in nested) == 0:
        return nested or literal
    if math.prod(_parts(link, sizes) for link in literal if link != JOIN) > COMPARED_SEGMENTS:
        return literal
    own = tuple((axis, number) for axis, number in sizes.items() if axis in literal)
    return nested if same_parts(size, literal, nested, own) else literal


def placements_of_chain(dim: int, chain: Chain, mesh: Mesh) -> dict[str, Placement]:
    """Spell one dim's chain as placements by axis; the caller checks that torch reads it back.

    An axis's split factor is the product of the splits before it, since the last join, and is not applied yet when
    torch comes to it: numbers, and axes that come later on the mesh.
    """
    sizes = dict(mesh.sizes)
    steps: dict[str, Placement] = {}
    for group in _glued(chain):
        for index, link in enumerate(group):
            if isinstance(link, str):
                earlier = mesh.axes[: mesh.axis_index(link)]
                factor = math.prod(_parts(other, sizes) for other in group[:index] if other not in earlier)
                steps[link] = StridedShard(dim, factor) if factor > 1 else Shard(dim)
    return steps


def _glued(chain: Chain) -> list[list[Link]]:
    """Cut a chain at its joins; if no number came before it, a join glues nothing."""
    groups: list[list[Link]] = [[]]
    for link in chain:
        if link != JOIN:
            groups[-1].append(link)
        elif any(isinstance(other, int) for other in groups[-1]):
            groups.append([])
    return groups


def segment_numbers(size: int) -> list[int]:
    """Return the numbers of segments that a dim may be cut into, rising: at least two, and no more than are read."""
    small = [number for number in range(1, math.isqrt(size) + 1) if size % number == 0]
    return sorted(number for number in {*small, *(size // number for number in small)} if 2 <= number <= MAX_SEGMENTS)


Sizes = tuple[tuple[str, int], ...]
"""The axes of a mesh, each with its ranks."""


@lru_cache(maxsize=64)
def parts_of(size: int, chain: Chain, sizes: Sizes) -> tuple[Ranges, ...]:
    """Return the indices that every position along a chain's axes holds, row-major on the mesh.

    Example:
        >>> parts_of(5, ("tp",), (("dp", 2), ("tp", 4)))
        (((0, 2),), ((2, 4),), ((4, 5),), ())
    """
    by_name = dict(sizes)
    axes = [axis for axis, _ in sizes if axis in chain]
    if all(isinstance(link, str) and link in by_name for link in chain):
        shape = [by_name[axis] for axis in axes]
        start, stop = np.zeros(shape, np.int64), np.full(shape, size, np.int64)
        for link in chain:
            along = axes.index(str(link))
            place = np.arange(shape[along]).reshape([-1 if at == along else 1 for at in range(len(shape))])
            step = -(-(stop - start) // shape[along])
            start, stop = np.minimum(start + place * step, stop), np.minimum(start + (place + 1) * step, stop)
        pairs = zip(start.ravel().tolist(), stop.ravel().tolist(), strict=True)
        return tuple(((first, last),) if first < last else () for first, last in pairs)
    positions = product(*(range(by_name[axis]) for axis in axes))
    return tuple(
        follow_chain(size, bind_chain(chain, dict(zip(axes, place, strict=True)), by_name)) for place in positions
    )


@lru_cache(maxsize=1024)
def same_parts(size: int, chain: Chain, other: Chain, sizes: Sizes) -> bool:
    """Whether two chains give every coordinate the same indices of a dim."""
    if chain == other:
        return True
    parts, others = parts_of(size, chain, sizes), parts_of(size, other, sizes)
    numbers = (position_numbers(sizes, axes_in(each)).tolist() for each in (chain, other))
    return all(parts[first] == others[second] for first, second in zip(*numbers, strict=True))


def lengths(size: int, chain: Chain, sizes: Sizes) -> Indices:
    """Return how many indices every coordinate of the mesh holds, row-major.

    Example:
        >>> lengths(5, ("tp",), (("dp", 2), ("tp", 4))).tolist()
        [2, 2, 1, 0, 2, 2, 1, 0]
    """
    parts = np.array([length(part) for part in parts_of(size, chain, sizes)], np.int64)
    found: Indices = parts[position_numbers(sizes, axes_in(chain))]
    return found


def position_numbers(sizes: Sizes, axes: Sequence[str]) -> Indices:
    """Number the positions along some axes, row-major; return one number a coordinate.

    Example:
        >>> position_numbers((("dp", 2), ("tp", 3)), ["tp"]).tolist()
        [0, 1, 2, 0, 1, 2]
    """
    shape = [size if axis in axes else 1 for axis, size in sizes]
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return np.broadcast_to(numbers, [size for _, size in sizes]).ravel()
