"""How much of a tensor each rank of a part holds, over the mesh at once."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.dump.planned.ranks import PlannedPart
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Mesh
    from shardviz.layout.splits import Chain


def sizes(part: PlannedPart, index: int) -> NDArray[np.int64]:
    """Return the elements of one of a part's bodies on each of its ranks.

    Args:
        part: The part.
        index: The number of the body.
    """
    body = part.part.record.bodies[index]
    key = (body.layout, body.local_shape)
    if key not in part.sizes:
        part.sizes[key] = _sizes(part, index)
    return part.sizes[key]


def equally_full(part: PlannedPart) -> list[tuple[int, ...]]:
    """Return the ranks of a part in groups that hold as much of every tensor, those of the lowest rank first."""
    bodies = range(len(part.part.record.bodies))
    distinct = {id(found): found for found in (sizes(part, index) for index in bodies) if found.min() < found.max()}
    ranks = np.array(part.ranks)
    if not distinct:
        return [part.ranks]
    _, first, group = np.unique(np.stack([*distinct.values()]), axis=1, return_index=True, return_inverse=True)
    return [tuple(ranks[group.ravel() == number].tolist()) for number in np.argsort(first)]


def _sizes(part: PlannedPart, index: int) -> NDArray[np.int64]:
    body = part.part.record.bodies[index]
    if body.layout is None:
        return np.full(len(part.ranks), math.prod(body.local_shape), np.int64)
    layout = part.layout(part.part.record.rank, body.layout)
    if any(rank not in layout.mesh for rank in part.ranks):
        return np.array([math.prod(part.body(rank, index).local_shape) for rank in part.ranks], np.int64)
    places = _places(layout.mesh)
    found = _on_mesh(layout)[[places[rank] for rank in part.ranks]]
    found[part.ranks.index(part.part.record.rank)] = math.prod(body.local_shape)
    return found


@lru_cache(maxsize=64)
def _places(mesh: Mesh) -> dict[int, int]:
    return {rank: place for place, rank in enumerate(mesh.ranks)}


@lru_cache(maxsize=256)
def _on_mesh(layout: Layout) -> NDArray[np.int64]:
    """Return the elements that every coordinate of a layout's mesh holds, in the order of its ranks."""
    found: NDArray[np.int64] = layout.local_shapes().prod(axis=1)
    return found


def is_even(mesh: Mesh, size: int, chain: Chain) -> bool:
    """Whether all parts of a dim have the same size."""
    axes = (mesh.axis_size(link) if link in mesh.axes else link for link in chain)
    return not size % math.prod(link for link in axes if isinstance(link, int))
