"""Why elements of a tensor are zero where its ids should be.

A whole shard of zeros is memory that nothing was written to. How far that goes says what went wrong: all weights of the
model on all ranks, one weight on all ranks, or some ranks. Only zeros beside a tensor that is complete are padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.order.advice import Advice
from shardviz.check.order.rules.ids.counts import count_ids
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from shardviz.check.order.case import Case

MAX_LISTED = 4

THROWN_AWAY = (
    "the load wrote into something that is thrown away: .data of a temporary (to_local().data = x), the copy that "
    "full_tensor() gathers, an indexed copy (t[index].copy_(x))"
)

WRITE = "write by param.to_local().copy_(x) under torch.no_grad()"

NO_LOAD = Advice(
    "The weights were never written on any rank, none of the model: the keys of the checkpoint are not the names of "
    f"this model (a prefix, with strict=False), or {THROWN_AWAY}",
    "print what load_state_dict returns: where missing_keys lists the weights, mend the names; where it does not, "
    f"{WRITE}",
)

NO_VALUES = Advice(
    "It was never written on any rank, where other weights were: the checkpoint has no such key, the load passes over "
    f"it, or {THROWN_AWAY}",
    f"look for its name in missing_keys and in the checkpoint; load it and {WRITE}, or initialise it once the model is "
    "materialised (to_empty)",
)

NEVER_WRITTEN = Advice(
    "It was never written on any rank: its memory is as to_empty, zeros_like or register_buffer made it, and nothing "
    "loads it or computes it again",
    "compute or load it on every rank once the model is materialised; a buffer with persistent=False is in no "
    "checkpoint",
)

PADDING = Advice(
    "The elements are padding, or memory that no loader wrote to",
    "write every element of the local shard, and cut padding off before it is labelled",
)

PART = Advice(
    "A part of the shard was never written: what was read has fewer rows than the shard, or the load stops before its "
    "end",
    "compare the shape that is read with the local shard's on these ranks, and write every element of it",
)


def advise_zeros(case: Case) -> Advice:
    """Return why a case holds zeros and no other foreign values."""
    shards = [coord for coord, shard in case.shards.items() if 0 not in shard.body.local_shape]
    blank = [coord for coord in shards if coord in case.ids and not case.ids[coord].any()]
    if not blank:
        return PART if count_ids(case).num_missing else PADDING
    if len(blank) < len(shards):
        return _of_ranks(sorted(map(case.rank, blank)))
    if case.tensor.role != "param":
        return NEVER_WRITTEN
    return NO_LOAD if case.dump.all_without_ids == "zeros" and len(case.dump.without_ids) > 1 else NO_VALUES


def _of_ranks(ranks: list[int]) -> Advice:
    where = named_ranks(ranks, MAX_LISTED)
    return Advice(
        f"The shards of {where} were never written, where the other ranks' were: a file was not read there, or the "
        "load ends early",
        f"look at which files {where} read{'s' if len(ranks) == 1 else ''}, and at conditions on the rank in the load",
    )
