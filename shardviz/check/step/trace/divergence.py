"""Where a step first goes wrong, and how much is known of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardviz.explain.templates import module_name

if TYPE_CHECKING:
    from shardviz.check.step.trace.calls import Call
    from shardviz.dump.records.trace import PointRecord

Direction = Literal["forward", "backward"]
Way = Literal["within", "between", "unsummed", "cut", "lost"]
"""How it goes wrong: in the call; in its own code between two calls that it makes; what it returns is never summed;
nothing can flow back from it; or what flows back to it does not arrive."""


@dataclass(frozen=True)
class Divergence:
    """The first wrong call of a step.

    Attributes:
        direction: Whether it is found in forward or in backward.
        way: How it goes wrong.
        call: The call; its module is the first wrong one.
        point: The first point that is not the unsharded model's; None if it is not there at all.
        after: The last call before it that is right, of those that it makes.
        before: The call that is given, or gives back, what is wrong.
        axis: The axis along which a sum is pending.
    """

    direction: Direction
    way: Way
    call: Call
    point: PointRecord | None = None
    after: str = ""
    before: str = ""
    axis: str = ""

    @property
    def module(self) -> str:
        """The name of the first wrong module; empty for the model itself."""
        return self.call.module

    @property
    def called(self) -> str:
        """What sentences call it."""
        return module_name(self.module) or "the model itself"


def pending_axis(point: PointRecord | None) -> str:
    """Return the axis over which a point is the terms of a sum."""
    return point.layout.rpartition(" +")[2] if point is not None and " +" in point.layout else ""
