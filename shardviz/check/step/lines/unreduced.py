"""The line that leaves a gradient unreduced, if a recorded call proves it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.step.lines.fault import Fault, fault_at
from shardviz.dump.records.lines import TO_LOCAL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.check.step.lines.calls import Call, Lines, Value
    from shardviz.check.step.lines.states import States
    from shardviz.dump.records.lines import FrameRecord
    from shardviz.explain.step.sums import GradientNotReduced


def unreduced_fault(lines: Lines, states: States, cause: GradientNotReduced, name: str) -> Fault | None:
    """Return the line at which a gradient misses its reduction: its own reduction, or that of other gradients.

    Args:
        lines: The calls of the step around the model.
        states: What ranks have of their tensors.
        cause: What is missing.
        name: The weight's name.
    """
    if len(cause.axes) != 1 or cause.is_by_wrapper or cause.is_captured:
        return None
    axis = cause.axes[0]
    if cause.op != "AVG":
        places = dict(_local_reads(lines, name))
        if len(places) == 1:
            frames, own = next(iter(places.items()))
            return Fault("local weight", frames[own], "to_local", "", "", axis=axis, inner=frames[-1])
    reduced = list(_reductions(lines))
    own_calls = [call for call, names in reduced if name in names]
    if own_calls:
        fault = fault_at("narrow reduction", own_calls[-1], "", states.forward(own_calls[-1].outputs[0]), axis=axis)
        ranks = own_calls[-1].first.ranks
        is_other = len(ranks) > 1 and not any(set(group) <= set(ranks) for group in states.mesh.groups(axis))
        return replace(fault, ranks=ranks) if is_other else None
    group = next(iter(states.mesh.groups(axis)))
    others = [call for call, names in reduced if names and sorted(call.first.ranks) == sorted(group)]
    if len({call.place for call in others}) != 1:
        return None
    return fault_at("left out", others[0], "", states.forward(others[0].outputs[0]), axis=axis)


def _local_reads(lines: Lines, name: str) -> Iterator[tuple[tuple[FrameRecord, ...], int]]:
    """Yield the frames of each call that takes this rank's part of a weight, on any rank."""
    for rank, record in lines.sharded.items():
        for line in record.lines:
            if line.function == TO_LOCAL and lines.records[rank, line.inputs[0]].origin == f"weight {name}":
                yield line.frames, line.own


def _reductions(lines: Lines) -> Iterator[tuple[Call, set[str]]]:
    """Yield the collectives of a step around the model with the names of the gradients that they get."""
    by_memory = {
        lines.memory(value): name for name, (value, _) in lines.results.items() if name.startswith("gradient ")
    }
    names: dict[Value, set[str]] = {}
    for call in lines.calls:
        given = set().union(*(_names_of(lines, value, by_memory) | names.get(value, set()) for value in call.inputs))
        names |= dict.fromkeys(call.outputs, given)
        if call.first.is_collective:
            yield call, given


def _names_of(lines: Lines, value: Value, by_memory: dict[tuple[int, ...], str]) -> set[str]:
    """Return the name of the gradient in whose memory a tensor stands, if any."""
    name = by_memory.get(lines.memory(value), "")
    return {name.removeprefix("gradient ")} if name and 0 not in lines.memory(value) else set()
