"""The line that sums over padding, which the unsharded model cuts off.

A vocabulary is padded to divide it among ranks. The unsharded model takes only the first words of the logits. A rank
that has a part of them must give the padding in it one number that adds nothing, such as -inf.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.lines.calls import SELECTS
from shardviz.check.step.lines.fault import Fault, at, fault_at, place_of, reached
from shardviz.explain.step.losses import PaddingSummed
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.check.step.lines.calls import Call, Lines, Value
    from shardviz.check.step.lines.states import States
    from shardviz.dump.records.lines import LineRecord
    from shardviz.layout.layout import Layout

SUMS = ("sum", "mean")
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
                return _fault_of(call, cut, layout, dim, size)
    return None


def _fault_of(call: Call, cut: LineRecord, layout: Layout, dim: int, size: int) -> Fault:
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
        is_sum = call.first.function in (*SUMS, *OF_POWERS)
        if is_sum and (not numbers or numbers[0] in (str(dim), str(dim - len(shape)))):
            parts = _padding(states.held(read), layout, dim, size)
            if any(np.any(part != 0 if call.first.function in SUMS else part > NO_POWER) for part in parts):
                return call
        derived |= {made for made in call.outputs if lines.records[made[0]].shape == shape}
    return None


def _padding(
    held: Mapping[int, NDArray[np.float64]], layout: Layout, dim: int, size: int
) -> Iterator[NDArray[np.float64]]:
    """Yield what ranks have behind the first elements of a dim."""
    for rank, region in layout.regions():
        start = region.dims[dim][0][0]
        if rank in held:
            yield held[rank][(slice(None),) * dim + (slice(max(size - start, 0), None),)]
