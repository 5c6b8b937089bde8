"""Tensors of one dim that a step joins out of several others, such as all gradients in one buffer.

No layout describes such a buffer: each rank has its part of every tensor, one after the other. Still it is right if
every segment is the rank's part of the tensor that it was made of, and so are the terms of a sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from shardviz.check.step.lines.calls import JOINS
from shardviz.check.step.lines.state import UNKNOWN, State
from shardviz.relate.factors import over
from shardviz.relate.tolerance import ELEMENT, EXACT
from shardviz.relate.values import error_of, part_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from shardviz.check.step.lines.calls import Lines, Value
    from shardviz.check.step.lines.states import States

    Arrays = Mapping[int, NDArray[np.float64]]

FLATTENS = ("flatten", "view", "reshape", "ravel", "contiguous", "clone", "detach", "to", "float", "double")
"""Functions that leave numbers in their order."""

MAX_SEGMENTS = 4096
"""A buffer of more tensors is not looked at."""


@dataclass(frozen=True)
class _Segment:
    """A part of a buffer: the tensor that it was made of, with what ranks have of that."""

    state: State
    shape: tuple[int, ...]
    parts: Mapping[int, tuple[int, ...]]


def state_of_joined(states: States, value: Value) -> State | None:
    """Return what ranks have of a buffer that several tensors were joined in; None if it isn't one, or is wrong.

    The sum of a mean's terms is right if it is divided later, so it is not compared.
    """
    whole, held, segments = states.reference_of(value), states.held(value), _segments(states, value)
    if whole is None or not segments or len(held) != states.mesh.size:
        return None
    near = ELEMENT.get(states.held_dtype(value), EXACT)
    given = dict.fromkeys((segment.state.axes, segment.state.op) for segment in segments)
    for axes, op in dict.fromkeys([((), ""), *given]):
        reduced = dict(held)
        for axis in axes:
            reduced = over(axis, op or "sum", reduced, states.mesh)
        if _is_right(segments, whole, reduced, near):
            return State("terms" if axes else "right", None, axes, op=op)
    sizes = {states.mesh.size_over(axes) for axes, op in given if op == "avg"}
    is_sum = any(_is_right(segments, whole * size, held, near) for size in sizes)
    return UNKNOWN if is_sum else None


def _is_right(segments: Sequence[_Segment], whole: NDArray[np.float64], held: Arrays, near: float) -> bool:
    """Whether every segment of each rank's buffer is the rank's part of its tensor."""
    wholes = _cut(whole, [segment.shape for segment in segments])
    of_rank = {rank: _cut(array, [segment.parts[rank] for segment in segments]) for rank, array in held.items()}
    if not wholes or not of_rank or not all(of_rank.values()):
        return False
    for at, segment in enumerate(segments):
        regions = segment.state.layout.regions() if segment.state.layout is not None else ()
        for rank, region in regions:
            if rank not in of_rank or error_of(of_rank[rank][at], part_of(wholes[at], region)) > near:
                return False
    return True


def _cut(array: NDArray[np.float64], shapes: Sequence[tuple[int, ...]]) -> list[NDArray[np.float64]]:
    """Cut a buffer into tensors of some shapes; nothing if these are not all of it."""
    ends = [0]
    for shape in shapes:
        ends.append(ends[-1] + math.prod(shape))
    if array.ndim != 1 or array.size != ends[-1]:
        return []
    return [array[first:end].reshape(shape) for (first, end), shape in zip(pairwise(ends), shapes, strict=True)]


def _segments(states: States, value: Value) -> list[_Segment]:
    """Return the tensors that a buffer was joined of; nothing if it wasn't, or any of them is wrong."""
    lines = states.lines
    segments: list[_Segment] = []
    for joined in _joined(lines, value):
        source = lines.source(joined, lambda maker, given: maker.function in FLATTENS and given == maker.inputs[0])
        state, whole = states.placed(source), states.reference_of(source)
        if not state.is_known or state.layout is None or whole is None or whole.shape != state.layout.shape:
            return []
        parts = {rank: tuple(lines.records[rank, number].shape) for rank, number in source}
        segments.append(_Segment(state, whole.shape, parts))
    return segments


def _joined(lines: Lines, value: Value) -> Sequence[Value]:
    """Return what a tensor of one dim was joined of, before calls that leave its length; nothing if it wasn't."""
    shapes = _shapes(lines, value)
    seen: set[Value] = set()
    while value not in seen and all(len(shape) == 1 for shape in shapes):
        seen.add(value)
        maker = lines.producer(value)
        if maker is None or maker.function in JOINS:
            return maker.inputs if maker is not None and len(maker.inputs) <= MAX_SEGMENTS else ()
        value = next((given for given in maker.inputs if _shapes(lines, given) == shapes), value)
    return ()


def _shapes(lines: Lines, value: Value) -> list[tuple[int, ...]]:
    """Return a tensor's shape on each rank."""
    return [tuple(lines.records[pair].shape) for pair in value]
