"""The placements that give a rank a given local shape: where a plain tensor may belong."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING

from shardviz.layout.layout import Layout
from shardviz.layout.placements import Placement, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardviz.layout.mesh import Mesh
    from shardviz.layout.region import Region

Placements = tuple[Placement, ...]

MAX_CANDIDATES = 1 << 10
"""A tensor that could be split over the mesh in more ways than this is not searched for."""


@lru_cache(maxsize=4096)
def placements_of(
    shape: tuple[int, ...], local: tuple[int, ...], mesh: Mesh, rank: int
) -> tuple[tuple[Placements, Region], ...]:
    """Return the placements that give a rank a local shape, and its region; fewest splits first."""
    kinds: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    if len(shape) != len(local) or len(kinds) ** mesh.ndim > MAX_CANDIDATES or rank not in mesh:
        return ()
    fitting = []
    for placements in sorted(product(kinds, repeat=mesh.ndim), key=num_splits):
        region = Layout.from_placements(mesh, shape, placements).region_of_rank(rank)
        if region.shape == local:
            fitting.append((placements, region))
    return tuple(fitting)


def shared_placements(
    shape: tuple[int, ...],
    local: Mapping[int, tuple[int, ...]],
    mesh: Mesh,
    fits: Callable[[int, Region], bool],
) -> Placements | None:
    """Return the placements with the fewest splits that fit every rank's part; None without any.

    Args:
        shape: The shape of the whole tensor.
        local: The shape of each rank's part.
        mesh: The mesh.
        fits: Whether a rank's part is that region of the whole.
    """
    regions = {rank: dict(placements_of(shape, own, mesh, rank)) for rank, own in local.items()}
    for placements in next(iter(regions.values()), {}):
        if all(placements in own and fits(rank, own[placements]) for rank, own in regions.items()):
            return placements
    return None


def num_splits(placements: Placements) -> int:
    """Return along how many axes placements split."""
    return sum(isinstance(one, Shard) for one in placements)
