"""A chain applied: what it gives a rank, and what the rank holds. It shares no code with the search."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.relate.casts import rounded
from shardviz.relate.factors import REDUCTIONS
from shardviz.relate.relations import (
    Filled,
    Located,
    Offset,
    Pending,
    Permuted,
    Reassigned,
    Rounded,
    Scaled,
    Transposed,
)
from shardviz.relate.values import part_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardviz.relate.relations import Chain, Pair, Relation

    Values = NDArray[Any]


def replay(chain: Chain, pair: Pair, rank: int) -> tuple[Values, Values]:
    """Apply a chain to the wanted tensor.

    Args:
        chain: The chain.
        pair: The pair.
        rank: A rank.

    Returns:
        What the chain gives the rank, and what the rank holds, reduced over the axes that the chain says are pending.
    """
    values = np.asarray(pair.wanted, np.float64)
    source, pending = rank, list[Pending]()
    for link in chain:
        if isinstance(link, Pending):
            pending.append(link)
        elif isinstance(link, Reassigned):
            source = link.source_of(rank)
        elif isinstance(link, Filled):
            values = np.full(pair.held[rank].shape, link.value)
        elif isinstance(link, Located):
            region = link.layout.region_of_rank(source)
            values = part_of(values.reshape(link.layout.index_shape), region)
        else:
            values = _changed(values, link)
    return values, _reduced(pair, rank, pending)


def _changed(values: Values, link: Relation) -> Values:
    """Return what a link that says nothing of ranks makes of values."""
    match link:
        case Transposed(dims):
            return values.transpose(dims)
        case Permuted(dim, order):
            return values.take(order, dim)
        case Scaled(factor):
            return values * factor
        case Offset(number):
            return values + number
        case Rounded(dtype):
            return rounded(values, dtype)
    raise TypeError(link)


def _reduced(pair: Pair, rank: int, pending: Sequence[Pending]) -> Values:
    """Return what a rank holds, reduced over axes in turn."""
    if not pending:
        return np.asarray(pair.held[rank], np.float64)
    group = pair.mesh.group_of(rank, pending[-1].axis)
    return REDUCTIONS[pending[-1].op](np.stack([_reduced(pair, member, pending[:-1]) for member in group]))
