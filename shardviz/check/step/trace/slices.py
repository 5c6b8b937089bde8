"""Activations that are normalized by the statistics of a rank's own part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.explain.modules import StatisticsOfPart
from shardviz.relate.factors import factors_of_rows
from shardviz.relate.tolerance import EXPLAINED_BY_LINE, LEAST_STATISTIC

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shardviz.check.step.compared import Compared
    from shardviz.explain.finding import Finding

FEWEST = 6
"""Numbers that share a factor and an offset: any three are near to a line through two."""


def check_own_statistics(result: Compared) -> Finding | None:
    """Return the finding if values are the unsharded model's times a number plus a number, those of each slice."""
    if result.role != "output":
        return None
    for dims in _kept(result.wanted.ndim):
        axes = [axis for axis in result.mesh.axes if _splits(result, axis, dims)]
        factors = [_factors(result, rank, dims) for rank in result.wrong] if axes else []
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


def _factors(result: Compared, rank: int, dims: tuple[int, ...]) -> NDArray[np.float64] | None:
    """Return the factor of each slice; None if slices are not those wanted times a number plus a number."""
    got, due = (_grouped(values, dims) for values in (result.reduced[rank], result.wanted_of(rank)))
    if got.shape != due.shape or got.shape[1] < FEWEST or not np.all(np.isfinite(got)):
        return None
    centered, other = got - got.mean(1, keepdims=True), due - due.mean(1, keepdims=True)
    factors = factors_of_rows(centered, other)
    if factors is None:
        return None
    left = float(np.abs(centered - factors * other).max())
    apart = float(np.abs(got - due).max())
    fits = left <= min(4 * result.tolerance * max(1.0, float(np.abs(factors).max())), EXPLAINED_BY_LINE * apart)
    return factors.ravel() if fits and np.any(np.abs(factors - 1) > LEAST_STATISTIC) else None


def _grouped(values: NDArray[np.float64], dims: tuple[int, ...]) -> NDArray[np.float64]:
    """Return a row for every index in some dims."""
    moved = np.moveaxis(values, dims, range(len(dims)))
    return moved.reshape(int(np.prod(moved.shape[: len(dims)])), -1)


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
