"""The points of a step at which two runs are compared, with the micro-batches of a module put together.

Where a run calls a module k times as often as the other, it ran k parts of the batch: its calls are joined along the
dim that has the rows, so that a module that is called twice in one forward still has two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardviz.dump.records.trace import What
    from shardviz.live.step.trace.recorded import Call, Seen, Trace


class Place(NamedTuple):
    """A place in a step: what went in or out of one call of a module.

    Attributes:
        module: Its name; empty for the model itself.
        call: The number of the call, micro-batches counted as one.
        what: Input, output, or the gradient of either.
        tensor: Which of several tensors.
    """

    module: str
    call: int
    what: What
    tensor: int


@dataclass(frozen=True)
class Point:
    """What a run has at a place.

    Attributes:
        values: This rank's part; None for a gradient that did not come, or where too much was kept before it.
        needs_grad: Whether a gradient can flow back to the tensor.
        tensor: A number that points of one tensor share.
    """

    values: torch.Tensor | None
    needs_grad: bool
    tensor: int


def num_calls(trace: Trace) -> dict[str, int]:
    """Return how often every module was called."""
    return {name: len(calls) for name, calls in trace.calls.items() if calls}


def points_of(trace: Trace, counts: Mapping[str, int], dim: int = 0) -> dict[Place, Point]:
    """Return a run's points by place, in the order in which it came to them.

    Args:
        trace: The run.
        counts: How often each module is called in one forward of the whole batch.
        dim: The dim along which parts of the batch are joined.
    """
    points: dict[Place, Point] = {}
    for name in dict.fromkeys(trace.order):
        calls, count = trace.calls[name], counts.get(name, 0)
        if not count or len(calls) % count:
            continue
        for number in range(count):
            for what, index, point in _of_calls(calls[number::count], dim):
                points[Place(name, number, what, index)] = point
    return points


def _of_calls(calls: Sequence[Call], dim: int) -> Iterator[tuple[What, int, Point]]:
    """Yield the points of one call, or of one micro-batch after the other."""
    sides: tuple[tuple[What, What, list[list[Seen]]], ...] = (
        ("input", "gradient of input", [call.inputs for call in calls]),
        ("output", "gradient of output", [call.outputs for call in calls]),
    )
    for what, of_gradient, tensors in sides:
        for index in range(min(map(len, tensors))):
            parts = [own[index] for own in tensors]
            needs_grad, number = any(part.needs_grad for part in parts), parts[0].number
            yield what, index, Point(_joined([part.values for part in parts], dim), needs_grad, number)
            yield of_gradient, index, Point(_joined([part.gradient for part in parts], dim), needs_grad, number)


def _joined(parts: Sequence[torch.Tensor | None], dim: int) -> torch.Tensor | None:
    present = [part for part in parts if part is not None]
    if len(present) < len(parts) or len(parts) == 1:
        return parts[0] if len(parts) == 1 else None
    alike = {(part.ndim, part.shape[:dim], part.shape[dim + 1 :]) for part in present}
    return torch.cat(present, dim) if len(alike) == 1 and present[0].ndim > dim else None
