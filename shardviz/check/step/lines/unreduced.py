"""The line that leaves a gradient unreduced, if a recorded call proves it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.step.lines.fault import Fault, fault_at
from shardviz.check.step.lines.states import State
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
        is_over_axis = any(set(group) <= set(ranks) for group in states.mesh.groups(axis))
        if is_over_axis:
            return _not_stored(lines, own_calls[-1], name, axis)
        return replace(fault, ranks=ranks) if len(ranks) > 1 else None
    group = next(iter(states.mesh.groups(axis)))
    others = [call for call, names in reduced if names and sorted(call.first.ranks) == sorted(group)]
    if len({call.place for call in others}) != 1:
        return None
    return fault_at("left out", others[0], "", states.forward(others[0].outputs[0]), axis=axis)


def _not_stored(lines: Lines, reduction: Call, name: str, axis: str) -> Fault | None:
    """Return that a copy of a gradient was reduced after the backward, and the result isn't in the gradient."""
    gradient = lines.memory(lines.results[f"gradient {name}"][0]) if f"gradient {name}" in lines.results else ()
    last = max((call.order for call in lines.calls if call.first.function == "backward"), default=-1)
    is_copy = all(lines.memory(value) != gradient for value in (*reduction.inputs, *reduction.outputs))
    if not gradient or not is_copy or reduction.order < last:
        return None
    names = _names_by_value(lines)
    writes = [
        call
        for call in lines.calls
        if call.order > reduction.order and call.first.function == "copy_" and len(call.inputs) == 2
    ]
    into_copy = [
        call for call in writes if names.get(call.inputs[0]) == {name} and lines.memory(call.inputs[0]) != gradient
    ]
    fault = fault_at("not stored", (into_copy or [reduction])[-1], "", State("unknown"), reduction.line, axis)
    return replace(fault, reader=fault.line if into_copy else None)


def _local_reads(lines: Lines, name: str) -> Iterator[tuple[tuple[FrameRecord, ...], int]]:
    """Yield the frames of each call that takes this rank's part of a weight, on any rank."""
    for rank, record in lines.sharded.items():
        for line in record.lines:
            if line.function == TO_LOCAL and lines.records[rank, line.inputs[0]].origin == f"weight {name}":
                yield line.frames, line.own


def _reductions(lines: Lines) -> Iterator[tuple[Call, set[str]]]:
    """Yield the collectives of a step around the model with the names of the gradients that they get."""
    names = _names_by_value(lines)
    for call in lines.calls:
        if call.first.is_collective:
            yield call, set().union(*(names.get(value, set()) for value in call.inputs))


def _names_by_value(lines: Lines) -> dict[Value, set[str]]:
    """Return the names of the gradients that each tensor of a step is made of."""
    by_memory = {
        lines.memory(value): name for name, (value, _) in lines.results.items() if name.startswith("gradient ")
    }
    names: dict[Value, set[str]] = {}
    for call in lines.calls:
        for value in call.inputs:
            names.setdefault(value, _names_of(lines, value, by_memory))
        given = set().union(*(names[value] for value in call.inputs))
        names |= {value: given for value in call.outputs if value not in call.inputs}
    return names


def _names_of(lines: Lines, value: Value, by_memory: dict[tuple[int, ...], str]) -> set[str]:
    """Return the name of the gradient in whose memory a tensor stands, if any."""
    name = by_memory.get(lines.memory(value), "")
    return {name.removeprefix("gradient ")} if name and 0 not in lines.memory(value) else set()
