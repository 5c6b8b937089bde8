"""The first call in forward whose inputs are the unsharded model's and whose output is not.

Modules end after those that they call, so the first that goes wrong is the innermost. Where its inputs are wrong
already, the code between calls made them so, which is that of the nearest module around it whose own inputs are right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.step.trace.divergence import Divergence, pending_axis

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.check.step.trace.calls import Call, Calls
    from shardviz.dump.records.trace import What


def first_in_forward(calls: Calls) -> Divergence | None:
    """Return the first divergence of a step in forward; None if all outputs are right, or nothing is known."""
    for at, call in enumerate(calls.in_order):
        side = _bad_side(calls, call)
        if side is not None and not calls.is_contained(call, "output") and not calls.is_habit(call, side):
            return _unsummed(calls, at) or (_between(calls, call) if call.is_bad("input") else _within(call))
    return None


def first_unlike_others(calls: Calls) -> Divergence | None:
    """Return the first call with right inputs and a wrong output that is right in another layer.

    In narrow numbers what is wrong in a module can be lost in the rounding of what is around it.
    """
    for call in calls.in_order:
        if call.is_bad("output") and call.is_good("input") and calls.is_unlike_others(call, "output"):
            return _within(call)
    return None


def _bad_side(calls: Calls, call: Call) -> What | None:
    # Slices that are out of order are bad if other layers' are in order.
    is_out_of_order = call.state("output") == "moved" and calls.is_unlike_others(call, "output")
    if call.is_bad("output") or is_out_of_order:
        return "output"
    return "input" if call.is_bad("input") else None


def _within(call: Call) -> Divergence:
    return Divergence("forward", "within", call, call.point("output", "odd", "repeated", "moved"))


def _between(calls: Calls, call: Call) -> Divergence:
    """Blame the nearest module around a call whose inputs are right, or not known; else it arrives wrong there."""
    point = call.point("input", "odd", "repeated")
    around = [call, *calls.around(call)]
    outer = next((one for one in around[1:] if not one.is_bad("input")), None)
    if outer is None:
        first = around[-1]
        return Divergence("forward", "between", first, point, _right_before(calls.in_order, call), first.module)
    return Divergence("forward", "between", outer, point, _right_before(calls.within(outer), call), call.module)


def _right_before(calls: Sequence[Call], call: Call) -> str:
    """Return the name of the last call with a right output before a call; empty without one."""
    before = [one for one in calls if one.order < call.order and not one.is_bad("output")]
    return before[-1].module if before else ""


def _unsummed(calls: Calls, at: int) -> Divergence | None:
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
    return Divergence("forward", "unsummed", last, point, before=call.module, axis=pending_axis(point))
