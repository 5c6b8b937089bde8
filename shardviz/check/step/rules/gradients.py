"""`unreduced-gradient`, `unreduced-output`: copies of one gradient or output were never made to agree.

Along an axis that does not split it every rank must have the same gradient, and the same output. Where they differ
along such an axis and their sum or mean is the unsharded model's, each rank has only its own part. Quiet where `.grad`
is None (HSDP between backward and all-reduce) and where a Partial placement says that the sum is still to come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.step.rules.ratios.scale import advice_on_ratio, times_text
from shardviz.check.step.rules.reductions import missing_reduction, own_part, ranks_by_part, reduction_over
from shardviz.check.step.words import apart_text, claimed_text
from shardviz.explain.finding import Finding
from shardviz.text import continued

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.check.step.compared import Compared
    from shardviz.check.step.rules.ratios.factors import Batch

MAX_LISTED = 4
OPS = {"mean": "AVG", "sum": "SUM", "norm": "SUM"}
"""Reductions, as torch calls what is sent."""

REFS = ("pytorch#154888", "Megatron-LM#1446")


def check_unreduced(one: Compared, batch: Batch | None = None) -> Finding | None:
    """Return the finding if copies of a gradient or output differ along an axis, and a reduction makes them right.

    Args:
        one: The result.
        batch: Whether each axis of the run splits the batch; None where that is not known.
    """
    missing = missing_reduction(one) if one.copies_differ_along else None
    if missing is None:
        return _among_holders(one)
    reduction, over, ratio = missing
    axes = " and ".join(over)
    low, high, worst = _farthest(one, one.mesh.groups(one.copies_differ_along[0]))
    whole = one.whose if ratio == 1 else f"{times_text(ratio)} {one.whose}"
    what = "gradient" if one.role == "grad" else "output"
    op = OPS[reduction]
    cause, fix = _of_gradient(axes, op, over) if one.role == "grad" else _of_output(axes, op, over)
    if one.role == "grad" and ratio != 1:  # two things are wrong, and mending one of them leaves the other
        of_rest = advice_on_ratio(one, ratio, over, batch)
        cause, fix = (
            f"{cause}. Even then it is {times_text(ratio)} what is due: {continued(of_rest[0])}",
            f"{fix}; and {of_rest[1]}",
        )
    return Finding(
        "unreduced-gradient" if one.role == "grad" else "unreduced-output",
        "error",
        one.name,
        one.wrong,
        f"the {what} differs along {axes}: {apart_text(low, high, worst)}",
        details=(f"their {reduction} over {axes} is {whole}",),
        claimed=claimed_text(one),
        held=own_part(reduction, over),
        cause=cause,
        fix=fix,
        refs=REFS if one.role == "grad" else (),
    )


def _among_holders(one: Compared) -> Finding | None:
    """Return the finding if a reduction over the ranks that hold the same part, fewer than along any axis, is right."""
    holders = ranks_by_part(one)
    if one.role != "grad" or max(map(len, holders), default=0) < 2:
        return None
    low, high, worst = _farthest(one, holders)
    reduction = reduction_over(one, holders) if worst > one.tolerance else None
    if reduction is None:
        return None
    groups = [list(ranks) for ranks in holders]
    return Finding(
        "unreduced-gradient",
        "error",
        one.name,
        one.wrong,
        f"the gradient differs between ranks that hold the same part: {apart_text(low, high, worst)}",
        details=(f"the {reduction} over those that do is {one.whose}",),
        claimed=claimed_text(one),
        held="each rank's own contribution",
        cause=f"There are {len(holders)} parts on {len(one.reduced)} ranks, as of key and value heads that are fewer "
        "than ranks, and nothing reduced the gradient of a part over the ranks that hold it",
        fix=f"after backward, all_reduce(grad, op=ReduceOp.{OPS[reduction]}, group=group), with group, _ = "
        f"torch.distributed.new_subgroups_by_enumeration({groups[:MAX_LISTED]}{' + ...' * (len(groups) > MAX_LISTED)})",
        refs=("transformers#47811",),
    )


def _of_gradient(axes: str, op: str, over: tuple[str, ...]) -> tuple[str, str]:
    calls = " and ".join(f"all_reduce(grad, op=ReduceOp.{op}, group=mesh.get_group({axis!r}))" for axis in over)
    return (
        f"Nothing reduced this gradient over {axes}: the parameter is outside what FSDP, DDP or a tensor-parallel "
        "style manages there, or the reduction ran over a group of one",
        f"after backward, {calls}, of a DTensor on grad.to_local(); or give the parameter to the wrapper whose mesh "
        f"has {axes}",
    )


def _of_output(axes: str, op: str, over: tuple[str, ...]) -> tuple[str, str]:
    calls = " and ".join(f"all_reduce(output, op=ReduceOp.{op}, group=mesh.get_group({axis!r}))" for axis in over)
    return (
        f"Each rank multiplied its own part of the features and nothing added the products over {axes}, as "
        "RowwiseParallel does; or they were labelled as copies",
        f"use RowwiseParallel; or call {calls} in the forward of a torch.autograd.Function whose backward returns the "
        "gradient as it is, before anything else reads the output; label terms that are still to be added by Partial()",
    )


def _farthest(one: Compared, groups: Sequence[Sequence[int]]) -> tuple[int, int, float]:
    """Return the two neighbours within groups whose copies of one part are farthest apart, and how far."""
    return max(one.neighbours_apart(groups), key=lambda pair: pair[2])
