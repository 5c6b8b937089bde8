"""Functions that take a dim apart into segments, and are given a rank's contiguous part of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardviz.check.step.lines.calls import Call, Lines
    from shardviz.check.step.lines.states import State

PARTS = ("chunk", "tensor_split", "split", "unsafe_chunk", "glu")
"""Functions that give or combine the segments of a dim."""


def segments_of(lines: Lines, call: Call, given: Sequence[State]) -> tuple[int, int] | None:
    """Return a dim and the number of its segments, if both sides take the dim apart into as many; else None.

    A rank with a contiguous part of the dim then reads elements of some of the whole's segments as if they were of all.
    """
    function, whole = call.first.function, call.whole
    if whole is None or not call.inputs or not call.outputs or function not in PARTS:
        return None
    shape = lines.records[call.inputs[0][0]].shape
    dims = list(_contiguous_dims(given))
    of_output = lines.records[call.outputs[0][0]].shape
    cut = [dim for dim, sizes in enumerate(zip(shape, of_output, strict=False)) if len(set(sizes)) > 1]
    number = 2 if function == "glu" else len(call.outputs)
    is_alike = len(call.outputs) == len(whole.outputs) and number > 1 and len(shape) == len(of_output)
    return (cut[0], number) if is_alike and len(cut) == 1 and cut[0] in dims else None


def _contiguous_dims(given: Sequence[State]) -> Iterator[int]:
    """Yield the dims of the first tensor of which a rank has one contiguous part."""
    layout = given[0].layout if given and given[0].kind == "right" else None
    for dim, chain in enumerate(layout.chains if layout is not None else ()):
        if chain and isinstance(chain[0], str):
            yield dim
