"""`unreduced-scalar`: a logged value is another one on every rank, where each has only its own part of the whole.

What a training loop prints is of the whole batch and the whole model: the same on every rank. `.item()` of a DTensor
whose placement is Partial reads this rank's contribution and asks nobody (pytorch#144054).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.finding import Finding
from shardviz.check.step.words import claimed_text, number

if TYPE_CHECKING:
    from shardviz.check.step.compared import Compared


def check_scalar(one: Compared) -> Finding | None:
    """Return the finding if a scalar differs along an axis."""
    if not one.copies_differ_along:
        return None
    axes = " and ".join(one.copies_differ_along)
    shown = ", ".join(number(float(values.sum())) for _, values in list(one.reduced.items())[:4])
    more = ", ..." if len(one.reduced) > 4 else ""
    wanted = float(one.wanted.sum())
    reduction = _reduction(one)
    is_whole = f"; their {reduction} over {axes} is the whole's" if reduction else ""
    return Finding(
        "unreduced-scalar",
        "error",
        one.name,
        one.wrong,
        f"ranks log {shown}{more} where the unsharded model logs {number(wanted)}{is_whole}",
        claimed=claimed_text(one),
        held=f"each rank's own part (+{', +'.join(one.copies_differ_along)})",
        cause=".item() or float() of a DTensor with a Partial placement, or of a local tensor, reads its own part only",
        fix=f"log tensor.full_tensor().item(), or all_reduce the value over {axes} first",
        refs=("pytorch#144054",),
    )


def _reduction(one: Compared) -> str:
    for op, name in (("sum", "sum"), ("avg", "mean")):
        values = dict(one.reduced)
        for axis in one.copies_differ_along:
            values = one.over(axis, op, values)
        if all(one.is_right(rank, value) for rank, value in values.items()):
            return name
    return ""
