"""The first wrong line of a module, forward or backward.

Forward, the search (`search`) begins at what the module returns. If it leaves several lines, what calls read or
exchange may tell which; else none of them is named: it is one of those between two. Backward, it is the last call in
forward order that is given right gradients and hands back a wrong one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.step.lines.backward import backward_fault, micro_batches_fault
from shardviz.check.step.lines.calls import SELECTS
from shardviz.check.step.lines.exchanges import (
    MOVES,
    exchange_backward,
    exchange_fault,
    misplaced_fault,
    wrong_results,
)
from shardviz.check.step.lines.fault import Fault, called, fault_at, with_label
from shardviz.check.step.lines.foreign import foreign_fault, loop_fault, own_rows_fault, padding_fault, unwritten_fault
from shardviz.check.step.lines.offsets import other_axis_fault, same_slices_fault, shifted_fault, unequal_fault
from shardviz.check.step.lines.operands import operand_fault
from shardviz.check.step.lines.search import ForwardSearch, axes_in
from shardviz.explain.step.forward import ShiftedPart
from shardviz.explain.step.lines import (
    CarriedLine,
    MisplacedLine,
    OtherNumber,
    SegmentsOfPart,
    UnlikeOperands,
    WrongLine,
    WrongLines,
)
from shardviz.explain.step.losses import UnsummedValue

if TYPE_CHECKING:
    from shardviz.check.step.lines.calls import Call, Lines, Value
    from shardviz.check.step.lines.states import States

COUNTS = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")
"""Functions that go along a dim from its first element on."""


def fault_in(lines: Lines, states: States) -> Fault | None:
    """Return the first wrong line; None if there is none, or several lines could be it."""
    if (fault := micro_batches_fault(lines, states)) is not None:
        return fault
    for value in lines.values:  # in order, so that none of them has to go back far
        states.placed(value)
    fault = _narrowed(lines, states, forward_fault(lines, states))
    fault = fault or misplaced_fault(lines, states)
    if fault is None or isinstance(fault.cause, WrongLine | WrongLines | CarriedLine):
        fault = own_rows_fault(lines, states) or fault
    if fault is None or isinstance(fault.cause, WrongLines | CarriedLine):
        fault = operand_fault(lines, states) or fault
    fault = fault or exchange_backward(lines, states) or backward_fault(lines, states)
    return with_label(lines, states, None if fault is None or fault.is_torchs else fault)


def fault_of(lines: Lines, states: States, value: Value) -> Fault | None:
    """Return the line at which one tensor goes wrong; None if it is right, or several lines could be it."""
    state, search = states.placed(value), ForwardSearch(lines, states)
    if state.kind == "terms" and not state.op:
        return search.never_summed(value)
    fault = _narrowed(lines, states, search.blame(value)) if state.is_wrong else None
    return None if fault is None or fault.is_torchs else fault


def fault_of_mean(lines: Lines, states: States, value: Value) -> Fault | None:
    """Return the line that makes a rank's loss a term of a sum, although the ranks' losses are averaged.

    If a sum over ranks that the loss is made of is wrong, as a count of copies, it is that one.
    """
    makers = list(lines.makers(value))
    sums = (made for call in makers if call.first.is_collective for made in call.outputs)
    wrong = next((made for made in sums if states.placed(made).is_wrong), None)
    if wrong is not None or not makers:
        return None if wrong is None else ForwardSearch(lines, states).blame(wrong)
    axis = " and ".join(states.forward(value).axes)
    return fault_at(
        makers[0], f"{called(makers[0])} gives each rank one term of a sum over {axis}", UnsummedValue(axis)
    )


def _narrowed(lines: Lines, states: States, fault: Fault | None) -> Fault | None:
    """Return the line that a fault comes from, if what its calls read or exchange tells that."""
    if fault is not None and (cut := unequal_fault(lines, states) or other_axis_fault(lines, states)) is not None:
        return cut
    if fault is not None and fault.reads and not isinstance(fault.cause, MisplacedLine):
        return unwritten_fault(lines) or moved_fault(lines, states) or fault
    if fault is not None and _may_be_shifted(fault):
        return _shifted(lines, states) or _first_part(lines, states, fault) or fault
    if fault is not None and isinstance(fault.cause, UnlikeOperands):
        return same_slices_fault(lines, states, wrong_results(lines, states)) or fault
    if fault is not None and isinstance(fault.cause, WrongLines | CarriedLine):
        return (
            unwritten_fault(lines)
            or _counted_fault(lines, states)
            or _shifted(lines, states)
            or moved_fault(lines, states)
            or exchange_fault(lines, states)
            or foreign_fault(lines, states)
            or misplaced_fault(lines, states)
            or shifted_fault(lines, states, wrong_results(lines, states))
            or same_slices_fault(lines, states, wrong_results(lines, states))
            or padding_fault(lines, states)
            or loop_fault(lines, states)
            or fault
        )
    return fault


def _may_be_shifted(fault: Fault) -> bool:
    """Whether a call moves what is right, or selects slices of it and no other part of it that is known."""
    is_open = isinstance(fault.cause, WrongLine | OtherNumber | SegmentsOfPart | UnlikeOperands)
    return isinstance(fault.cause, MisplacedLine) or (fault.function in SELECTS and is_open)


def _shifted(lines: Lines, states: States) -> Fault | None:
    """Return the line that takes a stretch at a wrong offset; the first part on all ranks is no offset at all."""
    fault = shifted_fault(lines, states, wrong_results(lines, states))
    return fault if fault is not None and isinstance(fault.cause, ShiftedPart) and fault.cause.first else None


def _first_part(lines: Lines, states: States, fault: Fault) -> Fault | None:
    """Return a fault of which nothing else is known, if the line gives all ranks the first of their parts."""
    shifted = shifted_fault(lines, states, wrong_results(lines, states)) if isinstance(fault.cause, WrongLine) else None
    if shifted is None or shifted.place != fault.place or not isinstance(shifted.cause, ShiftedPart):
        return None
    return replace(shifted, cause=MisplacedLine(shifted.cause.place, shifted.function, is_of_rank=True))


def forward_fault(lines: Lines, states: States) -> Fault | None:
    """Return the line at which values first go wrong."""
    search = ForwardSearch(lines, states)
    returned = [value for value, _ in lines.returned]
    wrong = next((value for value in returned if states.placed(value).is_wrong), None)
    if wrong is not None:
        return search.blame(wrong) or _unsummed_at_end(lines, states, wrong)
    pending = next((value for value in returned if states.placed(value).kind == "terms"), None)
    return None if pending is None else search.never_summed(pending)


def _unsummed_at_end(lines: Lines, states: States, returned: Value) -> Fault | None:
    """Return the line whose terms a module ends with, if a hook makes what it returns of them."""
    made = lines.calls[-1].outputs if lines.calls and lines.producer(returned) is None else ()
    terms = next((value for value in made if states.placed(value).kind == "terms"), None)
    return ForwardSearch(lines, states).never_summed(terms) if terms is not None else None


def _counted_fault(lines: Lines, states: States) -> Fault | None:
    """Return the line that counts from the rank's first element, if ranks exchange what comes of it.

    Numbers that each rank counts from its own first element are right as long as they meet no other rank's.
    """
    for call in lines.calls:
        made = states.forward(call.outputs[0]) if call.first.function in COUNTS and call.outputs else None
        if made is None or not made.is_wrong or call.whole is None or not call.inputs:
            continue
        given = states.forward(call.inputs[0])
        chains = given.layout.chains if given.kind == "right" and given.layout is not None else ()
        numbers = call.first.numbers.split()
        along = [chain for dim, chain in enumerate(chains) if numbers[:1] in ([str(dim)], [str(dim - len(chains))])]
        if any(map(axes_in, along)) and _is_exchanged(lines, states, call):
            return ForwardSearch(lines, states).fault_of_moved(call.outputs[0], call)
    return None


def _is_exchanged(lines: Lines, states: States, call: Call) -> bool:
    """Whether ranks exchange what comes of a call, as long as it is not the unsharded model's."""
    derived = set(call.outputs)
    for later in lines.calls[call.order + 1 :]:
        if derived & {*later.inputs}:
            if later.first.is_collective:
                return True
            derived |= {value for value in later.outputs if not states.placed(value).is_known}
    return False


def moved_fault(lines: Lines, states: States) -> Fault | None:
    """Return the line that puts numbers in another order, which the first call that mixes them turns into others."""
    for call in lines.calls:
        if not call.outputs or not all(states.placed(value).is_wrong for value in call.outputs):
            continue
        moved = [value for value in call.inputs if states.forward(value).moved == "order"]
        if moved and all(states.forward(value).kind == "none" for value in call.outputs):
            maker = lines.producer(moved[0])
            while maker is not None and (earlier := _moved_before(lines, states, maker)):
                moved, maker = [earlier], lines.producer(earlier)
            if maker is None or maker.first.function not in MOVES:
                return None
            return ForwardSearch(lines, states).fault_of_moved(moved[0], maker)
    return None


def _moved_before(lines: Lines, states: States, call: Call) -> Value | None:
    """Return a tensor in another order that a call is made of, through what is not compared."""
    left, seen = list(call.inputs), set(call.outputs)
    while left:
        value = left.pop()
        state, maker = states.forward(value), lines.producer(value)
        if state.moved == "order":
            return value
        if value not in seen and not state.is_known and maker is not None:
            left += maker.inputs
        seen.add(value)
    return None
