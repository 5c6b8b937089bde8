"""`unreduced-gradient` of a tied weight whose names went to different ranks: each has the gradient of its own use.

On stages of a pipeline an embedding and a head cannot share storage. They are copies, which stay equal only where the
sum of both gradients is taken on both (Megatron-LM's embedding group).
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.rules.ratios.scale import ratio_to_wanted
from shardviz.check.step.words import claimed_text
from shardviz.explain.gradients import TiedShardsMisaligned, UnsummedTiedGradients

if TYPE_CHECKING:
    from shardviz.check.step.compared import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.explain.finding import Finding


def check_tied(evidence: Evidence, one: Compared) -> Finding | None:
    """Return the finding if the gradients of names that were one tensor were not summed, or not rightly."""
    names = evidence.tied_to(one.name)
    others = [evidence.gradients[name] for name in names if name in evidence.gradients]
    if not others:
        return None
    if not all(_sum_is_right(one, rank, others) for rank in one.reduced):
        return _summed_as_they_lie(one, others)
    listed = " and ".join(other.name for other in others)
    if ratio_to_wanted(one, one.reduced) == Fraction(1, 1 + len(others)):
        return _averaged(one, listed, 1 + len(others))
    return UnsummedTiedGradients().finding(
        one.name,
        one.wrong,
        f"the gradient is of this name's use only: it was one tensor with {listed}, which other ranks have, and the "
        "sum of their gradients is the unsharded model's",
        claimed=claimed_text(one),
    )


def _averaged(one: Compared, listed: str, uses: int) -> Finding:
    return UnsummedTiedGradients(uses).finding(
        one.name,
        one.wrong,
        f"the gradient is 1/{uses} of the unsharded model's: the gradients of its {uses} uses were averaged",
        kind="wrong-scale",
        details=(f"it was one tensor with {listed}, which other ranks have",),
        claimed=claimed_text(one),
    )


def _summed_as_they_lie(one: Compared, others: list[Compared]) -> Finding | None:
    """Return the finding if ranks have one gradient for local shards that are different parts of a tied weight."""
    other = next((other for other in others if all(_shared(one, rank, other) for rank in one.wrong)), None)
    if other is None:
        return None
    return TiedShardsMisaligned().finding(
        one.name,
        one.wrong,
        f"the gradient is equal to that of {other.name} on other ranks, with which it was one tensor: but the local "
        "shards are different parts of it",
        claimed=claimed_text(one),
    )


def _shared(one: Compared, rank: int, other: Compared) -> bool:
    """Whether another rank has a rank's gradient for another part of the other name."""
    own = one.reduced[rank]
    return bool(np.any(own)) and any(
        values.size == own.size and other.regions[at] != one.regions[rank] and one.near(own.ravel(), values.ravel())
        for at, values in other.reduced.items()
        if at != rank
    )


def _sum_is_right(one: Compared, rank: int, others: list[Compared]) -> bool:
    """Whether a rank's gradient and those of the same part under the other names sum to what is wanted."""
    total = one.reduced[rank]
    for other in others:
        holder = next((at for at in other.reduced if other.regions[at] == one.regions[rank]), None)
        if holder is None:
            return False
        total = total + other.reduced[holder]
    return one.is_right(rank, total)
