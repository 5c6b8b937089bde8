"""What a module keeps of one call, and reads in a later one that is given something else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.step.lines.fault import Fault, at, fault_at, reached
from shardviz.explain.step.lines import KeptFromEarlierCall

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.check.step.lines.calls import Call, Value
    from shardviz.check.step.lines.states import States


def kept_fault(states: States) -> Fault | None:
    """Return the line that reads what was made of an earlier call's inputs; None if none does.

    Each micro-batch must be given its own. The unsharded model that is run on micro-batches keeps the same, so that its
    lines agree with ranks'. What is made of sizes alone, as angles of positions are, may be kept.
    """
    for call in states.lines.calls if _returns_wrong(states) else ():
        for value in call.inputs:
            maker = states.lines.producer(value)
            if maker is not None and maker.first.call < call.first.call and any(_inputs_of(states, value)):
                made = (
                    f"what {at(maker.line, call.line)} made in call {maker.first.call + 1} of the inputs of that call"
                )
                sentence = f"{reached(call)} reads in call {call.first.call + 1} of its module {made}"
                return fault_at(call, sentence, KeptFromEarlierCall(call.place, call.function, maker.place))
    return None


def _returns_wrong(states: States) -> bool:
    """Whether the step's forward, and not its backward, goes wrong in the module."""
    points = [point for record in states.dump.files.ranks.values() for point in record.trace]
    outputs = (point for point in points if point.module == states.lines.asked_module and point.what == "output")
    return any(point.state == "odd" for point in outputs)


def _inputs_of(states: States, value: Value) -> Iterator[Value]:
    """Yield what the module was given that a tensor is made of."""
    makers: Iterator[Call] = states.lines.makers(value)
    return (given for maker in makers for given in maker.inputs if states.lines.origin(given).startswith("input"))
