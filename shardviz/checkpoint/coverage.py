"""Whether a tensor's chunks cover it exactly once, counted on the grid of chunk edges."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from shardviz.layout.region import Region

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardviz.checkpoint.records import Chunk, StoredTensor

MAX_CELLS = 1 << 22
"""Cells of the grid that are counted."""

MAX_CORNERS = 1 << 22
"""Corners of all chunks together that are counted."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """How often the chunks of a tensor hold its elements.

    Attributes:
        missing: How many elements no chunk holds.
        gap: The first stretch of those, None if there is none.
        repeated: How many elements several chunks hold.
        overlap: The first stretch of those, None if there is none.
        outside: Chunks that reach beyond the tensor.
    """

    missing: int = 0
    gap: Region | None = None
    repeated: int = 0
    overlap: Region | None = None
    outside: tuple[Chunk, ...] = ()


def coverage_of(tensor: StoredTensor) -> Coverage | None:
    """Count how often a tensor's elements are stored; None if its chunks are too many to count."""
    if len(tensor.chunks) == 1 and tensor.chunks[0].sizes == tensor.shape:
        return Coverage() if not any(tensor.chunks[0].offsets) else Coverage(outside=tensor.chunks)
    outside = tuple(chunk for chunk in tensor.chunks if not chunk.is_within(tensor.shape))
    inside = [chunk for chunk in tensor.chunks if chunk.is_within(tensor.shape) and 0 not in chunk.sizes]
    if not tensor.size:
        return Coverage(outside=outside)
    edges = [_chunk_edges(inside, dim, size) for dim, size in enumerate(tensor.shape)]
    if math.prod(len(along) - 1 for along in edges) > MAX_CELLS or len(inside) << len(tensor.shape) > MAX_CORNERS:
        return None
    counts = _counts(inside, edges)
    missing, gap = _of_cells(counts == 0, edges)
    repeated, overlap = _of_cells(counts > 1, edges)
    return Coverage(missing, gap, repeated, overlap, outside)


def _chunk_edges(chunks: Sequence[Chunk], dim: int, size: int) -> NDArray[np.int64]:
    starts = {chunk.offsets[dim] for chunk in chunks}
    return np.array(sorted(starts | {chunk.offsets[dim] + chunk.sizes[dim] for chunk in chunks} | {0, size}), np.int64)


def _counts(chunks: Sequence[Chunk], edges: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return how many chunks hold each cell: summed up from the corners of the chunks."""
    counts = np.zeros([len(along) for along in edges], np.int64)
    starts = [np.searchsorted(along, [chunk.offsets[dim] for chunk in chunks]) for dim, along in enumerate(edges)]
    ends = [
        np.searchsorted(along, [chunk.offsets[dim] + chunk.sizes[dim] for chunk in chunks])
        for dim, along in enumerate(edges)
    ]
    for corner in product((0, 1), repeat=len(edges)):
        at = tuple((ends if side else starts)[dim] for dim, side in enumerate(corner))
        np.add.at(counts, at, -1 if sum(corner) % 2 else 1)
    for dim in range(len(edges)):
        counts = np.cumsum(counts, dim)
    return counts[tuple(slice(0, -1) for _ in edges)]


def _of_cells(which: NDArray[np.bool_], edges: Sequence[NDArray[np.int64]]) -> tuple[int, Region | None]:
    """Return how many elements some cells have, and the first of the cells."""
    if not which.any():
        return 0, None
    first = np.unravel_index(int(np.argmax(which)), which.shape)
    region = Region(tuple(((int(along[at]), int(along[at + 1])),) for along, at in zip(edges, first, strict=True)))
    volumes = reduce(np.multiply.outer, [np.diff(along).astype(np.float64) for along in edges], np.ones(()))
    return int(volumes[which].sum()), region
