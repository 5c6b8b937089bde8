"""Weights whose elements nobody can place: captured without ids and without a reference.

That copies agree and that shards differ says nothing about where their elements belong, so that no such tensor may be
called in order.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shardviz.check.report import NotChecked
from shardviz.dump.records.base import WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Set as AbstractSet

    from shardviz.dump.dump import Dump, Tensor

WHY = (
    "placement: it has no ids and no reference; give its checkpoint (shardviz run --reference, or reference= of "
    "shardviz.capture), or stamp the model before it is sharded"
)

COMPLEX = (
    "placement: it has no reference, and no stamp is complex; copies of it are compared. If a checkpoint has it, give "
    "that (shardviz run --reference, or reference= of shardviz.capture)"
)


def check_unplaced(dump: Dump, known: AbstractSet[str]) -> Iterator[NotChecked]:
    """Yield the weights without ids, but for those of a single element, which has one place only.

    Args:
        dump: The dump.
        known: Names that were already reported, as wrong or as not checked.
    """
    weights = [tensor for tensor in dump.at("stamped") if tensor.role in WEIGHTS]
    stamped = {name for tensor in weights for name in tensor.names}
    for tensor in dump.at("initial"):
        if tensor.role in WEIGHTS and math.prod(tensor.shape) > 1 and not (stamped and _is_whole(tensor)):
            why = COMPLEX if tensor.dtype.startswith("complex") else WHY
            yield from (NotChecked(name, why, "order") for name in tensor.names if name not in stamped | known)


def _is_whole(tensor: Tensor) -> bool:
    """Whether every rank has all of a plain tensor: in a stamped model one without ids has a dtype that holds none."""
    shards = tensor.shards.values()
    return all(shard.layout is None and shard.body.local_shape == tensor.shape for shard in shards)
