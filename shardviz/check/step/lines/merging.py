"""Dims that are merged in a wrong order, after an exchange or a gather has put ranks' parts along a dim of their own.

A permutation of the dims that makes the result right on every rank is the proof, and the fix.
"""

from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING

from shardviz.check.step.lines.fault import Fault, fault_at, place_of, reached
from shardviz.check.step.lines.operands import splits
from shardviz.explain.step.line_rows import DimsMerged
from shardviz.relate.tolerance import ELEMENT, EXACT
from shardviz.relate.values import error_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from shardviz.check.step.lines.states import States

    Arrays = Mapping[int, NDArray[np.float64]]

MERGES = ("reshape", "view", "flatten")

MAX_DIMS = 6
"""Dims that are tried in every order."""


def merged_fault(states: States) -> Fault | None:
    """Return the line that merges dims in a wrong order; None if no order of them makes its result right."""
    for call in states.lines.calls:
        made = call.outputs[0] if call.first.function in MERGES and call.outputs and call.inputs else None
        if made is None or states.forward(made).moved != "order":
            continue
        whole, held = states.reference_of(made), states.held(made)
        near = ELEMENT.get(states.held_dtype(made), EXACT)
        parts = list(splits(states.mesh, whole, held)) if whole is not None and held else []
        if order := _right_order(states.held(call.inputs[0]), parts, near):
            function, place = call.first.function, place_of(call.first.frames[-1])
            makes = f"{function} returns {states.forward(made).text}"
            sentence = (
                f"{reached(call)} is the first wrong line: {makes}, and with permute{order} before, the rank's part"
            )
            return fault_at(call, sentence, DimsMerged(place, function, str(order)))
    return None


def _right_order(given: Arrays, parts: list[dict[int, NDArray[np.float64]]], near: float) -> tuple[int, ...]:
    """Return the order of dims in which what ranks have is the rank's part of the whole on all of them; else ()."""
    first = next(iter(given.values()), None)
    for order in permutations(range(first.ndim)) if first is not None and 2 < first.ndim <= MAX_DIMS else ():
        for part in parts:
            if given.keys() == part.keys() and all(
                array.size == part[rank].size
                and error_of(array.transpose(order).reshape(part[rank].shape), part[rank]) <= near
                for rank, array in given.items()
            ):
                return order
    return ()
