"""How much of a tensor each rank of a part holds, over the mesh at once."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from shardviz.layout.splits import numbers_in

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.dump.plan.ranks import PlannedPart
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Mesh
    from shardviz.layout.splits import Chain


def sizes(planned_part: PlannedPart, index: int) -> NDArray[np.int64]:
    """Return the elements of one of a part's bodies on each of its ranks.

    Args:
        planned_part: The part.
        index: The number of the body.
    """
    body = planned_part.part.record.bodies[index]
    key = (body.layout, body.local_shape)
    if key not in planned_part.sizes:
        planned_part.sizes[key] = _sizes(planned_part, index)
    return planned_part.sizes[key]


def equally_full(planned_part: PlannedPart) -> list[tuple[int, ...]]:
    """Group a part's ranks by the sizes that they hold, the lowest rank's group first."""
    bodies = range(len(planned_part.part.record.bodies))
    distinct = {
        id(found): found for found in (sizes(planned_part, index) for index in bodies) if found.min() < found.max()
    }
    ranks = np.array(planned_part.ranks)
    if not distinct:
        return [planned_part.ranks]
    _, first, group = np.unique(np.stack([*distinct.values()]), axis=1, return_index=True, return_inverse=True)
    return [tuple(ranks[group.ravel() == number].tolist()) for number in np.argsort(first)]


def _sizes(planned_part: PlannedPart, index: int) -> NDArray[np.int64]:
    body = planned_part.part.record.bodies[index]
    if body.layout is None:
        return np.full(len(planned_part.ranks), math.prod(body.local_shape), np.int64)
    layout = planned_part.layout(planned_part.part.record.rank, body.layout)
    if any(rank not in layout.mesh for rank in planned_part.ranks):
        return np.array(
            [math.prod(planned_part.body(rank, index).local_shape) for rank in planned_part.ranks], np.int64
        )
    counts = _on_mesh(layout)[[layout.mesh.index_of_rank[rank] for rank in planned_part.ranks]]
    counts[planned_part.ranks.index(planned_part.part.record.rank)] = math.prod(body.local_shape)
    return counts


@lru_cache(maxsize=256)
def _on_mesh(layout: Layout) -> NDArray[np.int64]:
    """Return how many elements each rank of a layout's mesh holds."""
    counts: NDArray[np.int64] = layout.local_shapes().prod(axis=1)
    return counts


def is_even(mesh: Mesh, size: int, chain: Chain) -> bool:
    """Whether all parts of a dim have the same size."""
    axes = (mesh.axis_size(link) if link in mesh.axes else link for link in chain)
    return not size % math.prod(numbers_in(axes))
