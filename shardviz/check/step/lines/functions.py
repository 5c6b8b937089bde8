"""Functions with a backward of their own, `torch.autograd.Function`, of which only the backward is wrong.

Each rank has its own part of what such a function is given. If the forward doesn't join all parts for a result of which
each rank has its part again, no sum over ranks is missing in backward. Then the function's own backward is wrong, and a
mask of its forward may tell where.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.check.step.lines.exchanges import axes_over
from shardviz.check.step.lines.fault import Fault, after, at, fault_at, reached
from shardviz.check.step.lines.state import words_of
from shardviz.explain.step.graphs import AveragedInBackward, FunctionBackward
from shardviz.groups import in_groups, the_only
from shardviz.relate.factors import over
from shardviz.relate.tolerance import ELEMENT, EXACT, SINGLE
from shardviz.relate.values import error_of, part_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.lines.calls import Call, Value
    from shardviz.check.step.lines.state import State
    from shardviz.check.step.lines.states import States
    from shardviz.dump.records.trace import FrameRecord
    from shardviz.layout.mesh import Mesh

    Arrays = Mapping[int, NDArray[Any]]

APPLIED = re.compile(r"\w+\.apply(?=\()")
"""How code calls an autograd.Function."""


def function_fault(states: States, value: Value, call: Call, gradients: Sequence[State]) -> Fault | None:
    """Return the function that hands back a wrong gradient of each rank's own part; None if a sum may be missing.

    Args:
        states: The lines of the module.
        value: What the function is given: right, with a wrong gradient.
        call: The first call in the function's forward that reads it.
        gradients: What the function gets of the gradient.
    """
    applied, layout, held = applied_around(call), states.forward(value).layout, states.gradient(value)
    is_given_right = bool(gradients) and all(state.kind == "right" for state in gradients)
    if applied is None or not is_given_right or held.moved or layout is None or not layout.split_axes:
        return None
    inside = [other for other in states.lines.calls if applied in other.first.frames[:-1]]
    if not _parts_with(states, inside) <= {*layout.split_axes} or may_lack_sum(states, inside, gradients):
        return None
    function = APPLIED.findall(applied.source)[0].removesuffix(".apply")
    masks, marked, zero = next(_marking(states, inside, _wrong_elements(states, value)), ("", "", False))
    begin = f"in backward {applied_at(call)} is the first wrong line{after(states.lines.line_of(value), call.line)}"
    sentence = f"{begin}: {function} gets {words_of(gradients)} of its gradient, and sends back {held.text}"
    cause = FunctionBackward(call.place, function, masks=masks, value=marked, is_zero=zero)
    return fault_at(call, sentence, cause)


def averaged_fault(states: States, value: Value, calls: Sequence[Call], gradients: Sequence[State]) -> Fault | None:
    """Return the function that averages in backward the terms of a tensor's gradient; None if none does.

    Args:
        states: The lines of the module.
        value: What the function is given, or what that is made of: its gradient is 1/n of the right one.
        calls: What is made of it, up to tensors with known gradients.
        gradients: What is known of the latter's gradients.
    """
    held = states.gradient(value)
    axis = next((state.axes[0] for state in gradients if state.kind == "terms" and len(state.axes) == 1), "")
    size = states.mesh.axis_size(axis) if axis else 1
    if held.kind != "other" or held.axes or not math.isclose(held.factor * size, 1, rel_tol=EXACT) or size == 1:
        return None
    inside = in_groups((applied, call) for call in calls if (applied := applied_around(call)) is not None)
    for applied, its_calls in inside.items():
        given, made = ([states.gradients(one) for one in sides] for sides in ends_of(its_calls))
        if not any(is_mean(axis, *pair, states.mesh) for pair in product(given, made)):
            continue
        call = its_calls[0]
        function = APPLIED.findall(applied.source)[0].removesuffix(".apply")
        sentence = (
            f"in backward {applied_at(call)} gets {words_of(gradients)} of its gradient, and sends back their mean"
        )
        fault = fault_at(call, sentence, AveragedInBackward(call.place, function, axis, size))
        return replace(fault, covers=states.lines.weights_read(calls))
    return None


def ends_of(calls: Sequence[Call]) -> tuple[list[Value], list[Value]]:
    """Return what some calls are given, and what they make."""
    return [value for call in calls for value in call.inputs], [value for call in calls for value in call.outputs]


def is_mean(axis: str, given: Arrays, terms: Arrays, mesh: Mesh) -> bool:
    """Whether each rank has the mean over an axis of what ranks had, and these differed."""
    if (
        not terms
        or given.keys() != terms.keys()
        or len({array.shape for array in (*given.values(), *terms.values())}) > 1
    ):
        return False
    means = over(axis, "avg", terms, mesh)
    is_made = all(rank in means and error_of(array, means[rank]) <= SINGLE for rank, array in given.items())
    return is_made and any(error_of(terms[rank], means[rank]) > SINGLE for rank in terms)


def applied_around(call: Call) -> FrameRecord | None:
    """Return the line that applies the only function of the user's in whose forward a call stands."""
    return the_only({frame for frame in call.first.frames[:-1] if len(APPLIED.findall(frame.source)) == 1})


def applied_at(call: Call) -> str:
    """Return the line that leads to a call, and the one that applies the function in whose forward the call stands.

    What is wrong in backward stands in the function's own backward, wherever its forward reads the tensor.
    """
    applied = applied_around(call)
    if applied is None:
        return reached(call)
    return f"{at(call.line)}{f', in {at(applied, call.line)},' if applied != call.line else ''}"


def _parts_with(states: States, calls: list[Call]) -> set[str]:
    """Return the axes along which ranks have parts, or terms, of what some calls make, or anything that differs."""
    values = [value for call in calls for value in call.outputs]
    made = [states.forward(value) for value in values]
    split = {axis for state in made if state.layout is not None for axis in state.layout.split_axes}
    differing = {axis for axis in states.mesh.long_axes for value in values if states.differs_along(value, axis)}
    return (split | {axis for state in made for axis in state.axes}) & {*states.mesh.axes} | differing


def may_lack_sum(states: States, calls: list[Call], gradients: Sequence[State]) -> bool:
    """Whether ranks get gradients of their own parts of a result for which some calls joined all parts.

    In the forward of a norm over split features each rank uses the sum of all squares for its own features.
    """
    own = {axis for state in gradients if state.layout is not None for axis in state.layout.split_axes}
    return any(own.intersection(axes_over(call, states.mesh)) for call in calls)


def _wrong_elements(states: States, value: Value) -> Arrays:
    """Return on each rank where its part of a gradient is wrong; empty if it isn't known."""
    whole, layout = states.reference_of(value, gradient=True), states.forward(value).layout
    held = states.gradients(value)
    if whole is None or layout is None or whole.shape != layout.shape:
        return {}
    parts = {rank: part_of(whole, region) for rank, region in layout.regions() if rank in held}
    if not parts or any(held[rank].shape != part.shape for rank, part in parts.items()):
        return {}
    near = ELEMENT.get(states.held_dtype(value), EXACT) * float(np.abs(whole).max(initial=0.0))
    return {rank: np.abs(held[rank] - part) > near for rank, part in parts.items()}


def _marking(states: States, calls: list[Call], wrong: Arrays) -> Iterator[tuple[str, str, bool]]:
    """Yield lines whose masks tell wrong elements from right ones, with the value of these, and whether it means 0."""
    made = [(call, value) for call in calls for value in call.outputs]
    for call, value in made:
        masks = states.held(value) if states.held_dtype(value) == "bool" else {}
        if marked := value_at(masks, wrong):
            numbers = (states.held(other) for _, other in made if "float" in states.held_dtype(other))
            rows = {rank: mask == (marked == "True") for rank, mask in masks.items()}
            yield call.inner_line.place, marked, any(_is_zero_at(rows, held) for held in numbers)


def value_at(masks: Arrays, wrong: Arrays) -> str:
    """Return the value that masks of the leading dims have where elements are wrong, and nowhere else; else empty.

    Example:
        >>> value_at({0: np.array([True, False])}, {0: np.array([[False, False], [True, False]])})
        'False'
    """
    if not masks or masks.keys() != wrong.keys() or any(mask.ndim == 0 for mask in masks.values()):
        return ""
    if any(array.shape[: masks[rank].ndim] != masks[rank].shape for rank, array in wrong.items()):
        return ""
    rows = {rank: array.any(axis=tuple(range(masks[rank].ndim, array.ndim))) for rank, array in wrong.items()}
    if not any(array.any() for array in rows.values()) or all(array.all() for array in rows.values()):
        return ""
    values = (True, False)
    fitting = (one for one in values if all(np.array_equal(masks[rank] == one, rows[rank]) for rank in masks))
    return next(map(str, fitting), "")


def _is_zero_at(rows: Arrays, held: Arrays) -> bool:
    """Whether a tensor is zero at some places on all ranks, and at no other ones."""
    return rows.keys() == held.keys() and all(np.array_equal(held[rank] == 0, array) for rank, array in rows.items())
