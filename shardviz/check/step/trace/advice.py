"""Cause and fix of a first wrong module whose values no rule explains: what its inputs and its place suggest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.step.advice import UNEXPLAINED
from shardviz.check.step.trace.calls import is_within
from shardviz.check.step.trace.divergence import pending_axis

if TYPE_CHECKING:
    from shardviz.check.step.advice import Advice
    from shardviz.check.step.evidence import Evidence
    from shardviz.check.step.trace.divergence import Divergence
    from shardviz.dump.records.trace import PointRecord


def advice_on(evidence: Evidence, first: Divergence) -> Advice:
    """Return cause and fix."""
    name = first.module or "the model itself"
    if first.direction == "forward":
        return _unsummed(first) if first.way == "unsummed" else _in_forward(evidence, first, name)
    if first.way == "unsummed" and is_within(first.before, first.module):
        return (
            f"The output of {first.before} is the same on all ranks along {first.axis}, {name} uses it on each for a "
            "part of its own, and the gradients that come back are not summed",
            f"in {name}, sum the gradient of the output of {first.before} over {first.axis}: a torch.autograd.Function "
            "that returns its input in forward and all_reduces in backward",
        )
    if first.way == "unsummed":
        return (
            f"Each rank along {first.axis} sends back its own part of the gradient of the input of {name}, and "
            f"nothing sums them: {name} reads the same input on all ranks and uses it for a part of its own",
            f"sum the gradient over {first.axis} where {name} begins: a torch.autograd.Function that returns its input "
            "in forward and all_reduces in backward (ColwiseParallel does so), or PrepareModuleInput",
        )
    if first.way in ("cut", "lost"):
        through = f"the input of {first.before}" if first.way == "cut" and first.before else f"the output of {name}"
        if first.way == "lost":
            through = f"the output of {first.before}"
        return (
            f"The graph is cut in {name}: nothing flows back to {through}. A .detach(), .data or no_grad, or a "
            "collective of torch.distributed, which has no backward",
            f"look for it in the forward of {name}; torch.distributed.nn.functional and functional collectives have a "
            "backward",
        )
    return _in_backward(first, name)


def _unsummed(first: Divergence) -> Advice:
    name = first.module
    return (
        f"The output of {name} was not summed over {first.axis}: each rank multiplied its own part of the features, "
        f"and {first.before} reads one rank's terms as if they were the whole",
        f"all_reduce the output of {name} over {first.axis} before {first.before} reads it, in a function whose "
        "backward hands the gradient on as it is (RowwiseParallel does)",
    )


def _in_forward(evidence: Evidence, first: Divergence, name: str) -> Advice:
    split = _split_inputs(evidence, first)
    if split:
        axis, dim = split
        return (
            f"Each rank along {axis} has its own part of dim {dim} of the input of {name}, and its result needs the "
            f"others' parts: keys and values that are not gathered over {axis} or in another order than their "
            f"positions, a mask or positions counted within the part, statistics of the part alone, or a halo that "
            "was not exchanged",
            f"look at {name}: gather over {axis} what it needs of the other ranks, in the order of their coordinates, "
            "and count positions from the rank's first in the whole",
        )
    pending = _pending_before(evidence, first)
    if pending is not None:
        return (
            f"{UNEXPLAINED} in {name}, although its inputs are right",
            f"look at {name} first: check that it sums the output of {first.after} over {pending_axis(pending)} before "
            "it uses it, and then how it uses the sum",
        )
    return (
        f"{UNEXPLAINED} in {name}, although its inputs are right",
        f"look at {name} first: where it differs from the unsharded model, and the collectives in it",
    )


def _pending_before(evidence: Evidence, first: Divergence) -> PointRecord | None:
    """Return the terms of a sum that the last right call in a module returns to it."""
    inner = [one for one in evidence.calls.within(first.call) if one.module == first.after]
    return inner[-1].point("output", "pending") if inner and first.way == "between" else None


def _split_inputs(evidence: Evidence, first: Divergence) -> tuple[str, int] | None:
    """Return an axis that splits a dim of the inputs other than the first, of rows, and the last, of features.

    Rows do not need each other but for statistics over them, which have a rule of their own.
    """
    mesh = evidence.dump.files.mesh
    inputs = [first.call, *evidence.calls.within(first.call)]
    for call in inputs:
        point = call.point("input", "right")
        dims = point.layout.partition("]")[0].strip("[").split(", ") if point is not None else []
        for dim in range(len(dims) - 2, 0, -1):
            for axis in mesh.axes:
                if axis in dims[dim].split("/")[1:]:
                    return axis, dim
    return None


def _in_backward(first: Divergence, name: str) -> Advice:
    if first.way == "between":
        after = first.after or "what reads its output"
        return (
            f"{UNEXPLAINED} in backward, between {after} and {name}: a collective without a backward, or with one "
            "that does not match its forward, or a gradient that is scaled or cut as it is sent between stages",
            f"look at what is done with the output of {name} before {after}, and at what comes back for it",
        )
    return (
        f"{UNEXPLAINED} in the backward of {name}: a collective without a backward, or with one that does not match "
        "its forward (a sum of copies needs none, a gather sums, a copy that each rank uses its own way sums)",
        f"look at the collectives in {name}: torch.distributed's have no backward, those of "
        "torch.distributed.nn.functional sum in backward over all ranks",
    )
