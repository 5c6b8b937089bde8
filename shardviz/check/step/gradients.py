"""`unreduced-gradient`, `unreduced-output`: copies of one gradient or output were never made to agree.

Along an axis that does not split it every rank must have the same gradient, and the same output. Where they differ
along such an axis and their sum or mean is the unsharded model's, each rank has only its own part. Quiet where `.grad`
is None (HSDP between backward and all-reduce) and where a Partial placement says that the sum is still to come.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.finding import Finding
from shardviz.check.step.reductions import missing_reduction
from shardviz.check.step.words import claimed_text, number

if TYPE_CHECKING:
    from shardviz.check.step.compared import Compared

REFS = ("pytorch#154888", "Megatron-LM#1446")


def check_unreduced(one: Compared) -> Finding | None:
    """Return the finding if copies of a gradient or output differ along an axis, and a reduction makes them right."""
    missing = missing_reduction(one) if one.copies_differ_along else None
    if missing is None:
        return None
    reduction, over, ratio = missing
    axes = " and ".join(over)
    low, high, worst = _farthest(one)
    whole = "the unsharded model's" if ratio == 1 else f"{ratio} of the unsharded model's"
    what = "gradient" if one.role == "grad" else "output"
    op = "AVG" if reduction == "mean" else "SUM"
    cause, fix = _of_gradient(axes, op, over) if one.role == "grad" else _of_output(axes, op, over)
    return Finding(
        "unreduced-gradient" if one.role == "grad" else "unreduced-output",
        "error",
        one.name,
        one.wrong,
        f"the {what} differs along {axes}: rank {low} and rank {high} are up to {number(worst)} apart; their "
        f"{reduction} over {axes} is {whole}",
        claimed=claimed_text(one),
        held=f"each rank's own part (+{', +'.join(over)})",
        cause=cause,
        fix=fix,
        refs=REFS if one.role == "grad" else (),
    )


def _of_gradient(axes: str, op: str, over: tuple[str, ...]) -> tuple[str, str]:
    calls = " and ".join(f"all_reduce(grad, op=ReduceOp.{op}, group=mesh.get_group({axis!r}))" for axis in over)
    return (
        f"Nothing reduced this gradient over {axes}: the parameter is outside what FSDP, DDP or a tensor-parallel "
        "style manages there, or the reduction ran over a group of one",
        f"after backward, {calls}; or give the parameter to the wrapper whose mesh has {axes}",
    )


def _of_output(axes: str, op: str, over: tuple[str, ...]) -> tuple[str, str]:
    calls = " and ".join(f"all_reduce(output, op=ReduceOp.{op}, group=mesh.get_group({axis!r}))" for axis in over)
    return (
        f"Each rank multiplied its own part of the features and nothing added the products over {axes}, as "
        "RowwiseParallel does",
        f"use RowwiseParallel, or the differentiable {calls} of torch.distributed.nn.functional, before anything else "
        "reads the output",
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
