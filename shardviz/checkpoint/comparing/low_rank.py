"""Ranks of the changes between a base and two checkpoints: adapters that were merged make changes of low rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.checkpoint.comparing.equality import readable_bits
from shardviz.relate.casts import values_of
from shardviz.relate.tolerance import EPSILON, FLOATS, SAFETY

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.checkpoint.records import Tensor

CORNER = 256
"""Rows and columns of a matrix that are looked at: they have its rank, if that is lower."""

GAP = 4.0
"""How much larger than rounding makes it the smallest part of a change is that counts."""


def ranks_of_changes(first: Tensor, second: Tensor, base: Tensor) -> tuple[int, int] | None:
    """Return the ranks of two matrices' changes from a base if one has the other's change and more of low rank.

    The two then differ by a change of the remaining rank: changes of different adapters have the sum of their ranks.
    """
    corners = [corner_of(side) for side in (first, second, base)]
    if any(corner is None for corner in corners) or len({side.shape for side in (first, second, base)}) > 1:
        return None
    before, after, start = (corner for corner in corners if corner is not None)
    epsilon = max(EPSILON[side.dtype] for side in (first, second, base))
    ranks = [rank_of(change, start, epsilon) for change in (before - start, after - start, after - before)]
    low, high = sorted(ranks[:2])
    is_low = 0 < low < high < min(start.shape)
    return (ranks[0], ranks[1]) if is_low and ranks[2] == high - low else None


def rank_of_change(side: Tensor, base: Tensor) -> int:
    """Return the rank of a matrix's change from a base if it is low, as an adapter's; else 0."""
    after, start = corner_of(side), corner_of(base)
    if after is None or start is None or after.shape != start.shape:
        return 0
    rank = rank_of(after - start, start, max(EPSILON[side.dtype], EPSILON[base.dtype]))
    return rank if rank < min(start.shape) else 0


def corner_of(side: Tensor) -> NDArray[np.float64] | None:
    """Return the first rows and columns of a matrix of floats; None of anything else."""
    if len(side.shape) != 2 or side.dtype not in FLOATS or (bits := readable_bits(side)) is None:
        return None
    corner = values_of(np.ascontiguousarray(bits[:CORNER, :CORNER]), side.dtype).astype(np.float64)
    return corner if np.isfinite(corner).all() else None


def rank_of(change: NDArray[np.float64], around: NDArray[np.float64], epsilon: float) -> int:
    """Return the rank of a difference of rounded matrices; 0 if rounding may have made its smallest part."""
    parts = np.linalg.svd(change, compute_uv=False)
    rounding = SAFETY * epsilon * float(np.abs(around).max() + np.abs(change).max()) * sum(np.sqrt(change.shape))
    rank = int((parts > rounding).sum())
    return rank if rank and parts[rank - 1] > GAP * rounding else 0
