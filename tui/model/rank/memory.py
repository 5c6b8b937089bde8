"""The numbers of a rank's tensor beside those that it should hold, or beside those of another copy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.check.order.as_claimed import claimed_dims
from shardviz.check.values.copies import copies_of
from shardviz.dump.content import leaves
from shardviz.errors import DumpError, ShardvizError
from shardviz.layout.region import Region, indices

from .cells import Beside, Ids, Values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardviz.dump.dump import Dump, Shard, Tensor
    from shardviz.layout.region import Ranges

    Numbers = NDArray[Any]


def part_text(shard: Shard) -> str:
    """Write which part of a tensor a shard holds: `[2:4, 0:12]`; of one without ids the local shape: `[2, 12]`."""
    if not math.prod(shard.body.local_shape):
        return "nothing"
    if shard.held is not None:
        flat = shard.layout is not None and shard.layout.flat is not None
        return f"flat {shard.held}" if flat else str(shard.held)
    return "scattered ids" if shard.body.moment == "stamped" else str(list(shard.body.local_shape))


def ids_in_memory(dump: Dump, tensor: Tensor, rank: int, name: str = "") -> Ids:
    """Return the elements that a rank holds.

    Raises:
        DumpError: The dump has no ids of it, or they are too many to lay out.
    """
    shard = tensor.shards[rank]
    if tensor.moment != "stamped":
        raise DumpError(f"{tensor.name} was not stamped, so it has no ids")
    whole = shard.layout.index_shape if shard.layout else tensor.shape
    if shard.held is not None:
        return Ids("held", shard.held.shape, whole, tuple(map(indices, shard.held.dims)))
    ids = dump.local_ids(shard, name or tensor.names[0]) - 1
    return Ids("held", ids.shape, whole, array=ids.reshape(math.prod(ids.shape[:-1]), ids.shape[-1] if ids.ndim else 1))


def claimed_in_memory(shard: Shard) -> Ids | None:
    """Return the elements that a rank should hold by its placements; None for a plain tensor."""
    layout = shard.layout
    dims: tuple[Ranges, ...] | None = claimed_dims(layout).get(shard.rank) if layout is not None else None
    if layout is None or dims is None:
        return None
    return Ids("claimed", Region(dims).shape, layout.index_shape, tuple(map(indices, dims)))


def ids_beside(dump: Dump, tensor: Tensor, rank: int, name: str = "", index: Sequence[int] | None = None) -> Beside:
    """Return the elements that a rank holds beside those that it should hold.

    Args:
        dump: The dump.
        tensor: The tensor.
        rank: The rank.
        name: Which of the tensor's names.
        index: The chosen element.

    Raises:
        DumpError: The dump has no ids of it, or they are too many to lay out.
    """
    held = ids_in_memory(dump, tensor, rank, name)
    at = held.find(index) if index is not None and len(index) == len(held.whole) else None
    return Beside(held, claimed_in_memory(tensor.shards[rank]), at)


def values_beside(dump: Dump, tensor: Tensor, rank: int, name: str = "") -> Beside | None:
    """Return the values that a rank held, beside those of another copy: of one that differs, if there is one.

    They are of the latest moment that has them; None where the dump has none.
    """
    name = name or tensor.names[0]
    for moment in ("step", "initial"):
        other = dump.find(moment, tensor.role, name)
        if other is not None and rank in other.shards:
            own = _values(dump, other.shards[rank], name, f"rank {rank}, {moment}")
            if own is not None:
                return Beside(own, _copy(dump, other, rank, name, own))
    return None


def _values(dump: Dump, shard: Shard, name: str, title: str) -> Values | None:
    body = shard.body
    if 0 in body.local_shape or (body.values is None and not body.dense):
        return None
    columns = body.local_shape[-1] if body.local_shape else 1
    if body.values is not None:
        array: Numbers = np.array(leaves(body.values), dtype=object)
    else:
        try:
            array = dump.values(shard, name)
        except ShardvizError:
            return None
    return Values(title, body.local_shape, array.reshape(-1, columns))


def _copy(dump: Dump, tensor: Tensor, rank: int, name: str, own: Values) -> Values | None:
    """Return the values of another rank that should be equal, first of one whose values are not."""
    group = next((group for group in copies_of(tensor, dump.stamped.get(name)) if rank in map(_rank, group)), [])
    at = tensor.index(name)
    digest = tensor.shards[rank].digest(at)
    for shard in sorted(group, key=lambda shard: shard.digest(at) == digest):
        other = _values(dump, shard, name, f"copy on rank {shard.rank}") if shard.rank != rank else None
        if other is not None and other.shape == own.shape:
            return other
    return None


def _rank(shard: Shard) -> int:
    return shard.rank
