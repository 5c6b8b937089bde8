"""Why elements of a tensor are zero if its ids should be.

A whole shard of zeros is memory that nothing was written to. How far that goes says what went wrong: all weights of the
model on all ranks, one weight on all ranks, or some ranks. Only zeros beside a tensor that is complete are padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.order.rules.ids.counts import count_ids
from shardviz.explain.content import (
    BufferNotWritten,
    NoWeightLoaded,
    PartNotWritten,
    RanksNotWritten,
    WeightNotLoaded,
    ZerosAmongElements,
)

if TYPE_CHECKING:
    from shardviz.check.order.case import Case
    from shardviz.explain.order import Disorder


def cause_of_zeros(case: Case) -> Disorder:
    """Return why a case holds zeros and no other foreign values."""
    shards = [coord for coord, shard in case.shards.items() if 0 not in shard.body.local_shape]
    blank = [coord for coord in shards if coord in case.ids and not case.ids[coord].any()]
    if not blank:
        return PartNotWritten() if count_ids(case).num_missing else ZerosAmongElements()
    if len(blank) < len(shards):
        return RanksNotWritten(tuple(sorted(map(case.rank, blank))))
    if case.tensor.role != "param":
        return BufferNotWritten()
    is_nothing_loaded = case.dump.all_without_ids == "zeros" and len(case.dump.without_ids) > 1
    return NoWeightLoaded() if is_nothing_loaded else WeightNotLoaded()
