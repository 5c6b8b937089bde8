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
    lines agree with ranks'. What is made of sizes alone, as angles of positions are, may be kept, and so may what no
    output is made of, or what the same line makes of its last result: a running mean, or a state.
    """
    returned = {value for value, _ in states.lines.returned} if _returns_wrong(states) else set()
    for call in states.lines.calls if returned else ():
        for value in call.inputs:
            maker = states.lines.producer(value)
            is_kept = maker is not None and maker.first.call < call.first.call and maker.place != call.place
            is_read = is_kept and any(_inputs_of(states, value)) and bool(returned & states.lines.derived(call))
            if maker is not None and is_read:
                made = (
                    f"what {at(maker.line, call.line)} made in call {maker.first.call + 1} of the inputs of that call"
                )
                sentence = f"{reached(call)} reads in call {call.first.call + 1} of its module {made}"
                return fault_at(call, sentence, KeptFromEarlierCall(call.place, call.function, maker.place))
    return None


def _returns_wrong(states: States) -> bool:
    """Whether the step's forward goes wrong in a module that it calls once for each micro-batch.

    What is compared then is one output, joined of micro-batches.
    """
    points = [point for record in states.dump.files.ranks.values() for point in record.trace]
    outputs = [point for point in points if point.module == states.lines.asked_module and point.what == "output"]
    return any(point.state == "odd" for point in outputs) and not any(point.call for point in outputs)


def _inputs_of(states: States, value: Value) -> Iterator[Value]:
    """Yield what the module was given that a tensor is made of."""
    makers: Iterator[Call] = states.lines.makers(value)
    return (given for maker in makers for given in maker.inputs if states.lines.origin(given).startswith("input"))
