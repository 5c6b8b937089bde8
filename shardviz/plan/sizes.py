"""How much of a tensor each rank of a part holds, over the mesh at once."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Mesh
    from shardviz.plan.ranks import PlannedPart


def sizes(part: PlannedPart, index: int) -> NDArray[np.int64]:
    """Return the elements of one of a part's bodies on each of its ranks.

    Args:
        part: The part.
        index: The number of the body.
    """
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


@lru_cache(maxsize=4096)
def _on_mesh(layout: Layout) -> NDArray[np.int64]:
    """Return the elements that every coordinate of a layout's mesh holds, in the order of its ranks."""
    used = [axis in layout.split_axes for axis in layout.mesh.axes]
    shape = [size if is_used else 1 for size, is_used in zip(layout.mesh.shape, used, strict=True)]
    found = [layout.region(coord).size for coord in product(*map(range, shape))]
    return np.broadcast_to(np.array(found, np.int64).reshape(shape), layout.mesh.shape).flatten()
