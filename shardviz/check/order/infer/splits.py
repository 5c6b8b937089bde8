"""Splits that are not one torch.chunk: the head-tail order of context parallel, the even split of array_split, and
segments of different sizes, each split separately."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from shardviz.check.order.infer.fit import Fit
from shardviz.check.order.infer.layout import same_region
from shardviz.explain.splits import Balanced, HeadTail, UnequalSegments
from shardviz.layout.region import Ranges, Region, length, merged
from shardviz.layout.splits import JOIN, Split, bound, chunk, followed, stretch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardviz.explain.order import Disorder
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Coord
    from shardviz.layout.splits import Chain

MAX_SEGMENTS = 16

MAX_PIECES = 1 << 10
"""A dim whose claimed numbers cut it into more pieces than this is not split in other ways."""


def head_tail(ranges: Ranges, parts: int, part: int) -> Ranges:
    """Return chunk `part` of twice as many chunks and its mirror image: torch's context parallel load balancing."""
    return merged((*chunk(ranges, 2 * parts, part), *chunk(ranges, 2 * parts, 2 * parts - 1 - part)))


def balanced(ranges: Ranges, parts: int, part: int) -> Ranges:
    """Return the part that numpy.array_split gives: sizes differ by at most one, the longer ones first."""
    small, longer = divmod(length(ranges), parts)
    first = part * small + min(part, longer)
    return stretch(ranges, first, first + small + (part < longer))


def segmented(bounds: Sequence[int]) -> Split:
    """Return the split that gives a part of each of the segments between the bounds."""

    def split(_ranges: Ranges, parts: int, part: int) -> Ranges:
        return merged(range_ for segment in pairwise(bounds) for range_ in chunk((segment,), parts, part))

    return split


def explain_splits(claimed: Layout, held: Mapping[Coord, Region]) -> Iterator[Fit]:
    """Yield the axes whose split of a dim is head-tail, balanced or by segments, all else being as claimed."""
    kinds: list[tuple[Disorder, str, Split]] = [
        (HeadTail(), "{axis}=i of {size} holds chunks i and {last}-i of {twice} along dim {dim}", head_tail),
        (Balanced(), "dim {dim} is cut into {size} parts that differ by at most one along {axis}", balanced),
    ]
    if claimed.flat is not None:
        return
    for cause, words, split in kinds:
        for dim, chain in enumerate(claimed.chains):
            for axis in chain if _num_pieces(chain) <= MAX_PIECES else ():
                if isinstance(axis, int) or axis == JOIN or not _fits(claimed, held, dim, axis, split):
                    continue
                size = claimed.mesh.axis_size(axis)
                text = words.format(axis=axis, size=size, last=2 * size - 1, twice=2 * size, dim=dim)
                yield Fit(cause, text, text)
    yield from _unequal_segments(claimed, held)


def _num_pieces(chain: Chain) -> int:
    return math.prod(link for link in chain if isinstance(link, int))


def _unequal_segments(claimed: Layout, held: Mapping[Coord, Region]) -> Iterator[Fit]:
    """Yield the segments of a dim that one axis splits: they begin where the first rank's pieces begin."""
    for dim, chain in enumerate(claimed.chains):
        axis = chain[0] if len(chain) == 1 else 0
        if not isinstance(axis, str) or claimed.mesh.axis_size(axis) < 2:
            continue
        column = claimed.mesh.axis_index(axis)
        first = next((region.dims[dim] for coord, region in held.items() if coord[column] == 0), ())
        bounds = [*(start for start, _ in first), claimed.shape[dim]]
        rising = bounds[0] == 0 and all(low < high for low, high in pairwise(bounds))
        if 2 < len(bounds) <= MAX_SEGMENTS and rising and _fits(claimed, held, dim, axis, segmented(bounds)):
            sizes = [high - low for low, high in pairwise(bounds)]
            if len(set(sizes)) == 1:
                continue
            text = f"dim {dim} has segments of {', '.join(map(str, sizes))}, each split over {axis}"
            yield Fit(UnequalSegments(), text, text)


def _fits(
    claimed: Layout,
    held: Mapping[Coord, Region],
    dim: int,
    axis: str,
    split: Split,
) -> bool:
    mesh, chain = claimed.mesh, claimed.chains[dim]
    sizes = dict(zip(mesh.axes, mesh.shape, strict=True))
    for coord, region in held.items():
        claimed_region = claimed.region(coord)
        position = dict(zip(mesh.axes, coord, strict=True))
        ranges = followed(claimed.shape[dim], bound(chain, position, sizes), {chain.index(axis): split})
        if not same_region(Region((*claimed_region.dims[:dim], ranges, *claimed_region.dims[dim + 1 :])), region):
            return False
    return True
