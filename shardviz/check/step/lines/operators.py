"""What torch makes of DTensors: a function gets them as they claim to be, and gives something else than of the whole.

A function of DTensors returns what it returns of whole tensors, whatever their placements are, and its backward does
so, too. If what goes in is right, a rule of torch's for that function is wrong.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from shardviz.check.step.lines.fault import Fault, fault_at, place_of, reached
from shardviz.errors import LayoutError
from shardviz.explain.step.line_reductions import WrongLineBackward
from shardviz.explain.step.lines import DRAWS
from shardviz.explain.step.operators import WrongOperator
from shardviz.groups import the_only
from shardviz.layout.layout import Layout
from shardviz.layout.placements import Partial, Placement, Replicate, Shard, parse_placements
from shardviz.relate.factors import REDUCTIONS, over
from shardviz.relate.tolerance import ELEMENT, EXACT
from shardviz.relate.values import error_of, part_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from shardviz.check.step.lines.calls import Call, Value
    from shardviz.check.step.lines.states import States

    Arrays = Mapping[int, NDArray[np.float64]]

OWN_ROWS = (Partial("sum"), Partial("avg"))
"""What ranks may have of a number along the axes of other rows, which a DTensor of a part of the mesh does not name."""


def operator_fault(states: States, calls: Iterable[Call] | None = None) -> Fault | None:
    """Return the first function that returns something else of DTensors than of the whole; None if there is none.

    Args:
        calls: The calls that it may be; None for all.
    """
    for call in states.lines.calls if calls is None else sorted(calls, key=lambda call: call.order):
        if not _is_operator(states, call) or all(_is_as_claimed(states, value) is not False for value in call.outputs):
            continue
        if all(_is_as_claimed(states, value) for value in call.inputs):
            function, labels = call.first.function, _labels(states, call)
            made = ", ".join(_label(states, value) for value in call.outputs)
            sentence = (
                f"{reached(call)} is the first wrong line: {function} gets {labels}, all as they claim, and what it "
                f"returns as {made} is not the unsharded model's"
            )
            return fault_at(call, sentence, WrongOperator(place_of(call.line), function, labels))
    return None


def with_operator(states: States, fault: Fault | None) -> Fault | None:
    """Return a fault in backward, or that of the function of DTensors of which only the backward is wrong."""
    if fault is None or not isinstance(fault.cause, WrongLineBackward):
        return fault
    for call in states.lines.calls:
        is_here = call.line == fault.line and call.first.function == fault.cause.function
        if not is_here or not _is_operator(states, call):
            continue
        of_call = [*call.inputs, *call.outputs]
        if all(_is_as_claimed(states, value, with_rows=True) for value in of_call):
            labels = _labels(states, call)
            cause = WrongOperator(place_of(call.line), call.first.function, labels, is_backward=True)
            return replace(fault, sentence=f"{fault.sentence}; it is given {labels}, all as they claim", cause=cause)
    return fault


def _is_operator(states: States, call: Call) -> bool:
    """Whether a call is a function of torch's on DTensors alone, the same as the unsharded model's."""
    function, whole = call.first.function, call.whole
    is_same = whole is not None and {record.numbers for record in call.records.values()} == {whole.numbers}
    is_torchs = function.islower() and function not in DRAWS and not call.first.is_collective
    return (
        is_same
        and is_torchs
        and bool(call.inputs and call.outputs)
        and all(_label(states, value) for value in (*call.inputs, *call.outputs))
    )


def _label(states: States, value: Value) -> str:
    """Return the placements that a DTensor has on all ranks; empty if it is none, or ranks differ."""
    labels = {states.lines.records[pair].placements for pair in value}
    return labels.pop() if len(labels) == 1 else ""


def _labels(states: States, call: Call) -> str:
    return " and ".join(dict.fromkeys(f"[{_label(states, value)}]" for value in call.inputs))


def _is_as_claimed(states: States, value: Value, *, with_rows: bool = False) -> bool | None:
    """Whether a DTensor is what it claims to be of the unsharded model's; None if that is not known.

    Args:
        with_rows: Whether ranks may have different rows along axes that the DTensor doesn't span.
    """
    whole, held, mesh = states.reference_of(value), states.held(value), states.mesh
    if whole is None or len(held) < mesh.size:
        return None
    split = [Shard(dim) for dim in range(whole.ndim)]
    rows: tuple[Placement, ...] = (Replicate(), *split, *OWN_ROWS) if with_rows else (Replicate(),)
    near = ELEMENT.get(states.held_dtype(value), EXACT)
    try:
        claimed = _claimed(states, value, whole.ndim)
        ways = product(*((claimed[axis],) if axis in claimed else rows for axis in mesh.axes))
        return any(_fits(states, held, whole, placements, near) for placements in ways) if claimed else None
    except LayoutError:
        return None


def _claimed(states: States, value: Value, num_dims: int) -> dict[str, Placement]:
    """Return the placements of a DTensor by axis; empty if ranks differ, or axes are none of the mesh's.

    Raises:
        LayoutError: The dump has what no DTensor can have.
    """
    axes = the_only({states.lines.records[pair].axes for pair in value}) or ()
    placements = parse_placements(_label(states, value), num_dims)
    is_possible = len(placements) == len(axes) and set(axes) <= set(states.mesh.axes)
    return dict(zip(axes, placements, strict=True)) if is_possible else {}


def _fits(
    states: States, held: Arrays, whole: NDArray[np.float64], placements: Sequence[Placement], near: float
) -> bool:
    mesh = states.mesh
    for axis, placement in zip(mesh.axes, placements, strict=True):
        if isinstance(placement, Partial):
            held = over(axis, placement.op, held, mesh) if placement.op in REDUCTIONS else {}
    settled = [Replicate() if isinstance(placement, Partial) else placement for placement in placements]
    layout = Layout.from_placements(mesh, whole.shape, settled)
    return len(held) == mesh.size and all(
        held[rank].shape == region.shape and error_of(held[rank], part_of(whole, region)) <= near
        for rank, region in layout.regions()
    )
