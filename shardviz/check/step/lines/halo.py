"""Parts of a neighbor that a rank needs, too: a halo, or one token of a shift.

They may be missing, with zeros in their place, or their gradient isn't sent back.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice, product
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.lines.fault import Fault, fault_at, place_of, reached
from shardviz.check.step.lines.offsets import distances, starts_of
from shardviz.check.step.lines.operands import splits
from shardviz.explain.step.line_reductions import HaloNotSentBack
from shardviz.explain.step.line_rows import NeighborLeftOut
from shardviz.relate.tolerance import ELEMENT, SINGLE
from shardviz.relate.values import finite_magnitude, is_alike, magnitude, part_of, slices_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.check.step.lines.calls import Call, Value
    from shardviz.check.step.lines.states import States

MAX_RESULTS = 64
"""Of more wrong results the first are looked at."""

WINDOWS = ("conv1d", "conv2d", "conv3d", "unfold", "avg_pool1d", "avg_pool2d", "max_pool1d", "max_pool2d")
"""Functions of which each result is one of neighboring slices."""


@dataclass(frozen=True)
class Border:
    """Slices of a dim that are wrong at one end of each part that has a neighbor there, while all others are right.

    Attributes:
        counts: How many at the start of a part, and at its end.
        axis: The axis that splits the dim.
    """

    dim: int
    counts: tuple[int, int]
    axis: str


def neighbor_fault(states: States) -> Fault | None:
    """Return the line that lacks slices of a rank's neighbors; None if more is wrong than what these decide.

    A shift by one token, a causal convolution or a difference needs the last slices of the previous rank. The first
    rank has none, and there the unsharded model has zeros, too.
    """
    lines = states.lines
    for value in islice((value for value in lines.values if states.placed(value).is_wrong), MAX_RESULTS):
        border = _border(states, value)
        makers, given = _makers(states, value, border.axis) if border is not None else ([], None)
        derived = lines.derived(makers[-1]) if makers else set()
        is_spoiled = not derived.isdisjoint(states.wrong_results) and not any(
            _is_right(states, made) for made in derived
        )
        if border is None or given is None or not is_spoiled:
            continue
        if any(call.first.function in WINDOWS for call in makers) or _is_shifted(states, value, given, border):
            call = makers[-1]
            cause = NeighborLeftOut(place_of(call.line), call.first.function, border.axis, *border.counts)
            gets = f"{call.first.function} gets {states.forward(given).text}"
            return fault_at(call, f"{reached(call)} is the first wrong line: {gets}, and {cause.lacks}", cause)
    return None


def _makers(states: States, value: Value, axis: str) -> tuple[list[Call], Value | None]:
    """Return the calls that make a tensor, back to one that is given a right part along an axis, and that part."""
    calls: list[Call] = []
    while (call := states.lines.producer(value)) is not None and call not in calls:
        calls.append(call)
        given = next((source for source in call.inputs if _is_split(states, source, axis)), None)
        value = next((source for source in call.inputs if not states.placed(source).is_known), value)
        if given is not None:
            return calls, given
    return calls, None


def _is_split(states: States, value: Value, axis: str) -> bool:
    state = states.forward(value)
    return state.kind == "right" and state.layout is not None and axis in state.layout.split_axes


def _is_right(states: States, value: Value) -> bool:
    """Whether a tensor is right and has different numbers: zero times anything is right."""
    return states.placed(value).is_known and not all(map(is_alike, states.held(value).values()))


def _border(states: States, value: Value) -> Border | None:
    """Return what is wrong at the borders of parts; None if all or none of them is, or also what is between."""
    whole, held, mesh = states.reference_of(value), states.held(value), states.mesh
    if whole is None or len(held) < mesh.size or any(array.ndim != whole.ndim for array in held.values()):
        return None
    near = ELEMENT.get(states.held_dtype(value), SINGLE) * finite_magnitude(whole)
    for parts in splits(mesh, whole, held):
        dims = [dim for dim in range(whole.ndim) if next(iter(parts.values())).shape[dim] < whole.shape[dim]]
        for dim, axis in product(dims, mesh.long_axes):
            off = {rank: _slices_off(parts[rank], array, dim, near) for rank, array in held.items()}
            counts = _counts(off, {rank: mesh.coord_of(rank)[mesh.axis_index(axis)] for rank in held})
            if counts is not None and any(counts):
                return Border(dim, counts, axis)
    return None


def _slices_off(due: NDArray[np.float64], held: NDArray[np.float64], dim: int, near: float) -> NDArray[np.bool_]:
    return np.asarray((distances(slices_of(held, dim), slices_of(due, dim)) > near).any(1))


def _counts(off: Mapping[int, NDArray[np.bool_]], coords: Mapping[int, int]) -> tuple[int, int] | None:
    """Return how many slices are wrong at the start and at the end of parts that have a neighbor there."""
    begins, ends, last = set[int](), set[int](), max(coords.values())
    for rank, is_off in off.items():
        begin, end = (int(np.argmin(side)) for side in (is_off, is_off[::-1]))
        if (
            is_off.all()
            or is_off.sum() != begin + end
            or (begin and not coords[rank])
            or (end and coords[rank] == last)
        ):
            return None
        begins |= {begin} if coords[rank] else set()
        ends |= {end} if coords[rank] < last else set()
    return (begins.pop(), ends.pop()) if len(begins) == len(ends) == 1 else None


def _is_shifted(states: States, value: Value, given: Value, border: Border) -> bool:
    """Whether the slices that are wrong at the start or end of a part are slices of the neighbor's part of `given`."""
    whole, source = states.reference_of(value), states.reference_of(given)
    if whole is None or source is None or whole.ndim != source.ndim:
        return False
    length = whole.shape[border.dim] // states.mesh.axis_size(border.axis)
    first, last = border.counts
    spans = [(length, first, range(length)), (length - last, last, range(length, whole.shape[border.dim]))]
    places = [
        (starts_of(whole.take(range(begin, begin + count), border.dim), source, border.dim), others)
        for begin, count, others in spans
        if count
    ]
    return all(len(starts) == 1 and starts[0] in others for starts, others in places)


def halo_not_sent_back(states: States, value: Value, call: Call) -> HaloNotSentBack | None:
    """Return the cause of a part's gradient that lacks, at some elements, what another rank hands back for its copy."""
    copies = [
        (rank, gradient)
        for other in states.lines.calls
        if other.first.frames[0] == call.first.frames[0]
        for made in other.outputs
        for rank, gradient in states.gradients(made).items()
    ]
    for rank, dim, first, lacking in _lacking(states, value):
        for other, gradient in copies:
            is_alike = other != rank and gradient.ndim == lacking.ndim
            if is_alike and gradient.shape[dim] >= lacking.shape[dim] and starts_of(lacking, gradient, dim):
                elements = (first, first + lacking.shape[dim] - 1)
                return HaloNotSentBack(place_of(call.line), call.first.function, dim, *elements, rank, other)
    return None


def _lacking(states: States, value: Value) -> Iterator[tuple[int, int, int, NDArray[np.float64]]]:
    """Yield each rank whose gradient is off in one stretch of a dim alone: the dim, its first element, what lacks."""
    layout, whole = states.forward(value).layout, states.reference_of(value, gradient=True)
    held = states.gradients(value)
    near = max(SINGLE, ELEMENT.get(states.held_dtype(value), SINGLE))
    if layout is None or whole is None:
        return
    for rank, region in layout.regions():
        due = part_of(whole, region)
        if rank not in held or held[rank].shape != due.shape or not due.size:
            continue
        lacking = due - held[rank]
        off = np.abs(lacking) > near * magnitude(whole)
        spans = [np.flatnonzero(slices_of(off, dim).any(1)) for dim in range(off.ndim)]
        short = [dim for dim, span in enumerate(spans) if len(span) and span[-1] - span[0] + 1 < due.shape[dim]]
        if len(short) == 1:
            (dim,) = short
            begin, end = int(spans[dim][0]), int(spans[dim][-1]) + 1
            yield rank, dim, begin, lacking.take(range(begin, end), dim)
