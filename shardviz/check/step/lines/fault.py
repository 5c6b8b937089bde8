"""What is known of a first wrong line: what stands there, in a sentence, and the cause that it is.

A call of the forward makes a wrong result, reduces wrongly, or reads terms of a sum as the whole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.lines.calls import ADDITIONS, ENTRIES, Call
from shardviz.explain.step.line_reductions import (
    CopiesSummedLine,
    ExtremeOfPart,
    RepeatedReductionLine,
    WrongReductionLine,
)
from shardviz.explain.step.lines import (
    CountOfPart,
    MislabeledPlacement,
    MisplacedLine,
    OtherArgument,
    ScaledLine,
    ScaledTermLine,
    UnsummedLine,
    WrongLine,
    WrongLines,
)
from shardviz.explain.step.parts import UnlikeOperands
from shardviz.explain.templates import number
from shardviz.relate.tolerance import SINGLE
from shardviz.relate.values import farthest, magnitude
from shardviz.text import counted, listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.lines.calls import Value
    from shardviz.check.step.lines.state import State
    from shardviz.check.step.lines.states import States
    from shardviz.dump.records.trace import FrameRecord
    from shardviz.explain.cause import Cause
    from shardviz.explain.step.line_reductions import UnaveragedLine
    from shardviz.layout.mesh import Mesh

SCALES = ("div", "div_", "mul", "mul_", "true_divide", "multiply")
"""Functions that multiply a tensor by a number, if they are given no other."""

WHOLE = "the whole"


@dataclass(frozen=True)
class Fault:
    """A first wrong line.

    Attributes:
        sentence: What is wrong there, with each rank's values and the line before.
        is_forward: Whether the call makes something wrong of what is right, before any backward.
        is_scaled: Whether it is given what is right, or terms of it, and returns the whole times a number.
        summed: The collective that sums what it makes; empty if nothing does.
        reads: The function that gets what is right, if `function` is given what that makes of it.
        is_given: Whether it reads what its module is given, and that is no part of the unsharded model's.
        argument: The only wrong one of these inputs, as `input 1`, or by its name; empty if that isn't known.
        given: Its numbers on each rank.
        by_terms: Whether it divides by one term of a sum.
        is_of_sizes: Whether it multiplies by a number that is made of sizes, and not of what tensors hold.
        covers: The weights whose gradients are wrong because of it, too: they are read before it.
    """

    line: FrameRecord
    function: str
    sentence: str
    cause: Cause
    is_forward: bool = False
    is_scaled: bool = False
    summed: str = ""
    reads: str = ""
    is_given: bool = False
    argument: str = ""
    given: Value = ()
    by_terms: bool = False
    is_of_sizes: bool = False
    covers: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """The line as `moe.py:83`."""
        return self.line.place

    @property
    def is_torchs(self) -> bool:
        """Whether the line is one of torch's own modules, which has no line of the user's in it."""
        return self.line.file.startswith("torch/")


def fault_at(call: Call, sentence: str, cause: Cause) -> Fault:
    """Return the fault of a call."""
    return Fault(call.line, call.function, sentence, cause)


def between(before: FrameRecord, last: Call, *, is_own: bool = False, buffers: Sequence[str] = ()) -> Fault:
    """Return that one of the lines from one to another is wrong.

    Args:
        is_own: Whether ranks compute with numbers of their own there, and no collective is called.
        buffers: The buffers that they read and that are no part of the unsharded model's.
    """
    sentence = f"it goes wrong between {at(before)} and {at(last.line, before)}"
    return fault_at(last, sentence, WrongLines(before.place, last.place, is_own, listed(buffers)))


def first_reader(readers: Iterable[Call]) -> Call:
    """Return the first of some calls that reads what it is given; what makes room like it reads no number."""
    return min(readers, key=lambda reader: (reader.function.endswith("_like"), reader.order))


def unlike_input(states: States, unlike: Sequence[Value]) -> tuple[str, str]:
    """Return which of a module's inputs alone is wrong, and where it differs; empty if that isn't known."""
    (first, *more), origin = unlike, states.lines.origin
    inputs = [value for value in states.lines.values if origin(value).startswith("input") and value != first]
    whole = states.reference_of(first)
    if more or whole is None or not any(states.placed(value).is_known for value in inputs):
        return "", ""
    for rank, held in states.held(first).items():
        if held.shape != whole.shape or not (places := np.argwhere(held != whole)).size:
            continue
        at, is_mask = tuple(map(int, places[0])), states.held_dtype(first) == "bool"
        has, wanted = ((bool(array[at]) if is_mask else float(array[at])) for array in (held, whole))
        differ = f"on rank {rank} {len(places):,} of {counted(whole.size, 'element')} differ"
        return origin(first), f"{differ}, the first at [{', '.join(map(str, at))}]: {has} for {wanted}"
    return origin(first), ""


def given_fault(
    call: Call, argument: str = "", differs: str = "", given: Sequence[Value] = (), *, is_step: bool = False
) -> Fault:
    """Return the fault of a call that reads what its module is given wrong.

    Args:
        argument: The input that alone is wrong, as `input 1`; empty if that isn't known.
        differs: Where its numbers differ.
        given: The inputs that are wrong.
        is_step: Whether they come from outside of a step, as another model's weights do.
    """
    reads = "reads a tensor from outside of the step" if is_step else "reads what its module is given"
    gives = f"gives {call.function} {argument} of its module" if argument else reads
    sentence = f"{at(call.line)} {gives}, which is no part of the unsharded model's{f' ({differs})' if differs else ''}"
    cause = WrongLine(call.place, call.function)
    only = given[0] if len(given) == 1 else ()
    return replace(fault_at(call, sentence, cause), is_given=True, argument=argument, given=only)


def scaling_of(states: States, calls: Iterable[Call]) -> tuple[Call, float] | None:
    """Return the call that multiplies the whole by a number, if without it the module's result is right; or None.

    The sharded code alone makes the call, as it divides a sum over ranks by their number, and adds to it afterwards.
    """
    alone = [call for call in calls if call.function in SCALES and len(call.inputs) == 1 and call.whole is None]
    results = [(states.held(value), states.reference_of(value)) for value in states.wrong_results if alone]
    for call in alone:
        before, after = states.held(call.inputs[0]), states.held(call.outputs[0])
        for held, due in results if states.placed(call.inputs[0]).text == WHOLE and before and after else ():
            if due is None or not all(array.shape == due.shape for side in (held, before) for array in side.values()):
                continue
            rank, array = next(iter(before.items()))
            at = np.unravel_index(int(np.argmax(np.abs(array))), array.shape)
            times = float(after[rank][at] / array[at]) if array[at] else 1.0
            is_scaled = all(is_near_in(times * array, after[rank]) for rank, array in before.items())
            if is_scaled and all(is_near_in(due, held[rank] - after[rank] + before[rank]) for rank in held):
                return call, times
    return None


def is_near_in(wanted: NDArray[np.float64], held: NDArray[np.float64]) -> bool:
    """Whether two arrays of one shape differ by rounding to float32 alone."""
    return farthest(held, wanted) <= SINGLE * magnitude(wanted)


def at(line: FrameRecord, previous: FrameRecord | None = None) -> str:
    """Return a line with its text; without the file's name behind a line of the same file."""
    place = f"line {line.line}" if previous is not None and previous.file == line.file else line.place
    return f"{place} `{line.source}`" if line.source else place


def called(call: Call, previous: FrameRecord | None = None) -> str:
    """Return a call's line, and the line that calls the function in which it stands, in a step around the model."""
    caller = _caller(call)
    return f"{at(call.line, previous)}{f', called in {at(caller, call.line)},' if caller is not None else ''}"


def reached(call: Call, previous: FrameRecord | None = None) -> str:
    """Return a call's line, the line in a function of the user's that makes the call, and the line that calls it."""
    caller, inner = _caller(call), call.inner_line
    parts = [f"in {at(inner, call.line)}"] if inner.place != call.place else []
    parts += [f"called in {at(caller, call.line)}"] if caller is not None else []
    between = f", {', '.join(parts)}," if parts else ""
    return f"{at(call.line, previous)}{between}"


def after(before: FrameRecord | None, line: FrameRecord) -> str:
    """Say after which line another is the first wrong line; nothing without one."""
    return f", after {at(before, line)}" if before not in (None, line) and before is not None else ""


def _caller(call: Call) -> FrameRecord | None:
    frames, own = call.first.frames, call.first.innermost
    is_inside = call.is_around and own and frames[own].function not in ENTRIES
    return frames[own - 1] if is_inside and frames[own - 1].place != frames[own].place else None


@dataclass(frozen=True)
class Act:
    """A call that makes something wrong of what is right.

    Attributes:
        given: What ranks have of what it is given; empty if it is given no tensor, or its module returns it.
        held: What they have of its result.
        before: The line that makes what it is given, or the terms.
        summed: The collective that sums what it makes; empty if nothing does.
    """

    call: Call
    given: str
    held: State
    before: FrameRecord | None
    summed: str = ""

    @property
    def place(self) -> str:
        """Its line as `moe.py:83`."""
        return self.call.place

    @property
    def function(self) -> str:
        """What it calls."""
        return self.call.function

    @property
    def inner(self) -> str:
        """The line in a function that its line calls, if that makes the call."""
        return self.call.inner_line.place

    def fault(self, cause: Cause, clause: str = "", *, over: str = "") -> Fault:
        """Return the fault with a cause; the clause says what the call gets, if that isn't `given` over some ranks."""
        gets = f"{self.function}{over} gets {self.given}, and returns" if self.given else f"{self.function} returns"
        is_first = f"{reached(self.call)} is the first wrong line{after(self.before, self.call.line)}"
        return self.with_sentence(f"{is_first}: {clause or gets} {self.held.text}", cause)

    def with_sentence(self, sentence: str, cause: Cause) -> Fault:
        """Return the fault with a sentence of its own."""
        return replace(fault_at(self.call, sentence, cause), is_forward=True, summed=self.summed)


def wrong_argument(act: Act, held: str, wanted: str, *, is_of_axis: bool = False) -> Fault:
    """Return the fault of a call that is given another flag, word or number than the unsharded model's.

    Args:
        is_of_axis: Whether it is the unsharded model's times an axis's size.
    """
    gets = f"{act.function} gets {act.given} and " if act.given else f"{act.function} gets "
    clause = f"{gets}the argument {held}, in the unsharded model {wanted}, and returns"
    return act.fault(OtherArgument(act.inner, act.function, held, wanted, is_of_axis), clause)


def wrong_count(act: Act, spoiler: Call, counts: str) -> Fault:
    """Return the fault of a call that counts a rank's own part, if what is made of the count is no rank's part."""
    fault = act.fault(CountOfPart(act.inner, act.function, counts) if counts else WrongLine(act.place, act.function))
    line = spoiler.inner_line
    where = "" if line == act.call.inner_line else f" in {at(line, act.call.line)}"
    made = f"; of that, {spoiler.function}{where} makes no rank's part of the unsharded model's"
    return replace(fault, sentence=fault.sentence + made)


def wrong_result(
    act: Act,
    mean: UnaveragedLine | None,
    times: float,
    reads: str,
    unlike: str,
    root: tuple[str, bool],
    of_part: Cause | None,
) -> Fault:
    """Return the fault of a call whose result is wrong.

    Args:
        mean: The cause if it is one term of a mean.
        times: By what its result is too large, if that is all that is wrong; else 0.
        reads: The function that is given `given`, if the call is given what that makes: the collective among the calls
            between, or the first of them.
        unlike: The dim along which two inputs have different slices of one size on a rank; empty if there is none.
        root: The axes whose size may make `times`, as `dp or tp`, and whether the root of the size does.
        of_part: The cause if it does with a rank's part what is right for the whole.
    """
    moved, place, function = act.held.moved, act.place, act.function
    if of_part is not None:
        cause: Cause = of_part
    elif moved:
        cause = MisplacedLine(act.inner, function, is_of_rank=moved == "rank")
    elif unlike:
        cause = UnlikeOperands(place, function, act.given, int(unlike))
    elif mean is not None:
        cause = mean
    elif times:
        adds = function if function in ADDITIONS and times > 1 and not reads else ""
        cause = ScaledLine(place, times, root[0], root[1], adds)
    else:
        cause = WrongLine(place, function, act.given, reads)
    clause = f"{reads} gets {act.given}, and {function} makes of its result" if act.given and reads else ""
    is_scaled = bool(times) and not (mean or moved)
    return replace(act.fault(cause, clause), is_scaled=is_scaled, reads=reads)


def extreme_of_part(act: Act, axis: str, op: str, reduction: Call | None, reduced: State | None) -> Fault | None:
    """Return the fault of a call that takes the extreme of a part, or of the collective that reduces extremes wrongly.

    Args:
        axis: The axis over which ranks' results have the unsharded model's.
        op: What that is of them.
        reduction: The collective that gets what the call makes; None if none does.
        reduced: What ranks have of its result.
    """
    if reduction is None or (op == "norm" and reduced is not None and reduced.is_wrong):
        return act.fault(ExtremeOfPart(act.inner, act.function, axis, op))
    if reduced is None or not reduced.is_wrong:
        return None
    return wrong_reduction(Act(reduction, act.held.text, reduced, act.call.line), axis, op=op)


def averaged_terms(act: Act, axis: str) -> Fault:
    """Return the fault of a reduction that averages the terms of a sum over an axis."""
    ranks = act.call.first.ranks
    cause = WrongReductionLine(act.place, act.function, ranks, axis, averages=True)
    return replace(act.fault(cause, over=f" over {named_ranks(ranks)}"), is_scaled=True)


def wrong_reduction(act: Act, axis: str, times: int = 0, copies: str = "", op: str = "") -> Fault:
    """Return the fault of a reduction that gives something else.

    Args:
        axis: The axis of the terms that it is given; empty if it is given none.
        times: By what its result is too large, if that is all that is wrong; else 0.
        copies: The axes whose ranks have the same term of its sum, if that makes `times`.
        op: The reduction that the terms need, if that is no sum.
    """
    place, function, ranks = act.place, act.function, act.call.first.ranks
    if copies:
        cause: Cause = CopiesSummedLine(place, function, ranks, axis, copies, times)
    elif times:
        cause = RepeatedReductionLine(place, function, times, ranks)
    else:
        cause = WrongReductionLine(place, function, ranks, axis, op)
    return act.fault(cause, over=f" over {named_ranks(ranks)}")


def unsummed(
    act: Act,
    axis: str,
    operand: str = "",
    *,
    is_beside_whole: bool = False,
    is_mean: bool = False,
    beside: str = "",
    is_inside: bool = False,
) -> Fault:
    """Return the fault of a call that reads terms, which the line before makes, as the whole.

    Args:
        axis: The axis of the missing sum.
        operand: What gives it the terms, if one line does both.
        is_beside_whole: Whether it also takes what every rank has whole, or its part of.
        is_mean: Whether the terms are those of a mean.
        beside: What the line computes of each rank's own part besides.
        is_inside: Whether both are made inside of a function that one line calls: `before` is a line of that function.
    """
    line, before = act.call.line, act.before
    if before is None:
        return act.fault(WrongLine(act.place, act.function, act.given))
    kind, verb = ("mean", "averages") if is_mean else ("sum", "sums")
    terms = f"{at(before)} gives each rank one term of a {kind} over {axis}"
    if before == line and operand:
        start = f"{at(before)} makes one term of a {kind} over {axis}, by {operand}"
        sentence = f"{start}, and {act.function} takes it before anything {verb} it"
    elif before == line:
        sentence = f"{terms}{'' if act.given else ', and the module returns it'}; nothing {verb} it"
    elif act.summed:
        sentence = f"{terms}; {reached(act.call, before)} uses it before {act.summed} {verb} it"
    else:
        sentence = f"{terms}; {reached(act.call, before)} uses it as the whole; nothing {verb} it between"
    inside = (act.function, operand, "a tensor that needs no sum" if is_beside_whole else "") if operand else ("",) * 3
    reader, mean = (act.inner if is_inside else act.place) if act.given else "", "mean" if is_mean else ""
    return act.with_sentence(sentence, UnsummedLine(before.place, reader, axis, *inside, mean, beside=beside))


def scaled_term(act: Act, axis: str, times: float, *, is_size: bool) -> Fault:
    """Return the fault of a call that multiplies each rank's term of a mean by a number."""
    is_first = f"{reached(act.call)} is the first wrong line{after(act.before, act.call.line)}"
    sentence = f"{is_first}: {act.function} gets {act.given}, and returns {number(times)} times the term"
    return act.with_sentence(sentence, ScaledTermLine(act.place, times, axis, is_size))


def ratio_of_terms(act: Act, axis: str) -> Fault:
    """Return the fault of a call that divides one term of a sum by one term of another."""
    before = act.before or act.call.line
    summed = f"{act.summed} sums the quotients" if act.summed else "nothing sums either before"
    sentence = f"{reached(act.call)} divides one term of a sum over {axis} by one term of another; {summed}"
    return replace(
        act.with_sentence(sentence, UnsummedLine(act.place, act.place, axis, divisor=before.place)), by_terms=True
    )


def with_label(states: States, fault: Fault | None) -> Fault | None:
    """Return a fault, or that of the `DTensor.from_local` behind it, which takes terms for the whole or the reverse."""
    lines = states.lines
    cause = fault.cause if fault is not None else None
    if fault is None or not isinstance(cause, UnsummedLine | ScaledLine | RepeatedReductionLine):
        return fault
    axis = cause.axis if isinstance(cause, UnsummedLine) else ""
    returned = {value for value, _ in lines.returned} if isinstance(cause, UnsummedLine) and not cause.reader else set()
    for call in lines.calls:
        if call.function != FROM_LOCAL or not call.inputs or not call.outputs:
            continue
        given, label = states.forward(call.inputs[0]), lines.records[call.outputs[0][0]].placements
        is_of_sum = "Partial" in _along(axis, label, states.mesh)
        is_mislabeled = axis in given.axes and not is_of_sum if axis else given.text == WHOLE and label == SUM
        places = {later.place for later in lines.following(call)}
        if label and is_mislabeled and (fault.place in places or returned & lines.derived(call)):
            sentence = f"{fault.sentence}; {reached(call)} labels {given.text} as {label}"
            return fault_at(call, sentence, MislabeledPlacement(call.place, label, axis))
    return fault


def _along(axis: str, label: str, mesh: Mesh) -> str:
    """Return the placement along an axis, or all of them if they are of another mesh."""
    placements = re.split(r", (?=[A-Z_])", label)
    return placements[mesh.axes.index(axis)] if axis in mesh.axes and len(placements) == mesh.ndim else label


WHOLE = "the whole"
SUM = "Partial()"
FROM_LOCAL = "_FromTorchTensor"
"""What `DTensor.from_local` calls."""
