"""Lines that read numbers which are none of the rank's: at moved indices, in unwritten memory, or in padding.

An index outside of a rank's part is moved into it; what is read there must be masked before it is summed.

A collective gets room for its result: `out = torch.empty_like(x)`. If it does not run, or writes elsewhere, what is
read from there is whatever the memory held, on each rank something else.

A vocabulary is padded to divide it among ranks. The unsharded model takes only the first words of the logits. A rank
that has a part of them must give the padding in it one number that adds nothing, such as -inf.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.lines.calls import SELECTS
from shardviz.check.step.lines.exchanges import MOVES, ROOM
from shardviz.check.step.lines.fault import Fault, at, fault_at, place_of, reached
from shardviz.explain.step.exchanged_rows import ForeignNumbersSummed
from shardviz.explain.step.lines import UnwrittenMemory
from shardviz.explain.step.losses import PaddingSummed
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.check.step.lines.calls import Call, Lines, Value
    from shardviz.check.step.lines.states import States
    from shardviz.dump.records.lines import LineRecord
    from shardviz.layout.layout import Layout


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


SUMS_OVER_DIM = ("sum", "mean")
OF_POWERS = ("logsumexp", "softmax", "log_softmax", "cross_entropy")
"""Functions over a dim in which every element counts, or its power."""

NO_POWER = -1000.0
"""The power of e of a smaller number is 0."""


def padding_fault(lines: Lines, states: States) -> Fault | None:
    """Return the line that sums over padding; None if ranks cut it off too, or have one number there."""
    for cut, dim, size in _cuts(lines, states):
        if any(states.forward(value).is_known for value in lines.of_wanted(cut.outputs[0])):
            continue
        for value in lines.of_wanted(cut.inputs[0]):
            layout = states.forward(value).layout if states.forward(value).kind == "right" else None
            call = _sum_over(lines, states, value, layout, dim, size) if layout is not None else None
            if call is not None and layout is not None:
                return _fault_of_padding(call, cut, layout, dim, size)
    return None


def _fault_of_padding(call: Call, cut: LineRecord, layout: Layout, dim: int, size: int) -> Fault:
    """Return the fault of a call that sums over a dim behind its size, which the unsharded model cuts off."""
    ranks = tuple(rank for rank, region in layout.regions() if region.dims[dim][-1][1] > size)
    cutting, padded = cut.frames[cut.own], layout.shape[dim]
    elements = f"elements {size} to {padded - 1} of it, on {named_ranks(ranks)}"
    summed = f"{reached(call)} sums over dim {dim} with {elements}"
    sentence = f"{summed}; the unsharded model cuts these off in {at(cutting, call.line)}"
    places = place_of(call.line), call.first.function, place_of(cutting)
    return fault_at(call, sentence, PaddingSummed(*places, dim, size, padded))


def _cuts(lines: Lines, states: States) -> Iterator[tuple[LineRecord, int, int]]:
    """Yield the unsharded model's calls that keep the first elements of a dim, with the dim and how many."""
    for record in lines.unsharded.lines:
        if record.function not in SELECTS or not (record.inputs and record.outputs):
            continue
        given, kept = (states.whole(number) for number in (record.inputs[0], record.outputs[0]))
        if given is None or kept is None or given.ndim != kept.ndim:
            continue
        dims = [dim for dim in range(given.ndim) if kept.shape[dim] < given.shape[dim]]
        first = given[tuple(slice(size) for size in kept.shape)]
        if len(dims) == 1 and np.array_equal(first, kept):
            yield record, dims[0], kept.shape[dims[0]]


def _sum_over(lines: Lines, states: States, value: Value, layout: Layout, dim: int, size: int) -> Call | None:
    """Return the first sum over a split dim to which its padding adds something."""
    derived, shape = {value}, lines.records[value[0]].shape
    for call in lines.calls if any(isinstance(link, str) for link in layout.chains[dim]) else ():
        read = next((given for given in call.inputs if given in derived), None)
        if read is None:
            continue
        numbers = call.first.numbers.split()
        is_sum = call.first.function in (*SUMS_OVER_DIM, *OF_POWERS)
        if is_sum and (not numbers or numbers[0] in (str(dim), str(dim - len(shape)))):
            parts = _held_behind(states.held(read), layout, dim, size)
            if any(np.any(part != 0 if call.first.function in SUMS_OVER_DIM else part > NO_POWER) for part in parts):
                return call
        derived |= {made for made in call.outputs if lines.records[made[0]].shape == shape}
    return None


def _held_behind(
    held: Mapping[int, NDArray[np.float64]], layout: Layout, dim: int, size: int
) -> Iterator[NDArray[np.float64]]:
    """Yield what ranks have behind the first elements of a dim."""
    for rank, region in layout.regions():
        start = region.dims[dim][0][0]
        if rank in held:
            yield held[rank][(slice(None),) * dim + (slice(max(size - start, 0), None),)]
