"""Reads of memory that nothing was written to.

A collective gets room for its result: `out = torch.empty_like(x)`. If it does not run, or writes elsewhere, what is
read from there is whatever the memory held, on each rank something else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.step.lines.exchanges import MOVES, ROOM
from shardviz.check.step.lines.fault import Fault, at, fault_at, place_of, reached
from shardviz.explain.step.lines import UnwrittenMemory

if TYPE_CHECKING:
    from shardviz.check.step.lines.calls import Call, Lines, Value

EMPTY = frozenset(function for function in ROOM if "empty" in function)

COPYING = frozenset(("cat", "stack", "pad", "clone", "roll", "contiguous"))
"""Moves that read what they are given, though they leave its numbers as they are."""

WRITERS = ("setitem", "getattr", "size", "numel", "len", "zip")
"""Functions that are given a tensor to write into it, or for something else than its numbers."""


def unwritten_fault(lines: Lines) -> Fault | None:
    """Return the line that reads what a function like `empty` made and nothing wrote to; None without one."""
    room: dict[Value, Call] = {}
    for call in lines.calls:
        if call.first.function in EMPTY:
            room |= {value: call for value in call.outputs if all(0 not in lines.records[one].shape for one in value)}
            continue
        made = next((room[value] for value in call.inputs if value in room), None)
        if made is None:
            continue
        if call.first.function in MOVES - COPYING:
            room |= dict.fromkeys(call.outputs, made)
        elif not _writes(call):
            before = made.first.frames[-1]
            sentence = f"{at(before)} makes room that nothing writes to; {reached(call, before)} reads it"
            return fault_at(call, sentence, UnwrittenMemory(place_of(before), made.first.function, place_of(call.line)))
    return None


def _writes(call: Call) -> bool:
    """Whether a call may write into a tensor that it is given, or reads only its shape."""
    function = call.first.function
    is_like = function in ROOM or function.endswith("_like") or function.startswith("new_")
    is_in_place = function.endswith("_") or function in WRITERS or "out=" in call.first.frames[-1].source
    return call.first.is_collective or bool(call.first.ranks) or is_like or is_in_place
