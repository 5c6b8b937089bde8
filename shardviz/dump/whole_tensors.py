"""Whole tensors put together offline from their shards, by the claimed layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.errors import DumpError
from shardviz.text import printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.dump.dump import Dump, Tensor


def whole_values(dump: Dump, tensor: Tensor, name: str) -> NDArray[np.float64]:
    """Return a tensor's values, each from the lowest rank that has it; NaN if no rank does.

    Returns:
        Them in the shape in which the claimed regions count; the lowest rank's own of a plain tensor.

    Raises:
        DumpError: The dump does not have the values, or a rank does not have the shape that it claims.
    """
    return values_and_places(dump, tensor, name)[0]


def values_and_places(dump: Dump, tensor: Tensor, name: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return a tensor's whole values, and which of them any rank of the dump has.

    Raises:
        DumpError: The dump does not have the values, or a rank does not have the shape that it claims.
    """
    shape = tensor.claimed.index_shape if tensor.claimed else tensor.shape
    whole, has = np.full(shape, np.nan), np.zeros(shape, dtype=bool)
    for rank, shard in reversed(list(tensor.shards.items())):
        values = dump.values(shard, name)
        if shard.layout is None:
            whole, has = values, np.ones(values.shape, dtype=bool)
            continue
        region = shard.layout.region_of_rank(rank)
        if region.shape != values.shape:
            own_shape, claimed = list(values.shape), list(region.shape)
            raise DumpError(f"{printable(name)}: rank {rank} has a shape of {own_shape}, but claims {claimed}")
        if not region.is_within(shape):
            raise DumpError(f"{printable(name)}: rank {rank} claims a part that lies outside {list(shape)}")
        places = region.flat_ids(shape)
        whole.ravel()[places], has.ravel()[places] = values, True
    return whole, has


def shape_before(dump: Dump, tensor: Tensor, name: str) -> tuple[int, ...]:
    """Return a tensor's global shape; a plain one's is its weight's before sharding.

    A plain tensor that doesn't have the local shape of its stamped weight keeps its own shape.

    Args:
        dump: The dump.
        tensor: The tensor, or the fold that it is in.
        name: Its name; that of an optimizer's state begins with its weight's.
    """
    weight = name.rpartition(".")[0] if tensor.role == "optim" else name
    stamp = dump.stamps.get(weight)
    stamped = dump.stamped.get(weight) if tensor.claimed is None else None
    is_alike = stamped is not None and stamped.first.body.local_shape == tensor.first.body.local_shape
    return stamp.shape if stamp is not None and is_alike else tensor.shape
