"""`unreduced-gradient` of a tied weight whose names went to different ranks: each has the gradient of its own use.

On stages of a pipeline an embedding and a head cannot share storage. They are copies, which stay equal only where the
sum of both gradients is taken on both (Megatron-LM's embedding group).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.finding import Finding
from shardviz.check.step.words import claimed_text

if TYPE_CHECKING:
    from shardviz.check.step.compared import Compared
    from shardviz.check.step.evidence import Evidence


def check_tied(evidence: Evidence, one: Compared) -> Finding | None:
    """Return the finding if the gradients of names that were one tensor sum to the unsharded model's."""
    names = evidence.tied_to(one.name)
    others = [evidence.gradients[name] for name in names if name in evidence.gradients]
    if not others or not all(_sum_is_right(one, rank, others) for rank in one.reduced):
        return None
    listed = " and ".join(other.name for other in others)
    return Finding(
        "unreduced-gradient",
        "error",
        one.name,
        one.wrong,
        f"the gradient is of this name's use only: it was one tensor with {listed}, which other ranks have, and the "
        "sum of their gradients is the unsharded model's",
        claimed=claimed_text(one),
        cause="A tied weight has a copy on each of several stages, and nothing summed the copies' gradients: they "
        "start equal and drift apart",
        fix="after backward, all_reduce the gradients of both with ReduceOp.SUM over a group of the ranks that have "
        "them; start from equal weights",
        refs=("Megatron-LM#299",),
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
