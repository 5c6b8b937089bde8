"""Generated meshes, shapes, placements and chains for hypothesis: small enough to follow element by element."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from shardviz.layout.layout import FlatView, Layout
from shardviz.layout.mesh import Mesh
from shardviz.layout.placements import REDUCTIONS, Partial, Placement, Replicate, Shard, StridedShard
from shardviz.layout.splits import JOIN, Chain

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_RANKS = 24
MAX_ELEMENTS = 600
AXES = ("pp", "dp", "fsdp", "cp", "tp")


def bounded(sizes: Sequence[int], limit: int, instead: int) -> tuple[int, ...]:
    """Replace sizes that would bring the product above a limit."""
    kept: list[int] = []
    for size in sizes:
        kept.append(size if math.prod(kept) * size <= limit else instead)
    return tuple(kept)


def meshes(max_axes: int = 5) -> st.SearchStrategy[Mesh]:
    sizes = st.lists(st.sampled_from((2, 3, 1, 4, 5)), min_size=1, max_size=max_axes)
    return sizes.map(lambda sizes: Mesh(AXES[: len(sizes)], bounded(sizes, MAX_RANKS, 1)))


def shapes(max_dims: int = 4) -> st.SearchStrategy[tuple[int, ...]]:
    """Sizes that are even, uneven and too few for the meshes, and now and then zero."""
    sizes = st.lists(st.sampled_from((12, 8, 5, 24, 7, 1, 3, 13, 2, 25, 6, 0)), max_size=max_dims)
    return sizes.map(lambda sizes: bounded(sizes, MAX_ELEMENTS, 2))


@st.composite
def placed(draw: st.DrawFn) -> tuple[Mesh, tuple[int, ...], tuple[Placement, ...]]:
    """A mesh, a shape, and one placement of any kind for each axis."""
    mesh, shape = draw(meshes()), draw(shapes())
    kinds = [st.just(Replicate()), st.sampled_from(REDUCTIONS).map(Partial)]
    if shape:
        dims = st.integers(0, len(shape) - 1)
        kinds = [dims.map(Shard), st.builds(StridedShard, dims, st.sampled_from((2, 4, 3, 1, 8, 6, 5))), *kinds]
    placements = draw(st.lists(st.one_of(kinds), min_size=mesh.ndim, max_size=mesh.ndim))
    return mesh, shape, tuple(placements)


@st.composite
def placed_whole(draw: st.DrawFn) -> tuple[Mesh, tuple[int, ...], tuple[Placement, ...]]:
    """The same with more than one element, and no axis that awaits a reduction."""
    mesh, shape, placements = draw(placed())
    shape = tuple(size or 1 for size in shape)
    shape = shape if math.prod(shape) > 1 else (2, *shape[1:])
    return mesh, shape, tuple(Replicate() if isinstance(one, Partial) else one for one in placements)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """A layout with any chains that the notation can say: axes in any order, numbers, joins; now and then flat."""
    mesh = draw(meshes(4))
    links = draw(st.permutations([*mesh.axes, draw(st.integers(2, 4)), JOIN]))[: draw(st.integers(0, mesh.ndim + 2))]
    rest = [axis for axis in mesh.axes if axis not in links]
    partial = tuple((axis, draw(st.sampled_from(REDUCTIONS))) for axis in rest[: draw(st.integers(0, len(rest)))])
    if draw(st.integers(0, 4)) == 0:
        return _flat(draw, mesh, links, partial)
    shape = draw(shapes())
    if not shape:
        return Layout(mesh, (), (), partial)
    cuts = sorted(draw(st.lists(st.integers(0, len(links)), min_size=len(shape) - 1, max_size=len(shape) - 1)))
    ends = [0, *cuts, len(links)]
    chains = tuple(_closed(links[start:end]) for start, end in pairwise(ends))
    return Layout(mesh, shape, chains, partial)


def _flat(draw: st.DrawFn, mesh: Mesh, links: list[str | int], partial: tuple[tuple[str, str], ...]) -> Layout:
    axes = tuple(link for link in links if link in mesh.axes)
    flat = FlatView(draw(shapes(3)), draw(st.sampled_from((0, 0, 3, 40))))
    parts = math.prod(mesh.axis_size(axis) for axis in axes)
    total = flat.offset + math.prod(flat.shape) + draw(st.sampled_from((0, 0, 1, 17)))
    return Layout(mesh, (-(-total // parts) * parts,), (axes,), partial, flat)


def _closed(links: list[str | int]) -> Chain:
    """Drop joins at the ends, which the notation does not write."""
    while links and links[0] == JOIN:
        links = links[1:]
    while links and links[-1] == JOIN:
        links = links[:-1]
    return tuple(links)
