"""`unreduced-gradient` of weights that have no gradient on any rank (`.grad is None`), and one in the unsharded step.

FSDP holds gradients back until it may reduce them, so that a gradient that is absent is an error only where the
optimizer then stepped without it, or where the weight is not one that FSDP can hold back: nothing flows back to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.finding import Finding, NotChecked
from shardviz.check.step.compared import laid_out
from shardviz.check.step.rules.factors import batch_axes
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.check.step.evidence import Evidence
    from shardviz.dump.dump import Dump

WHY = "its gradient: .grad is None on every rank after the step"
MAX_LISTED = 8


def check_absent(evidence: Evidence) -> Iterator[Finding | NotChecked]:
    """Yield the weights without a gradient that should have one; those of which that cannot be said are not checked."""
    dump, absent = evidence.dump, evidence.without_gradient
    left_alone = [name for name in absent if _is_left_alone(evidence, name)]
    cut = [name for name in absent if name not in left_alone and evidence.gradients and _is_cut(dump, name)]
    yield from (NotChecked(name, WHY, "step") for name in absent if name not in (*left_alone, *cut))
    if left_alone:
        ranks = tuple(sorted(dump.files.ranks))
        yield _finding(left_alone, ranks, "the optimizer's step left them as they were", *_HELD_BACK)
    if cut:
        ranks = tuple(sorted({rank for name in cut for rank in _holders(dump, name)}))
        yield _finding(cut, ranks, "the unsharded model's are not zero", *_CUT)


def _finding(names: list[str], ranks: tuple[int, ...], detail: str, cause: str, fix: str) -> Finding:
    alone = len(names) == 1
    text = "it has" if alone else f"{listed(names, MAX_LISTED)} have"
    sentence = f"{text} no gradient after the step (.grad is None) on any rank"
    return Finding(
        "unreduced-gradient",
        "error",
        names[0] if alone else "",
        ranks,
        sentence,
        details=(detail,),
        cause=cause,
        fix=fix,
    )


_HELD_BACK = (
    "No reduction ended with the last micro-batch: FSDP keeps gradients to itself while its gradient sync or its "
    "all-reduce is off; or the optimizer ran after zero_grad()",
    "call set_requires_gradient_sync(True), and set_requires_all_reduce(True) under HSDP, before the backward of the "
    "last micro-batch; step the optimizer before zero_grad()",
)
_CUT = (
    "Nothing flows back to it in the sharded model, or it is frozen there (requires_grad=False): the graph is cut "
    "after it by a collective of torch.distributed, which has no backward, or by .detach() or .data",
    "call collectives of the forward in a torch.autograd.Function that has the backward they need, or use "
    "RowwiseParallel and ColwiseParallel; freeze in build() what is meant to be frozen",
)


def _is_left_alone(evidence: Evidence, name: str) -> bool:
    """Whether the unsharded model's optimizer moved a weight that the sharded one left where it was."""
    dump = evidence.dump
    before, wanted = dump.find("reference", "param", name), dump.find("updated", "param", name)
    stepped = dump.find("step", "param", name)
    if before is None or wanted is None or stepped is None or not evidence.results:
        return False
    start = dump.values(before.first, name)
    if np.array_equal(start, dump.values(wanted.first, name)):
        return False
    one = laid_out(dump, stepped, name, start, evidence.results[0].rounding)
    return not one.incomparable and all(np.array_equal(one.values[rank], one.wanted_of(rank)) for rank in one.values)


def _is_cut(dump: Dump, name: str) -> bool:
    """Whether FSDP cannot be what holds a gradient back, and the unsharded model's is not zero."""
    weight, gradient = dump.find("initial", "param", name), dump.find("reference", "grad", name)
    if weight is None or gradient is None or not np.any(dump.values(gradient.first, name)):
        return False
    claimed = weight.claimed
    if claimed is None:
        return True
    batch = batch_axes(dump) or {}
    return not claimed.flat and not any(batch.get(axis, True) for axis in claimed.split_axes)


def _holders(dump: Dump, name: str) -> tuple[int, ...]:
    weight = dump.find("initial", "param", name)
    return tuple(weight.shards) if weight is not None else ()
