"""The first wrong line of a module, forward or backward.

Forward, the search (`search`) begins at what the module returns. If it leaves several lines, what calls read or
exchange may tell which; else none of them is named: it is one of those between two. Backward, it is the last call in
forward order that is given right gradients and hands back a wrong one.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.lines.backward import backward_fault, micro_batches_fault
from shardviz.check.step.lines.calls import SELECTS, Call, Lines, Value
from shardviz.check.step.lines.exchanges import MOVES, exchange_backward, exchange_fault, not_restored_fault
from shardviz.check.step.lines.fault import Fault, called, fault_at, with_label
from shardviz.check.step.lines.foreign import (
    buffer_fault,
    foreign_fault,
    fused_fault,
    loop_fault,
    own_rows_fault,
    padding_fault,
    unwritten_fault,
)
from shardviz.check.step.lines.indices import own_index_fault, whole_index_fault
from shardviz.check.step.lines.kept import kept_fault
from shardviz.check.step.lines.offsets import (
    misplaced_fault,
    misplaced_weight_fault,
    other_axis_fault,
    same_slices_fault,
    shifted_fault,
    unequal_fault,
)
from shardviz.check.step.lines.operands import operand_fault, operator_fault, with_operator
from shardviz.check.step.lines.parallel import parallel_fault
from shardviz.check.step.lines.parts import merged_fault, neighbor_fault
from shardviz.check.step.lines.peaks import own_peak_fault
from shardviz.check.step.lines.search import ForwardSearch
from shardviz.explain.step.line_reductions import WrongLineBackward
from shardviz.explain.step.line_rows import PartOfAnotherDim
from shardviz.explain.step.lines import (
    CarriedLine,
    MisplacedLine,
    OtherArgument,
    OtherOperand,
    ReorderedPart,
    SegmentsOfPart,
    UnsummedLine,
    WrongLine,
    WrongLines,
)
from shardviz.explain.step.losses import TermsAveraged, UnsummedValue
from shardviz.explain.step.parts import ShiftedPart, UnlikeOperands
from shardviz.layout.layout import placements_of
from shardviz.relate.values import part_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.check.step.lines.states import States
    from shardviz.dump.records.trace import ArgumentRecord
    from shardviz.layout.region import Region

MAY_LACK_NEIGHBOR = (WrongLine, WrongLines, CarriedLine, MisplacedLine)
"""Causes of a line that may lack slices of a neighbor."""


def fault_in(states: States) -> Fault | None:
    """Return the first wrong line; None if there is none, or several lines could be it."""
    if (fault := micro_batches_fault(states)) is not None:
        return fault
    for value in states.lines.values:  # in order, so that none of them has to go back far
        states.placed(value)
    if (fault := operator_fault(states)) is not None:
        return fault
    fault = _narrowed(states, forward_fault(states))
    fault = fault or misplaced_fault(states)
    if fault is None or isinstance(fault.cause, WrongLine | WrongLines | CarriedLine):
        fault = own_rows_fault(states) or fault
    if fault is None or isinstance(fault.cause, WrongLine | WrongLines | OtherOperand):
        fault = fused_fault(states) or fault
    if fault is None or isinstance(fault.cause, WrongLine | WrongLines):
        fault = own_peak_fault(states) or fault
    if fault is None or isinstance(fault.cause, WrongLines | CarriedLine) or _is_of_composed(states, fault):
        fault = operand_fault(states) or parallel_fault(states) or misplaced_weight_fault(states) or fault
    if fault is None or type(fault.cause) in MAY_LACK_NEIGHBOR:
        fault = neighbor_fault(states) or fault
    fault = (
        fault
        or kept_fault(states)
        or exchange_backward(states)
        or with_operator(states, _aside(states, backward_fault(states)))
    )
    return with_label(states, None if fault is None or fault.is_torchs else _of_rows(states, fault))


def _is_of_composed(states: States, fault: Fault) -> bool:
    """Whether only a line's place is known, and lines take the steps of a function of torch's, one of them wrongly."""
    compared = {*states.lines.wanted.values()}
    return type(fault.cause) is WrongLine and not compared.isdisjoint(states.lines.composed)


def _aside(states: States, fault: Fault | None) -> Fault | None:
    """Return a fault in backward; in forward if its line makes something wrong that the module keeps for elsewhere.

    A balance loss, for one, leaves the module as an attribute, and what the module returns is right. Without a fault in
    backward it is what no line of the module reads and a gradient comes back to: no loss has what is only logged.
    """
    lines = states.lines
    if fault is None and states.is_right:
        returned = {value for value, _ in lines.returned}
        made = [value for call in lines.calls for value in call.outputs if value not in returned]
        kept = [value for value in made if all(lines.records[pair].has_gradient for pair in value)]
        return _blamed(states, (value for value in kept if not lines.readers(value)))
    if fault is None or not isinstance(fault.cause, WrongLineBackward):
        return fault
    returning = {call.order for value, _ in lines.returned for call in lines.makers(value)}
    calls = (call for call in lines.calls if (call.line, call.function) == (fault.line, fault.function))
    calls = (call for call in calls if call.order not in returning)
    return _blamed(states, (value for call in calls for value in call.outputs)) or fault


def _blamed(states: States, values: Iterable[Value]) -> Fault | None:
    """Return the line that is to blame for the first wrong one of some tensors that leave the module aside.

    What makes a right tensor doesn't, and is compared with the wrong one of the unsharded model's.
    """
    lines, search = states.lines, ForwardSearch(states)
    wrong = (value for value in values if states.placed(value).is_wrong and not search.is_mean_of_batch(value))
    aside = (
        value
        for value in wrong
        if not any(states.placed(made).is_known for reader in lines.readers(value) for made in reader.outputs)
    )
    return next(filter(None, map(search.blame, aside)), None)


def _of_rows(states: States, fault: Fault) -> Fault:
    """Return a fault with what the backward of a missing sum needs, if ranks have rows of their own."""
    if isinstance(fault.cause, UnsummedLine) and fault.cause.axis in states.batch_axes:
        return replace(fault, cause=replace(fault.cause, is_own=True))
    return fault


def fault_of(states: States, value: Value) -> Fault | None:
    """Return the line at which one tensor goes wrong; None if it is right, or several lines could be it."""
    state, search = states.placed(value), ForwardSearch(states)
    if state.kind == "terms" and not state.op:
        unsummed = search.never_summed(value)
        return None if unsummed is None else _of_rows(states, unsummed)
    if not state.is_wrong:
        return None
    fault = operator_fault(states, states.lines.makers(value)) or _narrowed(states, search.blame(value))
    return None if fault is None or fault.is_torchs else _of_rows(states, fault)


def argument_fault(states: States, arguments: Mapping[int, ArgumentRecord]) -> Fault | None:
    """Return the line that makes a wrong argument of a module that the one with these lines calls.

    Args:
        states: The lines of the module that makes it.
        arguments: What ranks are given that is not the unsharded model's.
    """
    wrong = (value for value in states.lines.values if states.placed(value).is_wrong)
    value = next((value for value in wrong if is_argument(states, value, arguments)), None)
    return None if value is None else fault_of(states, value)


def is_argument(states: States, value: Value, arguments: Mapping[int, ArgumentRecord]) -> bool:
    """Whether ranks have in a tensor what differs in an argument."""
    held, whole = states.held(value), states.reference_of(value)
    if whole is None or not arguments or not arguments.keys() <= held.keys():
        return False
    return all(
        any(_differs_so(held[rank], part_of(whole, region), record) for region in _regions(states, whole, held, rank))
        for rank, record in arguments.items()
    )


def _regions(
    states: States, whole: NDArray[np.float64], held: Mapping[int, NDArray[np.float64]], rank: int
) -> Iterator[Region]:
    return (region for _, region in placements_of(whole.shape, held[rank].shape, states.mesh, rank))


def _differs_so(array: NDArray[np.float64], expected: NDArray[np.float64], record: ArgumentRecord) -> bool:
    """Whether an array differs from what is expected where an argument does, and in as many elements."""
    if (array.size, array.ndim) != (record.size, len(record.at)) or np.any(np.array(record.at) >= array.shape):
        return False
    numbers = array[record.at], expected[record.at], int(np.count_nonzero(array != expected))
    return numbers == (record.held, record.expected, record.count)


def number_fault(states: States, arguments: Mapping[str, Mapping[int, ArgumentRecord]]) -> Fault | None:
    """Return the call that makes something wrong of right tensors, and of a number that the module is given.

    Args:
        states: The module's lines.
        arguments: What is wrong with its arguments on each rank, by name.
    """
    for call in states.lines.calls:
        is_first = bool(call.inputs) and all(states.placed(value).is_known for value in call.inputs)
        if call.whole is None or not is_first or not any(states.placed(made).is_wrong for made in call.outputs):
            continue
        for name, records in arguments.items():
            if _reads_number(call, records):
                rank, record = min(records.items())
                gets = f"{called(call)} gives {call.function} {name} of its module, on rank {rank} {record.differs}"
                return replace(fault_at(call, gets, WrongLine(call.place, call.function)), is_given=True, argument=name)
    return None


def lacking_fault(states: States, arguments: Mapping[str, Mapping[int, ArgumentRecord]]) -> Fault | None:
    """Return the first wrong call of a module that only one side gives a number: it takes another branch there.

    A call that only that side makes reads the number. Else the code splits its work by it, for one, and it is right.
    """
    lines = states.lines
    wrong = (call for call in lines.calls if any(states.placed(made).is_wrong for made in call.outputs))
    read = {name: of for name, of in arguments.items() if any(_is_read_alone(lines, record) for record in of.values())}
    call = next(wrong, None) if read else None
    if call is None:
        return None
    name, records = next(iter(read.items()))
    rank, record = min(records.items())
    gets = f"{called(call)} is the first wrong line, and its module is given another {name} on rank {rank}: "
    fault = fault_at(call, gets + record.differs, WrongLine(call.place, call.function))
    return replace(fault, is_given=True, argument=name)


def _is_read_alone(lines: Lines, record: ArgumentRecord) -> bool:
    """Whether a number that only one side gives a module is among those of a call that only this side makes.

    A 0 or 1 is in many calls, as a dim.
    """
    ranks = {lines.key_of(call.first): call.first.numbers for call in lines.calls}
    whole = {lines.key_of(line): line.numbers for line in lines.unsharded.lines}
    here, there = (ranks, whole) if record.lacking == "whole" else (whole, ranks)
    given = record.held if record.lacking == "whole" else record.expected
    is_telling = bool(record.lacking) and abs(given) > 1
    alone = (text.split() for key, text in here.items() if is_telling and key not in there)
    return any(_is_number(number, given) for numbers in alone for number in numbers)


def with_size_given(
    states: States, fault: Fault | None, arguments: Mapping[str, Mapping[int, ArgumentRecord]]
) -> Fault | None:
    """Return a fault with the argument of its module that is a size of the rank's part, if no other one is wrong."""
    sizes = {name: next(iter(records.values())) for name, records in arguments.items() if _is_size(states, records)}
    if fault is None or not isinstance(fault.cause, OtherArgument) or len(arguments) != 1 or not sizes:
        return fault
    ((name, record),) = sizes.items()
    return replace(fault, cause=replace(fault.cause, size=name, differs=record.differs))


def _is_size(states: States, records: Mapping[int, ArgumentRecord]) -> bool:
    """Whether all ranks are given one number, of which the unsharded model's is a multiple by an axis's size."""
    numbers = {(record.at, record.held, record.expected) for record in records.values()}
    at, held, expected = next(iter(numbers))
    is_one = len(numbers) == 1 and len(records) == states.mesh.size and not at
    return is_one and expected in {held * states.mesh.axis_size(axis) for axis in states.mesh.long_axes}


def _reads_number(call: Call, records: Mapping[int, ArgumentRecord]) -> bool:
    """Whether ranks give a call a number in place of the unsharded model's, as an argument of its module has them."""
    whole = call.whole.numbers.split() if call.whole is not None else []
    held = {rank: line.numbers.split() for rank, line in call.records.items()}
    first = next(iter(records.values()))
    if first.at or not records.keys() <= held.keys() or any(len(numbers) != len(whole) for numbers in held.values()):
        return False
    expected = {rank: records[rank].held if rank in records else first.expected for rank in held}
    return any(
        _is_number(number, first.expected) and all(_is_number(held[rank][at], expected[rank]) for rank in held)
        for at, number in enumerate(whole)
    )


def _is_number(text: str, number: float) -> bool:
    with suppress(ValueError):
        return float(text) == number
    return text == str(bool(number)) and number in (0.0, 1.0)


def fault_of_mean(states: States, value: Value) -> Fault | None:
    """Return the line that makes a rank's loss a term of a sum, although the ranks' losses are averaged.

    If a sum over ranks that the loss is made of is wrong, as a count of copies, it is that one.
    """
    makers = list(states.lines.makers(value))
    sums = (made for call in makers if call.first.is_collective for made in call.outputs)
    wrong = next((made for made in sums if states.placed(made).is_wrong), None)
    if wrong is not None or not makers:
        return None if wrong is None else ForwardSearch(states).blame(wrong)
    axis = " and ".join(states.forward(value).axes)
    return fault_at(
        makers[0], f"{called(makers[0])} gives each rank one term of a sum over {axis}", UnsummedValue(axis)
    )


def averaged_terms_fault(states: States, loss: Value) -> Fault | None:
    """Return the line whose result first is a rank's term of the loss, of which backward runs and DDP averages."""
    maker, state = ForwardSearch(states).maker_of_terms(loss), states.forward(loss)
    if maker is None:
        return None
    axes = " and ".join(state.axes)
    sentence = f"{called(maker)} gives each rank one term of a sum over {axes}, and backward runs on that"
    return fault_at(maker, sentence, TermsAveraged(maker.place, axes, states.mesh.size_over(state.axes)))


def _narrowed(states: States, fault: Fault | None) -> Fault | None:
    """Return the line that a fault comes from, if what its calls read or exchange tells that."""
    if fault is not None and (cut := unequal_fault(states) or other_axis_fault(states)) is not None:
        return cut
    is_vague = fault is not None and isinstance(fault.cause, WrongLine | WrongLines)
    own_index = (own_index_fault(states) if fault else None) or (whole_index_fault(states) if is_vague else None)
    if own_index is not None:
        return own_index
    is_open = fault is not None and isinstance(fault.cause, WrongLines | MisplacedLine | PartOfAnotherDim)
    if is_open and (merged := merged_fault(states)) is not None:
        return merged
    if fault is not None and fault.reads and not isinstance(fault.cause, MisplacedLine):
        return unwritten_fault(states.lines) or moved_fault(states) or fault
    if fault is not None and _may_be_shifted(fault):
        return _shifted(states) or _first_part(states, fault) or fault
    if fault is not None and isinstance(fault.cause, UnlikeOperands):
        return same_slices_fault(states) or fault
    if fault is not None and isinstance(fault.cause, WrongLines | CarriedLine):
        return (
            unwritten_fault(states.lines)
            or buffer_fault(states)
            or _shifted(states)
            or not_restored_fault(states)  # of rows that are routed, each rank has an order of its own
            or moved_fault(states)
            or exchange_fault(states)
            or foreign_fault(states)
            or misplaced_fault(states)
            or shifted_fault(states)
            or same_slices_fault(states)
            or padding_fault(states)
            or loop_fault(states)
            or fault
        )
    return fault


def _may_be_shifted(fault: Fault) -> bool:
    """Whether a call moves what is right, or selects slices of it and no other part of it that is known."""
    is_open = isinstance(fault.cause, WrongLine | SegmentsOfPart | UnlikeOperands)
    is_open |= isinstance(fault.cause, OtherArgument) and fault.cause.is_of_axis
    is_moved = isinstance(fault.cause, MisplacedLine) and not isinstance(fault.cause, ReorderedPart)
    return is_moved or (fault.function in SELECTS and is_open)


def _shifted(states: States) -> Fault | None:
    """Return the line that takes a stretch at a wrong offset; the first part on all ranks is no offset at all."""
    fault = shifted_fault(states)
    return fault if fault is not None and isinstance(fault.cause, ShiftedPart) and fault.cause.first else None


def _first_part(states: States, fault: Fault) -> Fault | None:
    """Return a fault of which nothing else is known, if the line gives all ranks the first of their parts."""
    shifted = shifted_fault(states) if isinstance(fault.cause, WrongLine) else None
    if shifted is None or shifted.place != fault.place or not isinstance(shifted.cause, ShiftedPart):
        return None
    return replace(shifted, cause=MisplacedLine(shifted.cause.place, shifted.function, is_of_rank=True))


def forward_fault(states: States) -> Fault | None:
    """Return the line at which values first go wrong."""
    search = ForwardSearch(states)
    returned = [value for value, _ in states.lines.returned]
    wrong = next((value for value in returned if states.placed(value).is_wrong), None)
    if wrong is not None:
        return search.blame(wrong) or _unsummed_at_end(states, wrong)
    pending = next((value for value in returned if states.placed(value).kind == "terms"), None)
    return None if pending is None else search.never_summed(pending)


def _unsummed_at_end(states: States, returned: Value) -> Fault | None:
    """Return the line whose terms a module ends with, if a hook makes what it returns of them."""
    lines = states.lines
    made = lines.calls[-1].outputs if lines.calls and lines.producer(returned) is None else ()
    terms = next((value for value in made if states.placed(value).kind == "terms"), None)
    return ForwardSearch(states).never_summed(terms) if terms is not None else None


def moved_fault(states: States) -> Fault | None:
    """Return the line that puts numbers in another order, which the first call that mixes them turns into others."""
    lines = states.lines
    for call in lines.calls:
        if not call.outputs or not all(states.placed(value).is_wrong for value in call.outputs):
            continue
        moved = [value for value in call.inputs if states.forward(value).moved == "order"]
        if moved and all(states.forward(value).kind == "none" for value in call.outputs):
            maker = lines.producer(moved[0])
            while maker is not None and (earlier := _moved_before(states, maker)):
                moved, maker = [earlier], lines.producer(earlier)
            if maker is None or maker.function not in MOVES:
                return None
            return ForwardSearch(states).fault_of_moved(moved[0], maker)
    return None


def _moved_before(states: States, call: Call) -> Value | None:
    """Return a tensor in another order that a call is made of, through what is not compared."""
    left, seen = list(call.inputs), set(call.outputs)
    while left:
        value = left.pop()
        state, maker = states.forward(value), states.lines.producer(value)
        if state.moved == "order":
            return value
        if value not in seen and not state.is_known and maker is not None:
            left += maker.inputs
        seen.add(value)
    return None
