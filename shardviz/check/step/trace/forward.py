"""The first call in forward whose inputs are the unsharded model's and whose output is not.

Modules end after those that they call, so the first that goes wrong is the innermost. Where its inputs are wrong
already, the code between calls made them so, which is that of the nearest module around it whose own inputs are right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.step.trace.divergence import Divergence, pending_axis

if TYPE_CHECKING:
    from shardviz.check.step.trace.calls import Call, Calls
    from shardviz.dump.records import What


def first_in_forward(calls: Calls) -> Divergence | None:
    """Return the first divergence of a step in forward; None where all outputs are right, or nothing is known."""
    for at, call in enumerate(calls.in_order):
        side: What | None = "output" if call.is_bad("output") else "input" if call.is_bad("input") else None
        if side is not None and not calls.is_contained(call, "output") and not calls.is_habit(call, side):
            return _before(calls, at) or (_between(calls, call) if call.is_bad("input") else _within(call))
    return None


def _within(call: Call) -> Divergence:
    return Divergence("forward", "within", call, call.point("output", "odd", "repeated"))


def _between(calls: Calls, call: Call) -> Divergence:
    """Blame the nearest module around a call whose inputs are right, or not known."""
    outer = next((one for one in calls.around(call) if not one.is_bad("input")), call)
    before = [one for one in calls.within(outer) if one.order < call.order and not one.is_bad("output")]
    point = call.point("input", "odd", "repeated")
    return Divergence("forward", "between", outer, point, before[-1].module if before else "", call.module)


def _before(calls: Calls, at: int) -> Divergence | None:
    """Blame the call just before, where what it returns is summed, or in order, in other layers."""
    call = calls.in_order[at]
    last = calls.in_order[at - 1] if at else None
    state = last.state("output") if last is not None else None
    if last is None or state not in ("pending", "moved"):
        return None
    point, alike = last.point("output", state), [one.state("output") for one in calls.alike(last)]
    if state in alike:
        return None
    if state == "moved":
        return Divergence("forward", "within", last, point) if "right" in alike else None
    if not (call.is_bad("input") or "right" in alike):
        return None
    return Divergence("forward", "unsummed", last, point, before=call.module, axis=pending_axis(point))
