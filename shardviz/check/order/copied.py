"""Buffers that are copies of a weight, as an average of the weights is when it starts: the weight's ids are their own.

Sharding code may copy a weight into such a buffer, whose own ids are then gone. The buffer is right if it was equal to
the weight before sharding too, and has the weight's elements where its placements say. Copies of one number, as of ones
or zeros, show nothing; neither does a weight that holds something else than its own elements, as two that were swapped.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.dump.dump import Dump, Tensor
    from shardviz.dump.records.tensors import Stamp


def as_own(dump: Dump, name: str, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return what one rank holds, with the ids of the weight that a buffer is a copy of as the buffer's own.

    Args:
        dump: The dump.
        name: The tensor's name.
        ids: Ids from 1 within the tensor, and `-1 - id` for the id of another tensor.
    """
    stamp = dump.stamps.get(name)
    if stamp is None or not ids.size or not np.all(ids < -1):
        return ids
    first = counted_from(dump, stamp, int(-1 - ids.max()), int(-1 - ids.min()))
    return ids if first == stamp.first else -ids - first


def counted_from(dump: Dump, stamp: Stamp, least: int, most: int) -> int:
    """Return the first id of a tensor, or of the weight that it is a copy of and that has all ids between two."""
    if stamp.role != "buffer" or not 1 <= least <= most <= dump.last_id:
        return stamp.first
    owner = dump.owner(least)
    is_copy = dump.owner(most) == owner and _is_copy(dump, stamp, owner)
    return dump.first_ids[owner] if is_copy else stamp.first


def _is_copy(dump: Dump, stamp: Stamp, owner: str) -> bool:
    """Whether a buffer had a weight's numbers before sharding, and the weight still has its own elements."""
    weight = dump.stamped.get(owner)
    if weight is None or weight.role != "param" or stamp.shape != dump.stamps[owner].shape:
        return False
    digests = {_digest_before(dump, "buffer", stamp.name), _digest_before(dump, "param", owner)}
    return len(digests) == 1 and "" not in digests and _has_own(dump, weight, owner)


def _has_own(dump: Dump, weight: Tensor, name: str) -> bool:
    """Whether all elements that ranks hold of a weight are its own, in whatever order."""
    return all(
        shard.held is not None or not math.prod(shard.body.local_shape) or dump.local_ids(shard, name).min() > 0
        for shard in weight.shards.values()
    )


def _digest_before(dump: Dump, role: str, name: str) -> str:
    """Return the digest of what the unsharded model had; empty if it was not captured, or is one number."""
    tensor = dump.find("reference", role, name)
    if tensor is None or tensor.first.body.constant:
        return ""
    return tensor.first.digest(tensor.index(name))
