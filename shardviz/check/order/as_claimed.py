"""The way past all checks for what is right: claimed and held ranges compared as they stand in the dump.

A healthy dump of a large model is nearly all of this, so no ids are laid out and no object is made per rank: each
dim's ranges are computed once for each position on the axes that split it.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING

from shardviz.layout.layout import Layout

if TYPE_CHECKING:
    from shardviz.dump.dump import Dump, Tensor
    from shardviz.layout.region import Ranges


def is_as_claimed(dump: Dump, tensor: Tensor) -> bool:
    """Whether every rank claims the same layout of the whole stamped tensor, and holds what that says."""
    layout = tensor.claimed
    if layout is None or len(tensor.shards) != len(layout.mesh.ranks):
        return False
    wanted = claimed_dims(layout)
    for rank, shard in tensor.shards.items():
        if shard.layout is not layout and shard.layout != layout:
            return False
        own = wanted.get(rank, ((),))
        if shard.body.held != own and (0 not in shard.body.local_shape or all(own)):
            return False
    return all(name not in dump.stamps or dump.stamps[name].shape == layout.tensor_shape for name in tensor.names)


@lru_cache(maxsize=256)
def claimed_dims(layout: Layout) -> dict[int, tuple[Ranges, ...]]:
    """Return the ranges that each rank of a layout's mesh claims in each dim."""
    if layout.flat is not None:
        return {rank: region.dims for rank, region in layout.regions()}
    mesh = layout.mesh
    tables: list[list[Ranges]] = []
    for dim, chain in enumerate(layout.chains):
        alone = Layout(mesh, (layout.shape[dim],), (chain,))
        columns = [mesh.axis_index(axis) for axis in alone.split_axes]
        by_place = {
            place: alone.region(_coord(columns, place, mesh.ndim)).dims[0]
            for place in product(*(range(mesh.shape[column]) for column in columns))
        }
        tables.append([by_place[tuple(coord[column] for column in columns)] for coord in mesh.coords()])
    return dict(zip(mesh.ranks, zip(*tables, strict=True) if tables else ((),) * mesh.size, strict=True))


def _coord(columns: list[int], place: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    coord = [0] * ndim
    for column, position in zip(columns, place, strict=True):
        coord[column] = position
    return tuple(coord)
