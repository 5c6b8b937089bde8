"""Lines that give numbers another order: dims merged in a wrong one, and what is done to a part instead of the whole.

After an exchange or a gather has put ranks' parts along a dim of their own, a permutation of the dims that makes the
result right on every rank is the proof, and the fix.

A rank that has one stretch of a dim has all of some segments and nothing of others: gates, or queries, keys and values.
Taken apart into as many segments as the whole, it gives others. Flipped, sorted or indexed by itself, it keeps its own
numbers, although in the whole they go from one rank's part to another's.
"""

from __future__ import annotations

import math
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.lines.exchanges import COPIES
from shardviz.check.step.lines.fault import Fault, fault_at, place_of, reached
from shardviz.check.step.lines.offsets import starts_of
from shardviz.check.step.lines.operands import splits
from shardviz.explain.step.line_rows import DimsMerged, PartOfAnotherDim
from shardviz.explain.step.lines import ReorderedPart, RolledPart, SegmentsOfPart
from shardviz.layout.region import indices
from shardviz.relate.tolerance import ELEMENT, EXACT
from shardviz.relate.values import error_of
from shardviz.text import listed, spans_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.check.step.lines.calls import Call, Value
    from shardviz.check.step.lines.states import States
    from shardviz.explain.cause import Cause

    Arrays = Mapping[int, NDArray[np.float64]]

MERGES = ("reshape", "view", "flatten")
"""Functions that may merge dims."""

MAX_DIMS = 6
"""Dims that are tried in every order."""

PARTS = ("chunk", "tensor_split", "split", "unsafe_chunk", "glu")
"""Functions that give or combine the segments of a dim."""

STRETCHES = ("getitem", "narrow")
"""Functions that may give one segment of a dim."""

UNFOLDS = ("unflatten", "view", "reshape")
"""Functions that may put the segments of a dim along a dim of their own."""

MOST_LISTED = 4
"""Ranks of whose rows a sentence says which they are."""


def merged_fault(states: States) -> Fault | None:
    """Return the line that merges dims in a wrong order; None if no order of them makes its result right."""
    for call in states.lines.calls:
        made = call.outputs[0] if call.first.function in MERGES and call.outputs and call.inputs else None
        if made is None or states.forward(made).moved != "order":
            continue
        whole, held = states.reference_of(made), states.held(made)
        near = ELEMENT.get(states.held_dtype(made), EXACT)
        parts = list(splits(states.mesh, whole, held)) if whole is not None and held else []
        if order := _right_order(states.held(call.inputs[0]), parts, near):
            function, place = call.first.function, place_of(call.first.frames[-1])
            makes = f"{function} returns {states.forward(made).text}"
            sentence = (
                f"{reached(call)} is the first wrong line: {makes}, and with permute{order} before, the rank's part"
            )
            return fault_at(call, sentence, DimsMerged(place, function, str(order)))
    return None


def _right_order(given: Arrays, parts: list[dict[int, NDArray[np.float64]]], near: float) -> tuple[int, ...]:
    """Return the order of dims in which what ranks have is the rank's part of the whole on all of them; else ()."""
    first = next(iter(given.values()), None)
    for order in permutations(range(first.ndim)) if first is not None and 2 < first.ndim <= MAX_DIMS else ():
        for part in parts:
            if given.keys() == part.keys() and all(
                array.size == part[rank].size
                and error_of(array.transpose(order).reshape(part[rank].shape), part[rank]) <= near
                for rank, array in given.items()
            ):
                return order
    return ()


def cause_of_part(states: States, call: Call, given: str) -> Cause | None:
    """Return the cause of a call that does with a rank's part what is right for the whole: takes it apart, or reorders.

    Args:
        call: The first call with a wrong result.
        given: What ranks have of what it is given.
    """
    value = call.inputs[0] if call.inputs and call.outputs and call.whole is not None else None
    if value is None or states.forward(value).kind != "right" or not states.forward(value).split_layout:
        return None
    if (other := _split_elsewhere(states, call)) is not None:
        return PartOfAnotherDim(place_of(call.first.frames[-1]), call.first.function, *other)
    segments = next((pair for dim in _stretched(states, value) if (pair := _segments(states, call, dim))), None)
    if segments is not None:
        weight, rows, dim = _cut(states, call, segments)
        return SegmentsOfPart(place_of(call.line), call.first.function, given, *segments, weight, rows, dim)
    cause_class = RolledPart if call.first.function == "roll" else ReorderedPart
    is_own = call.first.function not in (*MERGES, *COPIES) and _reorders_part(states, call)
    return cause_class(place_of(call.first.frames[-1]), call.first.function, is_of_rank=False) if is_own else None


def _split_elsewhere(states: States, call: Call) -> tuple[int, int, str] | None:
    """Return the dim along which a call gets a rank's part, the one along which its result has a part's size, the axis.

    None if a view of the part has the rank's part of the same dim, as it should.
    """
    layout, whole = states.forward(call.inputs[0]).layout, call.whole
    dims = list(_stretched(states, call.inputs[0]))
    if layout is None or whole is None or call.first.function not in (*MERGES, *UNFOLDS) or len(dims) != 1:
        return None
    wanted, held = states.lines.wholes[whole.outputs[0]].shape, states.lines.records[call.outputs[0][0]].shape
    apart = [dim for dim, size in enumerate(wanted) if held[dim] != size] if len(held) == len(wanted) else []
    start, stop = (math.prod(layout.shape[:end]) for end in (dims[0], dims[0] + 1))
    sizes = [math.prod(wanted[: dim + 1]) for dim in range(len(wanted))]
    homes = [dim for dim, size in enumerate(sizes) if size > start and size // wanted[dim] < stop]
    axis = str(layout.chains[dims[0]][0])
    is_part = len(apart) == 1 and held[apart[0]] * states.mesh.axis_size(axis) == wanted[apart[0]]
    return (dims[0], apart[0], axis) if is_part and homes and apart[0] not in homes else None


def _stretched(states: States, value: Value) -> Iterator[int]:
    """Yield the dims of which each rank has one stretch."""
    layout = states.forward(value).layout
    for dim, chain in enumerate(layout.chains if layout is not None else ()):
        if chain and isinstance(chain[0], str):
            yield dim


def _segments(states: States, call: Call, dim: int) -> tuple[int, int] | None:
    """Return a dim and the number of its segments, if both sides take the dim apart into as many; else None."""
    lines, function, whole = states.lines, call.first.function, call.whole
    if whole is None or len(call.outputs) != len(whole.outputs):
        return None
    given, made = (lines.records[value[0]].shape for value in (call.inputs[0], call.outputs[0]))
    whole_given, whole_made = (lines.wholes[number].shape for number in (whole.inputs[0], whole.outputs[0]))
    if function in UNFOLDS:
        is_led = given[:dim] == made[:dim] and len(made) > max(len(given), dim)
        number = whole_made[dim] if is_led and len(whole_made) == len(made) else 0
        return (dim, number) if 1 < number == made[dim] and whole_given[dim] > given[dim] else None
    if len(given) != len(made) or [at for at in range(len(given)) if given[at] != made[at]] != [dim]:
        return None
    if function in PARTS:
        number = 2 if function == "glu" else len(call.outputs)
        return (dim, number) if number > 1 else None
    number = whole_given[dim] // max(whole_made[dim], 1)
    is_segment = function in STRETCHES and number > 1 and number * made[dim] == given[dim]
    return (dim, number) if is_segment and _is_same_segment(states, call, dim) else None


def _is_same_segment(states: States, call: Call, dim: int) -> bool:
    """Whether a rank takes the same segment of its part as the unsharded model of the whole."""
    whole = call.whole
    sides = [states.whole(number) for number in (whole.inputs[0], whole.outputs[0])] if whole is not None else []
    held, made = (next(iter(states.held(value).values()), None) for value in (call.inputs[0], call.outputs[0]))
    pairs = [sides, [held, made]]
    starts = [starts_of(part, given, dim) for given, part in pairs if given is not None and part is not None]
    lengths = [given.shape[dim] for given, _ in pairs if given is not None]
    return len(starts) == 2 and all(map(len, starts)) and starts[0][0] * lengths[1] == starts[1][0] * lengths[0]


def _cut(states: States, call: Call, segments: tuple[int, int]) -> tuple[str, str, int]:
    """Return the weight whose result a call takes apart, if each rank has one stretch of a dim, what each has, the dim.

    Returns:
        Empty texts, and 0, if no weight makes it, or a rank has anything else.
    """
    lines = states.lines
    length = lines.wholes[call.whole.inputs[0]].shape[segments[0]] if call.whole is not None else 0
    for maker in lines.makers(call.inputs[0]):
        for value in (value for value in maker.inputs if lines.weight_name(value)):
            layout = states.forward(value).layout
            dims = [dim for dim in _stretched(states, value) if layout is not None and layout.shape[dim] == length]
            if layout is not None and states.forward(value).kind == "right" and dims:
                word = "rows" if dims[0] == 0 else "columns"
                held = {rank: spans_of(indices(region.dims[dims[0]]).tolist()) for rank, region in layout.regions()}
                first = {rank: spans[0] for rank, spans in held.items() if spans}
                texts = (f"rank {rank} has {word} {start}-{stop - 1}" for rank, (start, stop) in first.items())
                return lines.weight_name(value), listed(texts, MOST_LISTED), dims[0]
    return "", "", 0


def _reorders_part(states: States, call: Call) -> bool:
    """Whether a call reorders the whole, and on each rank its own part, although numbers go from part to part."""
    given, held = states.held(call.inputs[0]), states.held(call.outputs[0])
    wholes = [states.reference_of(value) for value in (call.inputs[0], call.outputs[0])]
    if not held or given.keys() != held.keys() or not _has_numbers(*wholes):
        return False
    due = list(splits(states.mesh, wholes[1], held)) if wholes[1] is not None else []
    is_of_part = all(_has_numbers(array, given[rank]) for rank, array in held.items())
    return is_of_part and bool(due) and not any(all(_has_numbers(part[r], given[r]) for r in held) for part in due)


def _has_numbers(first: NDArray[np.float64] | None, second: NDArray[np.float64] | None) -> bool:
    """Whether two arrays have the same numbers, wherever they stand."""
    if first is None or second is None or first.size != second.size:
        return False
    return error_of(np.sort(first, axis=None), np.sort(second, axis=None)) <= EXACT
