"""The cause of a first wrong module whose values no rule explains: what its inputs and its place suggest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.step.trace.calls import is_within
from shardviz.check.step.trace.divergence import pending_axis
from shardviz.explain.gradients import CutInModule, UnsummedInputGradient
from shardviz.explain.modules import (
    UnexplainedBetweenModules,
    UnexplainedModule,
    UnexplainedModuleBackward,
    UngatheredInput,
    UnsummedModule,
)

if TYPE_CHECKING:
    from shardviz.check.step.evidence import Evidence
    from shardviz.check.step.trace.divergence import Divergence
    from shardviz.dump.records.trace import PointRecord
    from shardviz.explain.cause import Cause


def cause_at(evidence: Evidence, first: Divergence) -> Cause:
    """Return the cause that the place of a first wrong module suggests."""
    name = first.module or "the model itself"
    if first.direction == "forward":
        if first.way == "unsummed":
            return UnsummedModule(first.module, first.before, first.axis)
        return _in_forward(evidence, first, name)
    if first.way == "unsummed":
        return UnsummedInputGradient(name, first.axis, first.before if is_within(first.before, first.module) else "")
    if first.way == "lost":
        return CutInModule(name, f"the output of {first.before}")
    if first.way == "cut":
        return CutInModule(name, f"the input of {first.before}" if first.before else f"the output of {name}")
    if first.way == "between":
        return UnexplainedBetweenModules(name, first.after or "what reads its output")
    return UnexplainedModuleBackward(name)


def _in_forward(evidence: Evidence, first: Divergence, name: str) -> Cause:
    split = _split_inputs(evidence, first)
    if split:
        axis, dim = split
        return UngatheredInput(name, axis, dim)
    pending = _pending_before(evidence, first)
    return UnexplainedModule(name) if pending is None else UnexplainedModule(name, first.after, pending_axis(pending))


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
