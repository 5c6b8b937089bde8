"""A chain applied: what it gives a rank, beside what the rank holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.relate.contexts import index_shape_of
from shardviz.relate.relations import Filled, Pending, Reassigned
from shardviz.relate.sums import REDUCTIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardviz.relate.pair import Pair
    from shardviz.relate.relations import Chain


def replay(chain: Chain, pair: Pair, rank: int) -> tuple[NDArray[np.float64], NDArray[Any]]:
    """Apply a chain to the wanted tensor.

    Args:
        chain: The chain.
        pair: The pair.
        rank: A rank.

    Returns:
        What the chain gives the rank, and what the rank holds, reduced over the axes that the chain says are pending.
    """
    shape = index_shape_of(pair)
    is_flat = pair.claimed is not None and pair.claimed.flat is not None
    candidates = {name: whole.reshape(shape) if is_flat else whole for name, whole in pair.candidates.items()}
    values = np.asarray(pair.wanted.reshape(shape) if is_flat else pair.wanted, np.float64)
    source, pending = rank, list[Pending]()
    for link in chain:
        if isinstance(link, Pending):
            pending.append(link)
        elif isinstance(link, Reassigned):
            source = link.source_of(rank)
        elif isinstance(link, Filled):
            values = np.full(pair.held[rank].shape, link.value)
        else:
            values = link.apply(values, source, candidates)
    return values, _reduced(pair, rank, pending)


def _reduced(pair: Pair, rank: int, pending: Sequence[Pending]) -> NDArray[np.float64]:
    """Return what a rank holds, reduced over axes in turn."""
    if not pending:
        return np.asarray(pair.held[rank], np.float64)
    group = pair.mesh.group_of(rank, pending[-1].axis)
    return REDUCTIONS[pending[-1].op](np.stack([_reduced(pair, member, pending[:-1]) for member in group]))
