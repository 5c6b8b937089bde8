"""Exponentials that are taken relative to a maximum of each rank's own part, and then summed over ranks.

A softmax over shards adds the exponentials of all of them. Relative to different numbers they don't add up to anything,
and no later line can mend the sum. So the line of the maximum is wrong if nothing but sums and moves stands between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.step.lines.exchanges import COPIES, MOVES, SUMS, axes_over
from shardviz.check.step.lines.fault import Fault, at, fault_at, reached
from shardviz.explain.step.line_reductions import ExtremeOfPart
from shardviz.groups import walk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.check.step.lines.calls import Call, Lines, Value
    from shardviz.check.step.lines.states import States

PEAKS = {"max": "max", "amax": "max", "min": "min", "amin": "min"}
"""Functions that take an extreme, with the reduction that makes one of all ranks'."""

SHIFTS = ("sub", "sub_", "isub", "subtract", "subtract_")
"""Functions that take their second tensor from their first."""

POWERS = ("exp", "exp_", "exp2", "exp2_")
"""Functions that make exponentials."""

KEEPS = frozenset((*MOVES, *COPIES))
"""Functions that leave numbers as they are."""

ADDS = frozenset((*KEEPS, "sum", "masked_fill", "masked_fill_", "where"))
"""Functions by which exponentials become their sum."""


def own_peak_fault(states: States) -> Fault | None:
    """Return the line of a maximum of each rank's own part, if ranks sum exponentials relative to it."""
    for reduction in states.lines.calls:
        if not (reduction.first.ranks and reduction.function.startswith(SUMS)):
            continue
        for peak in _peaks_behind(states.lines, reduction):
            axis, op = _axis_of_parts(states, peak, reduction), PEAKS[peak.function]
            if axis:
                sums = f"{at(reduction.inner_line, peak.inner_line)} sums exponentials relative to it over {axis}"
                part = f"each rank has the {op} of its own part"
                sentence = f"{reached(peak)} is the first wrong line: {part}, and {sums}"
                return fault_at(peak, sentence, ExtremeOfPart(peak.inner_line.place, peak.function, axis, op))
    return None


def _peaks_behind(lines: Lines, reduction: Call) -> Iterator[Call]:
    """Yield the calls that take the extremes relative to which the exponentials of a sum are."""
    for power in _makers_through(lines, reduction.inputs, ADDS):
        shifts = _makers_through(lines, power.inputs, KEEPS) if power.function in POWERS else ()
        for shift in (shift for shift in shifts if shift.function in SHIFTS and len(shift.inputs) == 2):
            yield from (peak for peak in _makers_through(lines, shift.inputs[1:], KEEPS) if peak.function in PEAKS)


def _makers_through(lines: Lines, values: tuple[Value, ...], passing: frozenset[str]) -> Iterator[Call]:
    """Yield the calls that some tensors come from, back through functions of these names and no other."""
    makers = (maker for value in values if (maker := lines.producer(value)) is not None)
    return walk(makers, lambda call: lines.before(call) if call.function in passing else [])


def _axis_of_parts(states: States, peak: Call, reduction: Call) -> str:
    """Return the axis of a sum that splits the dim along which an extreme is taken; empty if ranks' are equal.

    With two tensors the extreme is taken of each pair of elements, and of no dim.
    """
    given = states.forward(peak.inputs[0])
    if given.kind != "right" or given.layout is None or not given.layout.shape or len(peak.inputs) > 1:
        return ""
    chains, dim = given.layout.chains, next(iter(peak.first.numbers.split()), "")
    taken = chains if not dim.removeprefix("-").isdigit() else [chains[int(dim) % len(chains)]]
    split = (axis for axis in axes_over(reduction, states.mesh) if any(axis in chain for chain in taken))
    return next((axis for axis in split if states.differs_along(peak.outputs[0], axis)), "")
