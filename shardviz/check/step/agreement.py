"""How near a step came to the unsharded model's, as numbers: the loss, and the gradient that is farthest off."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardviz.check.step.compared import Compared, compared
from shardviz.relate.values import farthest

if TYPE_CHECKING:
    from shardviz.dump.dump import Dump


@dataclass(frozen=True, slots=True)
class Agreement:
    """A sharded step beside the unsharded model's.

    Attributes:
        loss: The loss of the sharded step over all ranks, or of the first rank that has a wrong one; NaN if it was not
            captured.
        odd_rank: The rank that `loss` is of, if others have the right one.
        loss_wanted: The unsharded model's.
        num_right: How many gradients are the unsharded model's.
        largest_error_of_right: The largest difference of any element of them, on any rank.
        num_wrong: How many gradients are not.
        largest_error_of_wrong: The largest difference of any element of those, on any rank; infinite if one has NaN
            or infinity.
    """

    loss: float
    odd_rank: int | None
    loss_wanted: float
    num_right: int
    largest_error_of_right: float
    num_wrong: int
    largest_error_of_wrong: float


def agreement(dump: Dump) -> Agreement | None:
    """Return how near the step came; None if the dump has none."""
    found = [one for one in compared(dump) if not one.incomparable] if dump.at("reference") else []
    losses = [one for one in found if one.role == "scalar" and one.name == "loss" and one.reduced]
    gradients = [one for one in found if one.role == "grad"]
    if not losses and not gradients:
        return None
    of_rank = {rank: float(value) for rank, value in losses[0].reduced.items()} if losses else {}
    odd = losses[0].wrong if losses else ()
    loss = of_rank[next(iter((*odd, *of_rank)))] if of_rank else math.nan
    odd_rank = odd[0] if 0 < len(odd) < len(of_rank) else None
    wanted = float(losses[0].wanted) if losses else math.nan
    right, wrong = ([one for one in gradients if bool(one.wrong) == is_wrong] for is_wrong in (False, True))
    near, far = (max(map(_farthest, ones), default=0.0) for ones in (right, wrong))
    return Agreement(loss, odd_rank, wanted, len(right), near, len(wrong), far)


def _farthest(result: Compared) -> float:
    return max(
        (farthest(values, result.wanted_of(rank)) for rank, values in result.reduced.items()),
        default=0.0,
    )
