"""Layouts that give ranks the shapes they hold, and ranks whose regions others hold instead."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations, product
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.layout.everywhere import lengths, parts_of, position_numbers
from shardviz.layout.layout import Layout
from shardviz.relate.orders import features, nearest
from shardviz.relate.tolerance import ALIKE
from shardviz.relate.values import part_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.layout.mesh import Mesh
    from shardviz.layout.splits import Chain as Splits

    Values = NDArray[Any]
    Shape = tuple[int, ...]

MOSTLY = 0.5
"""A layout is tried if it gives this part of the ranks their sizes: exchanged ones may have others."""

SEGMENTS = (2, 3)
"""Numbers of segments that are tried: gate and up, and q, k and v. Others are if they are claimed."""

FEW_ELEMENTS = 512
"""Elements of each part that are compared to find out whose it is."""


def layouts_of(
    shapes: Sequence[Shape | None], mesh: Mesh, shape: Shape, claimed: Layout | None, segments: Iterable[int] = SEGMENTS
) -> list[Layout]:
    """Return the layouts that give most ranks their shapes: the claim first, then fewest splits.

    Args:
        shapes: What each rank of the mesh holds, in mesh order; None for ranks that hold nothing.
        mesh: The mesh.
        shape: The shape of the whole tensor.
        claimed: The layout that is claimed.
        segments: The numbers of segments of a dim to try, besides those that are claimed.
    """
    layouts: list[Layout] = []
    if (claimed is None or claimed.flat is None) and all(held is None or len(held) == len(shape) for held in shapes):
        for ways in product(*(_splits(shapes, dim, mesh, shape[dim], claimed, segments) for dim in range(len(shape)))):
            axes = [link for way in ways for link in way if isinstance(link, str)]
            if len({*axes}) == len(axes):
                layouts.append(Layout(mesh, shape, ways))
        layouts.sort(key=lambda layout: sum(map(len, layout.chains)))
    if claimed is None:
        return layouts
    return [replace(claimed, partial=()), *(layout for layout in layouts if not layout.same_regions(claimed))]


def _splits(
    shapes: Sequence[Shape | None], dim: int, mesh: Mesh, size: int, claimed: Layout | None, segments: Iterable[int]
) -> list[Splits]:
    """Return the splits of a dim that give most ranks their sizes, in every order of axes."""
    there = np.array([shape is not None for shape in shapes])
    expected = np.array([-1 if shape is None else shape[dim] for shape in shapes])
    sizes = tuple(zip(mesh.axes, mesh.shape, strict=True))
    axes = [axis for axis, number in sizes if number > 1]
    orders = [order for count in range(len(axes) + 1) for order in permutations(axes, count)]
    numbers = {*segments, *(link for link in (claimed.chains[dim] if claimed else ()) if isinstance(link, int))}
    behind: list[Splits] = [(number, *order) for order in orders if order for number in numbers if size % number == 0]
    distinct: dict[object, Splits] = {}
    every: list[Splits] = [*(tuple(order) for order in orders), *behind]
    for splits in every:
        if np.mean(lengths(size, splits, sizes)[there] == expected[there]) >= MOSTLY:
            coordinates = position_numbers(sizes, [axis for axis in axes if axis in splits])
            distinct.setdefault((parts_of(size, splits, sizes), coordinates.tobytes()), splits)
    return list(distinct.values())


def sources_of(
    actual: Mapping[int, Values], source: Values, layout: Layout, ranks: Collection[int], near: float
) -> tuple[tuple[int, int], ...]:
    """Return pairs of a rank and the rank whose region it holds, at any scale.

    Of several ranks that should hold what a rank holds, the one that shares most coordinates with it is taken.

    Args:
        actual: What each rank holds.
        source: The wanted tensor.
        layout: What each rank should hold.
        ranks: The ranks to look at.
        near: How far features of equal parts may be off.
    """
    holders = layout.holders()
    coord_of = layout.mesh.coord_of
    sources: dict[int, int] = {}
    for shape in {actual[rank].shape for rank in ranks} if len(holders) > 1 else ():
        regions = [region for region in holders if region.shape == shape]
        alike = [rank for rank in ranks if actual[rank].shape == shape]
        if not regions:
            continue
        points = _points([actual[rank] for rank in alike]), _points([part_of(source, region) for region in regions])
        close, coarse = nearest(*points, (near, ALIKE))
        for rank, place in zip(alike, np.where(close < 0, coarse, close).tolist(), strict=True):
            owners = holders[regions[place]] if place >= 0 else (rank,)
            sources[rank] = max(owners, key=lambda owner: sum(map(int.__eq__, coord_of(rank), coord_of(owner))))
    return tuple(sorted((rank, owner) for rank, owner in sources.items() if rank != owner))


def _points(parts: Iterable[Values]) -> NDArray[np.float64]:
    """Return features of parts that neither a factor nor its sign changes."""
    rows = [part.ravel()[:: 1 + part.size // FEW_ELEMENTS] for part in parts]
    side = np.nan_to_num(np.stack(rows).astype(np.float64))
    norms = np.linalg.norm(side, axis=1, keepdims=True) * np.where(side.sum(1, keepdims=True) < 0, -1, 1)
    return features(side / np.where(norms, norms, 1) * math.sqrt(side.shape[1]))
