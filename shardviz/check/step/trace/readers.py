"""The reader of a tensor that is to blame for its wrong gradient, which is the sum over all its readers.

A module whose output's gradient is right and whose own weights have right gradients did its part. Then another reader
is at fault whose weights' gradients are wrong, or the module around them, which reads the tensor as well: a residual.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardviz.check.step.compared import Compared
    from shardviz.check.step.trace.calls import Call, Calls
    from shardviz.check.step.trace.divergence import Divergence

INPUT: Literal["gradient of input"] = "gradient of input"
OUTPUT: Literal["gradient of output"] = "gradient of output"


def blamed_by_weights(first: Divergence | None, calls: Calls, gradients: Mapping[str, Compared]) -> Divergence | None:
    """Return a divergence in backward with the reader that is to blame, where weights' gradients say so."""
    if first is None or (first.direction, first.way) != ("backward", "within") or first.before:
        return first
    if not _has_right_weights(first.call, gradients):
        return first
    reader = next((one for one in _readers(calls, first.call) if _has_wrong_weight(one, gradients)), None)
    if reader is not None:
        return replace(first, call=reader, point=reader.point(INPUT, "odd", "repeated"))
    return _around(calls, first)


def _around(calls: Calls, first: Divergence) -> Divergence:
    """Return the divergence of the call around one, where a residual around the inner call has no backward."""
    point = first.point
    outer = next((one for one in calls.around(first.call) if one.is_bad(INPUT)), None)
    if outer is None or point is None or not point.added or not outer.tensors(INPUT) & first.call.tensors(INPUT):
        return first
    return replace(first, call=outer)


def _readers(calls: Calls, call: Call) -> Sequence[Call]:
    """Return the calls that read what a call reads, and are given the right gradient."""
    tensors = call.tensors(INPUT)
    return [one for one in calls.in_order if one.tensors(INPUT) & tensors and one.is_good(OUTPUT)]


def _own(call: Call, gradients: Mapping[str, Compared]) -> list[Compared]:
    return [one for name, one in gradients.items() if name.rpartition(".")[0] == call.module]


def _has_right_weights(call: Call, gradients: Mapping[str, Compared]) -> bool:
    own = _own(call, gradients)
    return bool(own) and not any(one.wrong for one in own)


def _has_wrong_weight(call: Call, gradients: Mapping[str, Compared]) -> bool:
    return any(one.wrong for one in _own(call, gradients))
