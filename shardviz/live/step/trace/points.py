"""Write a trace's values into a capture: this rank's, at every place of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from shardviz.dump.records.trace import KeptRecord, of_point
from shardviz.live.capture.locals import Local

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from shardviz.dump.records.trace import What
    from shardviz.live.capture.capture import Capture
    from shardviz.live.step.trace.recorder import Call, Seen, Trace


def add_points(capture: Capture, trace: Trace) -> None:
    """Add the inputs and outputs of every call of a trace, and the gradients of both.

    Args:
        capture: Where to; a tensor that goes through several modules is written once.
        trace: This rank's.
    """
    names: dict[int, str] = {}
    sides: tuple[tuple[What, What], ...] = (("input", "gradient of input"), ("output", "gradient of output"))
    for order, (name, number, call) in enumerate(_in_order(trace)):
        draws = trace.draws[name][number : number + 1] == [True]
        record = KeptRecord(name, "input", order, number, type=trace.types.get(name, ""), draws=draws)
        for side, tensors in zip(sides, (call.inputs, call.outputs), strict=True):
            for index, tensor in enumerate(tensors):
                tensor_record = structs.replace(
                    record, index=index, tensor=max(tensor.number, 0), needs_grad=tensor.needs_grad
                )
                _add(capture, names, structs.replace(tensor_record, what=side[0]), (tensor, tensor.values, 0))
                _add(capture, names, structs.replace(tensor_record, what=side[1]), (tensor, tensor.gradient, 1))
    for number, batch in enumerate(trace.batches):
        for index, (shape, values) in enumerate(batch):
            capture.kept.append(KeptRecord("", "batch", 0, number, index))
            capture.add_values(Local(of_point("", "batch", number, index), "activation", shape, values), "step")


def _in_order(trace: Trace) -> Iterator[tuple[str, int, Call]]:
    """Yield the calls of a step as they ended, each with its number among those of its module."""
    done: dict[str, int] = {}
    for name in trace.order:
        number = done.get(name, 0)
        done[name] = number + 1
        yield name, number, trace.calls[name][number]


def _add(
    capture: Capture, names: dict[int, str], record: KeptRecord, side: tuple[Seen, torch.Tensor | None, int]
) -> None:
    """Record a tensor, or its gradient, at a place; its values once, however many modules it goes through."""
    tensor, values, is_gradient = side
    name = of_point(record.module, record.what, record.call, record.index)
    first_name = names.setdefault(2 * id(tensor) + is_gradient, name)
    capture.kept.append(structs.replace(record, same_as=first_name if first_name != name else ""))
    if values is not None and first_name == name:
        capture.add_values(Local(name, "activation", tensor.shape, values), "step")
