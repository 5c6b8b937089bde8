"""Reads at indices outside of a rank's part that are summed unmasked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.lines.fault import Fault, at, fault_at, place_of
from shardviz.explain.step.exchanged_rows import ForeignNumbersSummed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.check.step.lines.calls import Call, Lines, Value
    from shardviz.check.step.lines.states import States

BOUNDS = ("clamp", "clip", "where", "masked_fill", "clamp_", "masked_fill_", "setitem", "minimum", "maximum")
"""Functions by which code moves an index that is not of a rank's part into it."""


def foreign_fault(lines: Lines, states: States) -> Fault | None:
    """Return the line that reads at indices which were moved into the rank's part, if the result is summed unmasked."""
    for call in lines.calls:
        moved = _moved(call, states) if call.first.function in BOUNDS else {}
        if not any(mask.any() for mask in moved.values()):
            continue
        calls = list(_made_of(lines, call))
        read = next((one for one in calls if one.outputs and not states.is_index(one.outputs[0])), None)
        summed = next((one for one in calls if one.first.function == "all_reduce"), None)
        if read is None or summed is None or summed.order <= read.order:
            continue
        held = states.held(summed.inputs[0])
        rows = [_rows_at(held.get(rank), mask) for rank, mask in moved.items() if mask.any()]
        if all(row is not None for row in rows) and any(np.any(row) for row in rows if row is not None):
            return _fault_of(call, read, summed)
    return None


def _fault_of(moving: Call, reading: Call, summing: Call) -> Fault:
    """Return the fault of a line that reads at indices which another moved, and whose result is summed."""
    line, place = reading.line, place_of(reading.line)
    where = "" if place_of(moving.line) == place else f" by {at(moving.line, line)}"
    clause = f"{at(line)} uses indices that were moved into the rank's part{where}"
    cause = ForeignNumbersSummed(place, reading.first.function, place_of(summing.line))
    return fault_at(reading, f"{clause}; {at(summing.line, line)} sums what comes of them", cause)


def _moved(call: Call, states: States) -> Mapping[int, NDArray[np.bool_]]:
    """Return for each rank which indices a call changes; empty if it changes none."""
    out = call.outputs[0] if call.outputs and states.is_index(call.outputs[0]) else None
    after = states.held(out) if out is not None else {}
    for value in call.inputs if after else ():
        before = states.held(value) if states.is_index(value) and value != out else {}
        if before.keys() == after.keys() and all(before[rank].shape == after[rank].shape for rank in after):
            return {rank: before[rank] != after[rank] for rank in after}
    return {}


def _made_of(lines: Lines, call: Call) -> Iterator[Call]:
    """Yield the calls that depend on a call's outputs, in order."""
    derived: set[Value] = set(call.outputs)
    for later in lines.calls[call.order + 1 :]:
        if derived & {*later.inputs}:
            derived |= {*later.outputs}
            yield later


def _rows_at(held: NDArray[np.float64] | None, mask: NDArray[np.bool_]) -> NDArray[np.float64] | None:
    """Return a tensor's rows for some indices; None if it has not one for each, or for several."""
    if held is None:
        return None
    if held.shape[: mask.ndim] == mask.shape:
        rows: NDArray[np.float64] = held[mask]
        return rows
    if held.shape[:1] == (mask.size,):
        return held[mask.ravel()]
    of_others = mask.reshape(len(mask), -1).all(axis=1)  # several indices make a row: it is empty if all are others'
    return held[of_others] if held.shape[:1] == of_others.shape else None
