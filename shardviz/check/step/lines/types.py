"""SPMD types of each line's tensors along each axis of the mesh, measured from values.

| forward | gradient | type |
| --- | --- | --- |
| the whole | terms of a sum | `replicate`: each rank uses it for a part of its own |
| the whole | the whole | `invariant`: all ranks do the same with it |
| terms of a sum | the whole | `partial` |
| a part of dim i | the same part | `shard(i)` |
| neither | | `varying` |

Without a gradient, what is whole is `whole`. Programs that are annotated name the same types by hand (torchtitan's
`spmd_types`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardviz.check.step.lines.calls import Lines, Value
from shardviz.check.step.lines.faults import fault_in
from shardviz.check.step.lines.states import States
from shardviz.explain.step.lines import WrongLines

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardviz.dump.dump import Dump


@dataclass(frozen=True)
class Row:
    """One call of a module's line.

    Attributes:
        place: The line, as `moe.py:83`.
        source: Its text.
        types: The type of its result along each axis.
        held: What each rank has of the unsharded model's result.
        gradient: The same of the gradient.
        is_wrong: Whether it is the first wrong line.
        is_sharded_only: Whether the unsharded model has no such call.
    """

    place: str
    source: str
    function: str
    types: Mapping[str, str]
    held: str
    gradient: str
    is_wrong: bool = False
    is_sharded_only: bool = False

    @property
    def types_text(self) -> str:
        """The types of all axes: `dp: shard(0), tp: partial`."""
        return ", ".join(f"{axis}: {kind}" for axis, kind in self.types.items())

    def to_json(self) -> dict[str, Any]:
        """Return the object that stands for it where lines are printed as JSON."""
        return {
            "line": self.place,
            "source": self.source,
            "function": self.function,
            "types": dict(self.types),
            "held": self.held,
            "gradient": self.gradient,
            "first_wrong": self.is_wrong,
            "sharded_only": self.is_sharded_only,
        }


@dataclass(frozen=True)
class Table:
    """The lines of a module.

    Attributes:
        module: The module; empty for the model itself.
        rows: Its calls, in order.
    """

    module: str
    rows: tuple[Row, ...]


def table_of(dump: Dump) -> Table | None:
    """Return the lines of the module that ranks looked into; None if they looked into none."""
    lines = Lines.of(dump)
    if lines is None:
        return None
    states, rows = States(dump, lines), []
    fault = fault_in(states)
    wrong = fault.place if fault is not None and not isinstance(fault.cause, WrongLines) else ""
    for call in lines.calls:
        for value in call.outputs[:1]:
            place = call.place
            held, gradient = states.forward(value).text, states.gradient(value).text
            sides = call.line.source, call.function, types_of(states, value), held, gradient
            rows.append(Row(place, *sides, place == wrong, call.whole is None))
    return Table(lines.module, tuple(rows))


def types_of(states: States, value: Value) -> dict[str, str]:
    """Return the type of a tensor along each axis that has several ranks."""
    axes = states.mesh.long_axes
    return {axis: type_along(states, value, axis) for axis in axes}


def type_along(states: States, value: Value, axis: str) -> str:
    """Return the type of a tensor along an axis."""
    forward, gradient = states.forward(value), states.gradient(value)
    if not forward.is_known or forward.layout is None:
        if states.differs_along(value, axis):
            return "varying"
        return "equal, not right" if forward.is_wrong else "not compared"
    for dim, chain in enumerate(forward.layout.chains):
        if axis in chain:
            return f"shard({dim})"
    if axis in forward.axes:
        return "partial"
    if gradient.kind == "terms" and axis in gradient.axes:
        return "replicate"
    return "invariant" if gradient.kind in ("right", "terms") else "whole"
