"""Layouts under which ranks have shards of the shape that they claim, but other elements: what is tried for a hash."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product
from typing import TYPE_CHECKING

from shardviz.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.layout.layout import Layout
    from shardviz.layout.splits import Chain

FEW = 16
"""Segments of a dim that are tried: q, k and v; gate and up; heads of a small model."""

MOST = 256
"""Layouts that are tried of one tensor."""

MOST_AXES = 4


def other_layouts(claimed: Layout) -> Iterator[Layout]:
    """Yield layouts with the axes of another one: in other orders, on other dims, and around segments of a dim.

    Example:
        >>> from shardviz.layout.mesh import parse_mesh
        >>> from shardviz.layout.notation import parse, write
        >>> layout = parse("[8/a/b]").layout(parse_mesh("a=2,b=2"))
        >>> [write(one) for one in other_layouts(layout)][:3]
        ['[8/b/a]', '[8/2/a/b]', '[8/a/2/b]']
    """
    axes = claimed.split_axes
    if claimed.flat is not None or not axes or len(axes) > MOST_AXES:
        return
    found = dict.fromkeys(chains for base in _bases(claimed, axes) for chains in (base,))
    found |= dict.fromkeys(chains for base in list(found) for chains in _with_segments(base, claimed.shape))
    left = MOST
    for chains in found:
        if chains != claimed.chains and left:
            left -= 1
            try:
                yield replace(claimed, chains=chains)
            except LayoutError:  # more segments than a dim may be cut into
                continue


def _bases(claimed: Layout, axes: tuple[str, ...]) -> Iterator[tuple[Chain, ...]]:
    """Yield the axes in every order on every dim, those of the claim first."""
    dims = range(len(claimed.shape))
    own = tuple(next(dim for dim in dims if axis in claimed.chains[dim]) for axis in axes)
    for placed in sorted(product(dims, repeat=len(axes)), key=lambda one: one != own):
        for order in permutations(range(len(axes))):
            yield tuple(tuple(axes[at] for at in order if placed[at] == dim) for dim in dims)


def _with_segments(base: tuple[Chain, ...], shape: tuple[int, ...]) -> Iterator[tuple[Chain, ...]]:
    """Yield a layout's chains with a number of segments before one of the axes of a dim."""
    for dim, chain in enumerate(base):
        for number in _numbers(shape[dim]):
            for at in range(len(chain)):
                yield (*base[:dim], (*chain[:at], number, *chain[at:]), *base[dim + 1 :])


def _numbers(size: int) -> list[int]:
    return [number for number in range(2, min(FEW, size - 1) + 1) if size % number == 0]
