"""The line that takes another rank's part of a tensor, which a later call combines with the rank's own part.

A head of keys that is chosen by the wrong number is a part of the unsharded model's tensor, but not this rank's. It is
wrong where it meets a tensor of which the rank has its own part, if all that comes of the two is wrong. Without such a
partner it may be meant: an index into the rank's own part starts at 0, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.step.lines.fault import Fault, at, fault_at, given_fault, place_of, reached
from shardviz.explain.step.forward import MisplacedOperand
from shardviz.relate.tolerance import SINGLE
from shardviz.relate.values import error_of, part_of
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.check.step.lines.calls import Call, Lines, Value
    from shardviz.check.step.lines.states import States


def wrong_results(lines: Lines, states: States) -> list[Value]:
    """Return what a module returns wrong, or the loss of a step around the model."""
    loss = [lines.results["loss"]] if lines.is_step and "loss" in lines.results else []
    return [value for value, _ in (*lines.returned, *loss) if states.placed(value).is_wrong]


def misplaced_fault(lines: Lines, states: States) -> Fault | None:
    """Return the line that takes another rank's part; None if no call combines it with the rank's own part."""
    wrong = wrong_results(lines, states)
    for call in lines.calls if wrong else ():
        if not call.outputs or not all(states.placed(value).is_wrong for value in call.outputs):
            continue
        given = {value: states.forward(value) for value in call.inputs}
        moved = next((value for value, state in given.items() if state.moved == "rank"), None)
        is_mixed = moved is not None and any(state.split_layout for state in given.values())
        if moved is not None and is_mixed and spoils(lines, states, call, wrong):
            return _fault_of(lines, states, moved, call)
    return None


def spoils(lines: Lines, states: States, call: Call, wrong: list[Value]) -> bool:
    """Whether nothing right comes of a call's result, and what the module returns does."""
    derived = set(call.outputs)
    if any(states.forward(value).kind != "none" for value in derived):
        return False
    for later in lines.calls[call.order + 1 :]:
        if derived & {*later.inputs}:
            if any(states.placed(value).is_known for value in later.outputs):
                return False
            derived |= {*later.outputs}
    return any(value in derived for value in wrong)


def _fault_of(lines: Lines, states: States, moved: Value, call: Call) -> Fault:
    """Return the fault of the first line that makes another rank's part, or that the module is given it."""
    maker = lines.producer(moved)
    earlier: Value | None = moved
    while maker is not None and earlier is not None:
        earlier = next((value for value in maker.inputs if states.forward(value).moved == "rank"), None)
        maker = maker if earlier is None else lines.producer(earlier)
    if maker is None:
        return given_fault(call)
    ranks = tuple(_strangers(lines, states, moved))
    given = f"{reached(maker)} gives {named_ranks(ranks)} another rank's part"
    cause = MisplacedOperand(place_of(maker.line), maker.first.function, place_of(call.line), ranks)
    return fault_at(maker, f"{given}; {at(call.line, maker.line)} combines it with the rank's own part", cause)


def _strangers(lines: Lines, states: States, moved: Value) -> Iterator[int]:
    """Yield the ranks that don't have their own part."""
    held, whole, layout = states.held(moved), states.whole(lines.wanted[moved]), states.forward(moved).layout
    for rank, region in layout.regions() if whole is not None and layout is not None else ():
        if whole is not None and rank in held and error_of(held[rank], part_of(whole, region)) > SINGLE:
            yield rank
