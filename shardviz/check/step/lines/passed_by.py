"""Gradients that no line makes wrong, and the calls that leave one unreduced or undivided, or reduce it too often.

The line that is named does to other gradients what this one lacks, or reduces it over other ranks, or a copy of it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from shardviz.check.step.lines.fault import Fault, at, called, fault_at
from shardviz.check.step.lines.search import DIVISIONS
from shardviz.dump.records.trace import TO_LOCAL
from shardviz.explain.step.line_reductions import (
    LeftOutOfReduction,
    LocalWeight,
    NarrowReduction,
    ReductionNotStored,
)
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardviz.check.step.lines.calls import Call, Lines, Value
    from shardviz.check.step.lines.states import States
    from shardviz.dump.records.trace import FrameRecord
    from shardviz.explain.step.factors import UndividedShardGradient
    from shardviz.explain.step.gradients import MicroBatchesReducedAgain


def unreduced_fault(states: States, axes: Sequence[str], op: str, name: str) -> Fault | None:
    """Return the line at which a gradient misses its reduction: its own reduction, or that of other gradients."""
    lines = states.lines
    if len(axes) != 1:
        return None
    axis = axes[0]
    if op != "AVG":
        places = dict(_local_reads(lines, name))
        if len(places) == 1:
            frames, own = next(iter(places.items()))
            line = frames[own]
            sentence = f"{at(line)} takes this rank's part of the weight without grad_placements"
            return Fault(line, "to_local", sentence, LocalWeight(line.place, axis))
    reduced = list(_reductions(lines))
    own_calls = [call for call, names in reduced if name in names]
    if own_calls:
        ranks = own_calls[-1].first.ranks
        is_over_axis = any(set(group) <= set(ranks) for group in states.mesh.groups(axis))
        if is_over_axis:
            return _not_stored(lines, own_calls[-1], name, axis)
        return _narrow(own_calls[-1], axis) if len(ranks) > 1 else None
    group = next(iter(states.mesh.groups(axis)))
    others = [call for call, names in reduced if names and sorted(call.first.ranks) == sorted(group)]
    if len({call.place for call in others}) != 1:
        return None
    sentence = f"{called(others[0])} reduces other gradients over {axis} and never gets this gradient"
    return fault_at(others[0], sentence, LeftOutOfReduction(others[0].place, axis))


def undivided_fault(lines: Lines, cause: UndividedShardGradient, name: str) -> Fault | None:
    """Return the line that divides other gradients by the factor that this gradient is too large by."""
    names, divided = _names_by_value(lines), []
    for call in (call for call in lines.calls if call.function in DIVISIONS):
        given = set().union(*(names.get(value, set()) for value in call.inputs))
        if name in given:
            return None
        if given and set(call.first.numbers.split()) & {str(cause.size), f"{cause.size}.0"}:
            divided.append(call)
    if len({call.place for call in divided}) != 1:
        return None
    sentence = f"{called(divided[0])} divides other gradients by {cause.size} and never gets this gradient"
    return fault_at(divided[0], sentence, cause)


def reduced_again_fault(lines: Lines, cause: MicroBatchesReducedAgain, name: str) -> Fault | None:
    """Return the line that reduces a gradient after each of several backward passes."""
    reducing = [call for call, names in _reductions(lines) if name in names]
    backwards = [call.order for call in lines.calls if call.function == "backward"]
    times = sum(any(one.order < order < two.order for order in backwards) for one, two in pairwise(reducing)) + 1
    if len({call.place for call in reducing}) != 1 or times != len(reducing) or times < 2:
        return None
    sentence = f"{called(reducing[0])} reduces the gradient over {cause.axes} after each of {times} backward passes"
    return fault_at(reducing[0], sentence, cause)


def _narrow(call: Call, axis: str) -> Fault:
    """Return that a call reduces a gradient over other ranks alone."""
    ranks, place = call.first.ranks, call.place
    sentence = f"{called(call)} reduces the gradient over {named_ranks(ranks)}, and nothing reduces it over {axis}"
    return fault_at(call, sentence, NarrowReduction(place, call.function, ranks, axis))


def _not_stored(lines: Lines, reduction: Call, name: str, axis: str) -> Fault | None:
    """Return that a copy of a gradient was reduced after the backward, and the result isn't in the gradient."""
    gradient = lines.memory(lines.results[f"gradient {name}"][0]) if f"gradient {name}" in lines.results else ()
    last = max((call.order for call in lines.calls if call.function == "backward"), default=-1)
    is_copy = all(lines.memory(value) != gradient for value in (*reduction.inputs, *reduction.outputs))
    if not gradient or not is_copy or reduction.order < last:
        return None
    names = _names_by_value(lines)
    writes = [
        call
        for call in lines.calls
        if call.order > reduction.order and call.function == "copy_" and len(call.inputs) == 2
    ]
    into_copy = [
        call for call in writes if names.get(call.inputs[0]) == {name} and lines.memory(call.inputs[0]) != gradient
    ]
    result, place = f"reduces a copy of this gradient over {axis}", reduction.place
    if not into_copy:
        sentence = f"{called(reduction)} {result}, and nothing writes the result into the gradient"
        return fault_at(reduction, sentence, ReductionNotStored(place, axis, ""))
    writing = called(into_copy[-1], reduction.line)
    sentence = f"{at(reduction.line)} {result}; {writing} writes the result into a copy, not into the gradient"
    return fault_at(into_copy[-1], sentence, ReductionNotStored(place, axis, into_copy[-1].place))


def _local_reads(lines: Lines, name: str) -> Iterator[tuple[tuple[FrameRecord, ...], int]]:
    """Yield the frames of each call that takes this rank's part of a weight, on any rank."""
    for rank, record in lines.sharded.items():
        for line in record.lines:
            if line.function == TO_LOCAL and lines.records[rank, line.inputs[0]].origin == f"weight {name}":
                yield line.frames, line.innermost


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
