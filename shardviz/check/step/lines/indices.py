"""Indices into a rank's own part, as of the largest logit, read as those of the whole; or the reverse, as of labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.lines.exchanges import MOVES
from shardviz.check.step.lines.fault import Fault, at, fault_at, reached
from shardviz.check.step.lines.foreign import BOUNDS
from shardviz.check.step.lines.offsets import begins_of, split_layout_of
from shardviz.explain.step.parts import IndexOfOwnPart, IndexOfWhole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.lines.calls import Call, Value
    from shardviz.check.step.lines.states import States

LEAST_MORE = 4
"""More indices than parts of which nothing stands by chance."""

TAKES = ("gather", "take_along_dim", "index_select", "getitem")
"""Functions that read a tensor at indices along a dim."""

MAX_STEPS = 8
"""So many calls may move an index into bounds, and give it another shape."""

PICKS = ("max", "min", "argmax", "argmin", "topk", "sort", "argsort")
"""Functions that return where in a dim something is."""


def own_index_fault(states: States) -> Fault | None:
    """Return the call whose indices into a rank's part are taken for those of the whole; None if none are.

    What is made of them is, of whichever rank has the element, its index in that rank's part, to which the number of
    elements before the part is not added, or another number.
    """
    for call in states.lines.calls:
        layout = split_layout_of(states, call.inputs[0]) if call.function in PICKS and call.inputs else None
        if layout is None or call.whole is None or not call.outputs or not states.is_index(call.outputs[-1]):
            continue
        for size, chain in zip(layout.shape, layout.chains, strict=True):
            due = begins_of(states, layout, size) if chain else None
            fault = _fault_of_index(states, call, size, sorted(set(due.values()))) if due is not None else None
            if fault is not None:
                return fault
    return None


def whole_index_fault(states: States) -> Fault | None:
    """Return the call that reads a rank's part at indices into the whole; None if none does.

    They are the same on all ranks, reach beyond a part, and are at most moved into it: the rank's offset is not taken
    from them.
    """
    for call in (call for call in states.lines.calls if call.function in TAKES and len(call.inputs) > 1):
        layout = split_layout_of(states, call.inputs[0])
        for dim, given in _picked_dims(states, call) if layout is not None else ():
            index = _whole_index(states, given) if layout is not None and layout.chains[dim] else None
            if layout is None or index is None:
                continue
            size, chain = layout.shape[dim], layout.chains[dim]
            begins = sorted(set((begins_of(states, layout, size) or {}).values()))
            largest = int(max(np.max(held, initial=0) for held in states.held(index).values()))
            if len(begins) > 1 and begins[1] <= largest < size:
                maker = states.lines.producer(index)
                is_apart = maker is not None and maker.line != call.line
                source = f" from {at(maker.line, call.line)}" if maker is not None and is_apart else ""
                sentence = (
                    f"{reached(call)} reads each rank's {begins[1]} of {size} elements along dim {dim} at the indices"
                    f"{source}, which are those of the whole on every rank"
                )
                cause = IndexOfWhole(call.inner_line.place, call.function, " and ".join(map(str, chain)), begins[1])
                return fault_at(call, sentence, cause)
    return None


def _picked_dims(states: States, call: Call) -> Iterator[tuple[int, Value]]:
    """Yield each dim in which a call picks elements, with its index, if its number or the shapes tell the dim."""
    tensor, *indices = call.inputs
    shape, made, *of_indices = (states.lines.records[value[0]].shape for value in (tensor, call.outputs[0], *indices))
    if call.function != "getitem":
        dim = next(iter(call.first.numbers.split()), "")
        if dim.lstrip("-").isdigit():
            yield int(dim) % len(shape), indices[0]
        return
    picked = max(of_indices, key=len)
    last = len(shape) - len(indices)
    firsts = [dim for dim in range(last + 1) if (*shape[:dim], *picked, *shape[dim + len(indices) :]) == made]
    if len(firsts) == 1:
        yield from enumerate(indices, firsts[0])


def _whole_index(states: States, value: Value) -> Value | None:
    """Return the index that another one is, but for its bounds and shape, if all ranks have the whole's; or None."""
    for _ in range(MAX_STEPS):
        held = list(states.held(value).values()) if states.is_index(value) else []
        if not held or any(not np.array_equal(array, held[0]) for array in held):
            return None
        if states.placed(value).kind == "right":
            return value
        maker = states.lines.producer(value)
        if maker is None or maker.function not in (*BOUNDS, *MOVES) or not maker.inputs:
            return None
        value = maker.inputs[0]
    return None


def _fault_of_index(states: States, call: Call, size: int, begins: Sequence[int]) -> Fault | None:
    """Return the fault of a call whose indices are read as those of the whole, of which parts begin at some places."""
    lines, wanted = states.lines, states.reference_of(call.outputs[-1])
    if wanted is None:
        return None
    pairs = [(value, _added(states, value, wanted, begins)) for value in sorted(lines.derived(call), key=lines.order)]
    added = {value: one for value, one in pairs if one is not None}
    if not added or any(all(one[begin] == begin for begin in one) for one in added.values()):
        return None
    value, numbers = next(iter(added.items()))
    maker = lines.producer(value)
    floats = (one for one in lines.derived(maker) if "float" in states.held_dtype(one)) if maker is not None else ()
    if maker is None or any(states.placed(one).is_known for one in floats):
        return None  # the program knows which rank's part they are of
    begin = next(begin for begin in numbers if numbers[begin] != begin)
    has = f"{reached(call)} gives indices within each rank's part, {begins[1]} of {size}"
    adds = f"{numbers[begin]:+,} was added" if numbers[begin] else "nothing was added"
    takes = (
        f"{at(maker.line, call.line)} has those of all ranks, and {adds} to those of the part that begins at {begin}"
    )
    cause = IndexOfOwnPart(call.inner_line.place, call.function, maker.place, size, begin, numbers[begin])
    return fault_at(call, f"{has}; {takes}", cause)


def _added(states: States, value: Value, wanted: NDArray[np.float64], begins: Sequence[int]) -> dict[int, int] | None:
    """Return what is added to the indices into each part, by where it begins, if a tensor has those of all parts.

    None if it hasn't, or if a part has too few to tell.
    """
    held = list(states.held(value).values()) if states.is_index(value) else []
    if len(held) < states.mesh.size or any(not np.array_equal(array, held[0]) for array in held):
        return None
    owners = np.searchsorted(begins, wanted, side="right") - 1
    if held[0].shape != wanted.shape or len(np.unique(owners)) < 2 or wanted.size < len(begins) + LEAST_MORE:
        return None
    differences = held[0] - (wanted - np.asarray(begins)[owners])
    added = {begins[owner]: np.unique(differences[owners == owner]) for owner in np.unique(owners)}
    return None if any(len(one) > 1 for one in added.values()) else {at: int(one[0]) for at, one in added.items()}
