"""The first call of a step's modules that goes wrong, forward or backward.

Modules end after those that they call, so the first that goes wrong in forward is the innermost. Where its inputs are
wrong already, the code between calls made them so, which is that of the nearest module around it whose own inputs are
right.

A gradient is that of a tensor: what all modules that read it send back, together. So where several read a tensor and
its gradient is wrong, those are not to blame beside which another reader was given a wrong gradient itself. Nor is one
whose own weights have right gradients: it did its part. Then another reader is at fault whose weights' gradients are
wrong, or the module around them, which reads the tensor as well: a residual; or what the tensor is read by cannot be
told apart. And a tensor that leaves the modules as a further output, such as a router's logits, is read by what is no
module: the loss, a hook or another stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from shardviz.check.step.trace.calls import Call, Calls, is_within
from shardviz.explain.templates import module_name
from shardviz.groups import in_groups

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardviz.check.step.comparison import Compared
    from shardviz.dump.records.trace import PointRecord, State, What


Direction = Literal["forward", "backward"]
Way = Literal["within", "between", "outside", "unsummed", "cut", "lost", "again"]
"""How it goes wrong: in the call; in its own code between two calls that it makes; in what reads its output outside of
all calls; what it returns is never summed; nothing can flow back from it; what flows back to it does not arrive; or
backward runs again, in another way, what it calls."""


@dataclass(frozen=True)
class Divergence:
    """The first wrong call of a step.

    Attributes:
        direction: Whether it is found in forward or in backward.
        way: How it goes wrong.
        call: The call; its module is the first wrong one.
        point: The first point that is not the unsharded model's; None if it is not there at all.
        after: The last call before it that is right, of those that it makes; the last that returns what it makes.
        before: The call that is given, or gives back, what is wrong.
        readers: The calls that read what it makes, if several do and its gradient is wrong.
        output: The output whose gradient comes from outside of modules: `output[1] of moe`.
    """

    direction: Direction
    way: Way
    call: Call
    point: PointRecord | None = None
    after: str = ""
    before: str = ""
    readers: tuple[str, ...] = ()
    output: str = ""

    @property
    def module(self) -> str:
        """The name of the first wrong module; empty for the model itself."""
        return self.call.module

    @property
    def axis(self) -> str:
        """The axis along which a sum is pending."""
        return pending_axis(self.point)

    @property
    def called(self) -> str:
        """What sentences call it."""
        return module_name(self.module) or "the model itself"


def pending_axis(point: PointRecord | None) -> str:
    """Return the axis over which a point is the terms of a sum."""
    return point.layout.rpartition(" +")[2] if point is not None and " +" in point.layout else ""


def first_in_forward(calls: Calls) -> Divergence | None:
    """Return the first divergence of a step in forward; None if all outputs are right, or nothing is known."""
    for at, call in enumerate(calls.in_order):
        side = _bad_side(calls, call)
        if side is not None and not calls.is_contained(call, "output") and not calls.is_habit(call, side):
            return _unsummed_forward(calls, at) or (
                _between_forward(calls, call) if call.is_bad("input") else _within_forward(call)
            )
    return None


def first_unlike_others(calls: Calls) -> Divergence | None:
    """Return the first call with right inputs and a wrong output that is right in another layer.

    In narrow numbers what is wrong in a module can be lost in the rounding of what is around it.
    """
    for call in calls.in_order:
        if call.is_bad("output") and call.is_good("input") and calls.is_unlike_others(call, "output"):
            return _within_forward(call)
    return None


def _bad_side(calls: Calls, call: Call) -> What | None:
    # Slices that are out of order are bad if other layers' are in order.
    is_out_of_order = call.state("output") == "moved" and calls.is_unlike_others(call, "output")
    if call.is_bad("output") or is_out_of_order:
        return "output"
    return "input" if call.is_bad("input") else None


def _within_forward(call: Call) -> Divergence:
    return Divergence("forward", "within", call, call.point("output", "odd", "repeated", "moved"))


def _between_forward(calls: Calls, call: Call) -> Divergence:
    """Blame the nearest module around a call whose inputs are right, or not known; else it arrives wrong there."""
    point = call.point("input", "odd", "repeated", "moved")
    around = [call, *calls.around(call)]
    outer = next((one for one in around[1:] if not one.is_bad("input")), None)
    if outer is None:
        first = around[-1]
        return Divergence("forward", "between", first, point, _right_before(calls.in_order, call), first.module)
    return Divergence("forward", "between", outer, point, _right_before(calls.within(outer), call), call.module)


def start_of_order(calls: Calls, call: Call) -> Divergence | None:
    """Return where slices get the order in which another call is given them; None if they are in order after that.

    It is the last call before it that gives them another order, or what the code between two calls makes of the output
    of one that has them in order.
    """
    last = call
    for earlier in (earlier for earlier in reversed(calls.in_order) if earlier.order < call.order):
        if _begins_order(earlier):
            return _within_forward(next(filter(_begins_order, calls.within(earlier)), earlier))
        if earlier.state("output") == "right" and not calls.is_contained(earlier, "output"):
            is_between = last is not call and all(one.state("input") != "moved" for one in calls.around(last))
            return _between_forward(calls, last) if is_between else None
        if earlier.state("input") == "moved" and not calls.within(earlier):
            last = earlier
    return None


def _begins_order(call: Call) -> bool:
    """Whether a call is given slices in order, and returns them in another."""
    return call.state("output") == "moved" and call.state("input") == "right"


def _right_before(calls: Sequence[Call], call: Call) -> str:
    """Return the name of the last call with a right output before a call; empty without one."""
    before = [one for one in calls if one.order < call.order and not one.is_bad("output")]
    return before[-1].module if before else ""


def _unsummed_forward(calls: Calls, at: int) -> Divergence | None:
    """Blame the call before if it returns terms of a sum that other layers sum."""
    call = calls.in_order[at]
    last = calls.in_order[at - 1] if at else None
    if last is None or last.state("output") != "pending":
        return None
    alike = [one.state("output") for one in calls.alike(last)]
    is_read = call.is_bad("input") or call.state("input") == "pending" or "right" in alike
    if "pending" in alike or not is_read:
        return None
    point = last.point("output", "pending")
    return Divergence("forward", "unsummed", last, point, before=call.module)


INPUT: Literal["gradient of input"] = "gradient of input"
OUTPUT: Literal["gradient of output"] = "gradient of output"
BAD: tuple[State, ...] = ("odd", "repeated", "none")


def first_in_backward(calls: Calls) -> Divergence | None:
    """Return the first divergence of a step in backward; None if the gradients of activations are right."""
    cut = _run_again(calls) or _cut(calls)
    if cut is not None or not _begins_right(calls):
        return cut or _behind_skipped(calls)
    calls = _without_passed_outputs(calls)
    return _reordered(calls) or _descended(calls) or _between_calls(calls)


def _reordered(calls: Calls) -> Divergence | None:
    """Return the last call whose output's gradient arrives with its slices in another order than the output has.

    If forward has slices in another order, as zigzag context parallel does, an output may have that order, too: one of
    zeros, as an adapter's, is right in every order.
    """
    if any("moved" in (call.state("input"), call.state("output")) for call in calls.in_order):
        return None
    for call in reversed(calls.in_order):
        if call.state(OUTPUT) == "moved" and call.state("output") == "right":
            later = (one.module for one in calls.in_order if one.order > call.order and one.module)
            return Divergence("backward", "between", call, call.point(OUTPUT, "moved"), next(later, ""), call.module)
    return None


def _without_passed_outputs(calls: Calls) -> Calls:
    """Return calls without the gradients of outputs that a call was given: they come from whatever else reads them."""

    def points_of(call: Call) -> dict[int, list[PointRecord]]:
        passed = _passed(call)
        return {
            rank: [point for point in points if point.what != OUTPUT or (rank, point.tensor) not in passed]
            for rank, points in call.points.items()
        }

    return Calls(tuple(replace(call, points=points_of(call)) if _passed(call) else call for call in calls.in_order))


def _passed(call: Call) -> set[tuple[int, int]]:
    """Return the tensors that a call returns as they were given to it, if it returns others as well."""
    outputs = call.tensors("output")
    passed = outputs & call.tensors("input")
    return passed if passed < outputs else set()


def _begins_right(calls: Calls) -> bool:
    """Whether a gradient that backward begins with is the unsharded model's; else there is nothing to go by."""
    with_output = [call for call in calls.in_order if call.state(OUTPUT) is not None]
    return bool(with_output) and not is_wrong_from_loss(calls, with_output[-1])


def is_wrong_from_loss(calls: Calls, call: Call) -> bool:
    """Whether a gradient of the last call's output is wrong, and can only come from what reads it.

    A module may have used an output itself if another of its outputs has a right gradient.
    """
    wrong = call.tensors(OUTPUT, *BAD, "cut")
    returning = [other.tensors("output") for other in calls.in_order if other is not call]
    beside_others = {tensor for outputs in returning if outputs - wrong for tensor in outputs}
    return bool(wrong if not is_given_right(call) else wrong - beside_others)


def is_given_right(call: Call) -> bool:
    """Whether a call gets a right gradient of one of its outputs at least."""
    return bool(call.tensors(OUTPUT, "right", "moved", "pending") - call.tensors(OUTPUT, *BAD, "cut"))


def _behind_skipped(calls: Calls) -> Divergence | None:
    """Return the last call if its output goes to no module, and the unsharded model has one there."""
    call = next((call for call in reversed(calls.in_order) if call.state(OUTPUT) is not None), None)
    point = call.point(OUTPUT, "odd") if call is not None else None
    return Divergence("backward", "between", call, point) if call is not None and point and point.skipped else None


def _run_again(calls: Calls) -> Divergence | None:
    """Return the first call whose second run, in backward, differs; if several modules make such calls, in the last."""
    again = [call for call in calls.in_order if call.again]
    if not again:
        return None
    outer = next((one for one in calls.around(again[-1]) if not one.again), again[-1])
    inner = next(call for call in again if call is outer or is_within(call.module, outer.module))
    return Divergence("backward", "again", inner if inner.again == "outputs" else outer, before=inner.module)


def _cut(calls: Calls) -> Divergence | None:
    """Return where the graph is cut: the first place in forward order, or of several cuts that of the last one.

    Between two cuts a gradient arrives, such as a residual's. Without one, what comes later was cut at the first, and
    so was what a module is given that calls the first.
    """
    place, arrives = None, False
    for call in calls.in_order:
        if call.state(INPUT) == "cut" and not _is_expected(calls, call, INPUT):
            is_around = place is not None and (not call.module or is_within(place.before, call.module))
            if place is None or (arrives and not is_around and call.is_good(OUTPUT)):
                outer = next((one for one in calls.around(call) if one.state(INPUT) != "cut"), call)
                place, arrives = Divergence("backward", "cut", outer, before=call.module), False
        elif call.state(OUTPUT) == "cut" and not _is_expected(calls, call, OUTPUT):
            place = place or Divergence("backward", "cut", call)
        elif place is not None:
            arrives |= call.state(OUTPUT) not in (None, "cut", "none")
    return place


def _is_expected(calls: Calls, call: Call, what: What) -> bool:
    return calls.is_contained(call, INPUT) or calls.is_habit(call, what)


def _goes_wrong(calls: Calls, call: Call) -> bool:
    """Whether a call is given the right gradient and gives back a wrong one, which gets out of the calls around it."""
    is_wrong = bool(call.tensors(INPUT, *BAD, "cut") - _passed(call)) and not _is_incomparable(call)
    return call.is_good(OUTPUT) and is_wrong and not _is_expected(calls, call, INPUT)


def _is_incomparable(call: Call) -> bool:
    """Whether all that has a wrong gradient is no part of the unsharded model's tensor, as a part with its halo."""
    wrong = call.tensors(INPUT, *BAD)
    return bool(wrong) and wrong <= call.tensors("input", "odd") and call.is_good("output")


def _descended(calls: Calls) -> Divergence | None:
    """Return the innermost call that goes wrong within the last one that does, if nothing else explains it."""
    wrong = (call for call in reversed(calls.in_order) if _goes_wrong(calls, call))
    innermost = next((call for call in wrong if not _is_explained(calls, call, calls.in_order)), None)
    if innermost is None:
        return None
    while inner := _blamed(calls, calls.within(innermost)):
        innermost = inner
    if innermost.state(OUTPUT) == "pending":
        around = list(calls.around(innermost))
        pending = [innermost, *(outer for outer in around if outer.state(OUTPUT) == "pending")]
        unsummed = next((place for outer in reversed(pending) if (place := _unsummed(calls, outer)) is not None), None)
        left = unsummed or _left_pending(calls, around[0] if around else innermost)
        return left or _joined(calls, innermost) or _within(calls, innermost)
    return _left_pending(calls, innermost) or _within(calls, innermost)


def _blamed(calls: Calls, inner: Sequence[Call]) -> Call | None:
    """Return the last call that goes wrong whose wrong inputs nothing else explains."""
    wrong = [call for call in inner if _goes_wrong(calls, call)]
    blamed = next((call for call in reversed(wrong) if not _is_explained(calls, call, inner)), None)
    return None if blamed is not None and _shares_blame(blamed, wrong) else blamed


def _shares_blame(call: Call, wrong: Sequence[Call]) -> bool:
    """Whether another call, given the right gradient too, reads the tensor whose own gradient is wrong."""
    tensors = call.tensors(INPUT, *BAD)
    return any(
        tensors & wrong_call.tensors(INPUT, *BAD)
        for wrong_call in wrong
        if wrong_call is not call
        and not is_within(wrong_call.module, call.module)
        and not is_within(call.module, wrong_call.module)
    )


def _is_explained(calls: Calls, call: Call, others: Sequence[Call]) -> bool:
    """Whether a call that is given a wrong gradient itself reads what a call gives back a wrong gradient of."""
    outside = [one for one in others if one is not call and not is_within(one.module, call.module)]
    apart = [one for one in outside if one.is_bad(OUTPUT) or is_left_pending(calls, one)]
    input_tensors = {tensor for one in apart for tensor in one.tensors(INPUT)}
    return bool(call.tensors(INPUT, *BAD) & input_tensors)


def _left_pending(calls: Calls, call: Call) -> Divergence | None:
    """Return a call's gradients that stay unsummed although other layers sum theirs."""
    inner = [one for one in reversed(calls.within(call)) if is_left_pending(calls, one)]
    if not inner:
        return None
    point = inner[0].point(OUTPUT, "pending")
    return Divergence("backward", "unsummed", call, point, before=inner[0].module)


def _joined(calls: Calls, call: Call) -> Divergence | None:
    """Blame the module around a call that is given terms if it reads the same tensor: there they meet its own gradient.

    Where other layers are given terms, too, and are right, something sums what the call sends back.
    """
    outer = next(calls.around(call), None)
    is_habit = any(other.state(OUTPUT) == "pending" for other in calls.alike(call))
    if outer is None or is_habit or not call.tensors(INPUT, *BAD) & outer.tensors(INPUT):
        return None
    point = call.point(OUTPUT, "pending")
    return Divergence("backward", "unsummed", outer, point, before=call.module)


def is_left_pending(calls: Calls, call: Call) -> bool:
    """Whether a call's output gets back unsummed terms that are summed in other layers."""
    return call.state(OUTPUT) == "pending" and calls.is_unlike_others(call, OUTPUT)


def _within(calls: Calls, call: Call) -> Divergence:
    inner = [one for one in calls.within(call) if one.is_bad(OUTPUT) and not calls.is_habit(one, OUTPUT)]
    if not inner:
        return Divergence("backward", "within", call, call.point(INPUT, "odd", "repeated"))
    last = inner[-1]
    if last.state(OUTPUT) == "none":
        return Divergence("backward", "lost", call, before=last.module)
    return Divergence("backward", "within", call, last.point(OUTPUT, "odd", "repeated"), before=last.module)


def _unsummed(calls: Calls, call: Call) -> Divergence | None:
    """Blame the outermost reader of a call's output if other layers sum what it sends back.

    A reader that is given terms itself passes them on: its own reader sends them back, or the one behind that.
    """
    if any(other.state(OUTPUT) == "pending" for other in calls.alike(call)):
        return None
    return _reader_of_pending(calls, call)


def unsummed_behind(calls: Calls, call: Call, axis: str) -> Divergence | None:
    """Return the reader that sends a call's output unsummed terms over an axis; or None."""
    point = call.point(OUTPUT, "pending")
    return _reader_of_pending(calls, call) if point is not None and pending_axis(point) == axis else None


def _reader_of_pending(calls: Calls, call: Call) -> Divergence | None:
    """Return the first reader behind a call that is given the whole of a gradient, and sends back terms of it.

    What no module reads, a function does: then it is the next call that sends back terms over the same axis.
    """
    visited: list[Call] = []
    while call not in visited:
        visited.append(call)
        tensors, point = call.tensors(OUTPUT), call.point(OUTPUT, "pending")
        readers = [reader for reader in calls.in_order if reader.tensors(INPUT) & tensors and reader.is_good(OUTPUT)]
        readers = readers or _next_with_terms(calls, call, pending_axis(point))
        if not readers:
            return None
        if readers[-1].state(OUTPUT) != "pending":
            return Divergence("backward", "unsummed", readers[-1], point, before=call.module)
        call = readers[-1]
    return None


def _next_with_terms(calls: Calls, call: Call, axis: str) -> list[Call]:
    """Return the next call that sends back terms of a sum over an axis; none if it lies around the given one."""
    later = (one for one in calls.in_order if one.order > call.order and one.is_good(OUTPUT))
    sending = (one for one in later if axis and pending_axis(one.point(INPUT, "pending")) == axis)
    return [one for one in [next(sending, None)] if one is not None and not is_within(call.module, one.module)]


def _between_calls(calls: Calls) -> Divergence | None:
    """Return the last call that is given a wrong gradient if no call gives one: it went wrong on the way."""
    for call in reversed(calls.in_order):
        if call.is_bad(OUTPUT) and not _is_expected(calls, call, OUTPUT):
            if (outside := _outside(calls, call)) is not None:
                return outside
            state = call.state(OUTPUT)
            way: Way = "lost" if state == "none" else "between"
            states: tuple[State, ...] = ("none",) if way == "lost" else ("odd", "repeated")
            later = (one for one in calls.in_order if one.order > call.order and one.module)
            after = next((one.module for one in later if one.is_good(INPUT) or one.is_good(OUTPUT)), "")
            return Divergence("backward", way, call, call.point(OUTPUT, *states), after, call.module)
    return None


def _outside(calls: Calls, call: Call) -> Divergence | None:
    """Return the call that makes a further output of a call's if its gradient is wrong, and no call reads it any more.

    Another output of the call has a right gradient, so what is wrong does not come from the module that follows.
    """
    wrong = call.tensors(OUTPUT, "odd", "repeated")
    if not wrong or not is_given_right(call):
        return None
    returning = {pair: [other for other in calls.in_order if pair in other.tensors("output")] for pair in wrong}
    rank, tensor = max(wrong, key=lambda pair: returning[pair][0].order)
    maker, last = returning[rank, tensor][0], returning[rank, tensor][-1]
    if any((rank, tensor) in other.tensors("input") for other in calls.in_order if other.order > last.order):
        return None
    index = next(point.index for point in last.points[rank] if (point.what, point.tensor) == ("output", tensor))
    output = f"output[{index}] of {module_name(last.module) or 'the model'}"
    return Divergence("backward", "outside", maker, maker.point(OUTPUT, *BAD), after=last.module, output=output)


LAYERS = ("Linear", "Conv1d", "Conv2d", "Conv3d", "LayerNorm", "RMSNorm")
"""Layers of torch: where their weights' gradients are right, what they send back is."""


def blamed_by_weights(first: Divergence | None, calls: Calls, gradients: Mapping[str, Compared]) -> Divergence | None:
    """Return a divergence in backward with the reader that is to blame, if weights' gradients say so."""
    if first is None or (first.direction, first.way) != ("backward", "within") or first.before:
        return first
    is_wrong = in_groups((name.rpartition(".")[0], bool(gradient.wrong)) for name, gradient in gradients.items())
    if any(is_wrong.get(first.module, [True])):
        return first
    tensors = first.call.tensors(INPUT)
    readers = (call for call in calls.in_order if call.tensors(INPUT) & tensors and call.is_good(OUTPUT))
    reader = next((call for call in readers if any(is_wrong.get(call.module, ()))), None)
    if reader is not None:
        return replace(first, call=reader, point=reader.point(INPUT, "odd", "repeated"))
    # A residual around the call has no backward.
    outer = next((call for call in calls.around(first.call) if call.is_bad(INPUT)), None)
    is_residual = outer is not None and first.point is not None and bool(first.point.added)
    if outer and is_residual and outer.tensors(INPUT) & tensors:
        return replace(first, call=outer)
    before = _before_readers(calls, first)
    if before is None and outer is not None and outer.is_good(OUTPUT) and first.call.type in LAYERS:
        return replace(first, call=outer)  # its code reads the same tensor: torch's own layer did its part
    return before or first


def _before_readers(calls: Calls, first: Divergence) -> Divergence | None:
    """Return what makes the tensor that a call sends a wrong gradient back to, if others that read it do as well."""
    wrong = [call for call in calls.in_order if _goes_wrong(calls, call) and not calls.within(call)]
    if not _shares_blame(first.call, wrong):
        return None
    tensors = first.call.tensors(INPUT, *BAD)
    maker = next((call for call in calls.in_order if call.tensors("output") & tensors), None)
    if maker is None or not maker.is_bad(OUTPUT):
        return None
    readers = tuple(call.module for call in wrong if call.tensors(INPUT, *BAD) & tensors)
    point = maker.point(OUTPUT, *BAD)
    return Divergence("backward", "between", maker, point, before=maker.module, readers=readers)
