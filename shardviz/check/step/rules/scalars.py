"""`unreduced-scalar`: a logged value is another one on every rank, where each has only its own part of the whole.

What a training loop prints is of the whole batch and the whole model: the same on every rank. `.item()` of a DTensor
whose placement is Partial reads this rank's contribution and asks nobody (pytorch#144054).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.step.rules.reductions import missing_reduction, own_part
from shardviz.check.step.words import claimed_text, number
from shardviz.explain.finding import Finding
from shardviz.text import listed

if TYPE_CHECKING:
    from shardviz.check.step.compared import Compared

MAX_LISTED = 4


def check_scalar(one: Compared) -> Finding | None:
    """Return the finding if a scalar differs along an axis, and is not just wrong on some ranks."""
    missing = missing_reduction(one)
    if not one.copies_differ_along or (missing is None and len(one.wrong) < len(one.reduced)):
        return None
    axes = " and ".join(missing[1] if missing else one.copies_differ_along)
    shown = listed(dict.fromkeys(number(float(values.sum())) for values in one.reduced.values()), MAX_LISTED)
    cause, fix = _OWN if missing is None else _NORM if missing[0] == "norm" else _PART
    return Finding(
        "unreduced-scalar",
        "error",
        one.name,
        one.wrong,
        f"ranks log {shown} where the unsharded model logs {number(float(one.wanted.sum()))}",
        details=(f"their {missing[0]} over {axes} is the unsharded model's value",) if missing else (),
        claimed=claimed_text(one),
        held=own_part(*missing[:2]) if missing else "a value of each rank's own",
        cause=cause,
        fix=fix.format(axes=axes, op="AVG" if missing and missing[0] == "mean" else "SUM"),
        refs=("pytorch#144054",),
    )


_PART = (
    ".item() or float() of a DTensor with a Partial placement, or of a local tensor, reads its own part only",
    "all_reduce the value over {axes} with ReduceOp.{op} before it is logged; of a DTensor, log full_tensor().item()",
)
_OWN = (
    "Each rank computes it from its own part, and no sum or mean makes up for that: a softmax or an accuracy over a "
    "shard; or .item() of a DTensor that is not whole",
    "compute it of the whole: gather the shards over {axes} first, or use loss_parallel() and full_tensor()",
)
_NORM = (
    "A norm was taken of what each rank holds only",
    "all_reduce the sum of squares over {axes} before the root, as clip_grad_norm_ does for DTensors",
)
