"""Parts of a neighbor that a rank uses, too, and whose gradient isn't sent back: a halo, or one token of a shift."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.lines.fault import place_of
from shardviz.check.step.lines.offsets import starts_of
from shardviz.explain.step.line_reductions import HaloNotSentBack
from shardviz.relate.tolerance import ELEMENT, SINGLE
from shardviz.relate.values import magnitude, part_of, slices_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shardviz.check.step.lines.calls import Call, Value
    from shardviz.check.step.lines.states import States


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
