"""`unreduced-gradient`: copies of one parameter, or copies of its gradient, were never made to agree.

Along an axis that does not split the parameter every rank must step by the same gradient. Where the gradients differ
along such an axis each rank has only what its own part of the batch gave, and the optimizer drives the copies apart.
Quiet where `.grad` is None (HSDP between backward and all-reduce) and where a Partial placement says that the sum is
still to come.
"""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.finding import Finding
from shardviz.check.step.words import claimed_text, number

if TYPE_CHECKING:
    from shardviz.check.step.compared import Compared

REFS = ("pytorch#154888", "Megatron-LM#1446")


def check_gradient(one: Compared) -> Finding | None:
    """Return the finding if copies of a gradient or output differ along an axis."""
    if one.role != "grad" or not one.copies_differ_along:
        return None
    axes = " and ".join(one.copies_differ_along)
    low, high, worst = _farthest(one)
    reduction, over = _missing_reduction(one)
    becomes = f"; their {reduction} over {' and '.join(over)} is the unsharded model's" if reduction else ""
    op = "AVG" if reduction == "mean" else "SUM"
    calls = " and ".join(f"all_reduce(grad, op=ReduceOp.{op}, group=mesh.get_group({axis!r}))" for axis in over)
    return Finding(
        "unreduced-gradient",
        "error",
        one.name,
        one.wrong,
        f"the gradient differs along {axes}: rank {low} and rank {high} are up to {number(worst)} apart{becomes}",
        claimed=claimed_text(one),
        held=f"each rank's own contribution (+{', +'.join(one.copies_differ_along)})",
        cause=f"Nothing reduced this gradient over {axes}: the parameter is outside what FSDP, DDP or a "
        "tensor-parallel style manages there, or the reduction ran over a group of one",
        fix=f"after backward, {calls}; or give the parameter to the wrapper whose mesh has {axes}",
        refs=REFS,
    )


def _farthest(one: Compared) -> tuple[int, int, float]:
    """Return the two neighbours along the first such axis whose copies are farthest apart, and how far."""
    pairs = [
        (low, high, float(np.max(np.abs(one.reduced[low] - one.reduced[high]), initial=0.0)))
        for group in one.mesh.groups(one.copies_differ_along[0])
        for low, high in pairwise(group)
        if low in one.reduced and high in one.reduced and one.regions[low] == one.regions[high]
    ]
    return max(pairs, key=lambda pair: pair[2])


def _missing_reduction(one: Compared) -> tuple[str, tuple[str, ...]]:
    """Return the reduction, `mean` or `sum`, and the fewest axes that make it right; empty and all axes if none do."""
    for count in range(1, len(one.copies_differ_along) + 1):
        for axes in combinations(one.copies_differ_along, count):
            for op, name in (("avg", "mean"), ("sum", "sum")):
                values = dict(one.reduced)
                for axis in axes:
                    values = one.over(axis, op, values)
                if values and all(one.is_right(rank, value) for rank, value in values.items()):
                    return name, axes
    return "", one.copies_differ_along
