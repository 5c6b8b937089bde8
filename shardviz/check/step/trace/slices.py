"""Activations that are normalized by the statistics of a rank's own part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.explain.modules import StatisticsOfPart
from shardviz.relate.measures import factors_of_slices
from shardviz.relate.tolerance import LEAST_STATISTIC

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.check.step.compared import Compared
    from shardviz.explain.finding import Finding


def check_own_statistics(result: Compared) -> Finding | None:
    """Return the finding if values are the unsharded model's times a number plus a number, those of each slice."""
    if result.role != "output":
        return None
    for dims in _kept(result.wanted.ndim):
        axes = [axis for axis in result.mesh.axes if _splits(result, axis, dims)]
        factors = [factors_of_slices(result, rank, dims) for rank in result.wrong] if axes else []
        if factors and all(own is not None for own in factors):
            joined = np.concatenate([own for own in factors if own is not None])
            if float(joined.max() - joined.min()) > LEAST_STATISTIC:
                return _of_statistics(result, dims, " and ".join(axes))
    return None


def _kept(ndim: int) -> Iterator[tuple[int, ...]]:
    """Yield the dims whose indices share numbers: all but the features, as of a norm of rows; channels alone."""
    if ndim > 1:
        yield tuple(range(ndim - 1))
        yield (1,)
        yield (ndim - 1,)


def _of_statistics(result: Compared, dims: tuple[int, ...], axes: str) -> Finding:
    per = "row" if len(dims) > 1 else f"index of dim {dims[0]}"
    which = f"on each rank every {per} of the {result.what}"
    return result.finding(
        StatisticsOfPart(axes), f"{which} is the unsharded model's with a different factor and offset"
    )


def _splits(result: Compared, axis: str, kept: tuple[int, ...]) -> bool:
    """Whether an axis splits a dim that the numbers are taken over."""
    chains = result.claimed.chains if result.claimed is not None else ()
    return any(axis in chain for dim, chain in enumerate(chains) if dim not in kept)
