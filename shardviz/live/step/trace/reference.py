"""The unsharded model's points: what a sharded step is laid beside."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardviz.live.step.trace.joined import num_calls, points_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardviz.live.step.trace.joined import Place, Point
    from shardviz.live.step.trace.recorded import Trace


@dataclass(frozen=True)
class Reference:
    """The unsharded model's points.

    Attributes:
        counts: How often each module is called in one forward of the whole batch.
        points: What it has at every place.
        order: When each call of a module ended.
        types: The class of every module.
    """

    counts: Mapping[str, int]
    points: Mapping[Place, Point]
    order: Mapping[tuple[str, int], int]
    types: Mapping[str, str]

    @staticmethod
    def of(trace: Trace, parts: int = 1, dim: int = 0) -> Reference:
        """Return the points of a run of the unsharded model, part by part of its batch or in one.

        Args:
            trace: The run.
            parts: The number of parts.
            dim: The dim of the batch that was parted.
        """
        counts = {name: count // parts for name, count in num_calls(trace).items()}
        order: dict[tuple[str, int], int] = {}
        done: dict[str, int] = {}
        for at, name in enumerate(trace.order[: len(trace.order) // parts]):
            order[name, done.get(name, 0)] = at
            done[name] = done.get(name, 0) + 1
        return Reference(counts, points_of(trace, counts, dim), order, trace.types)

    def of_forward(self) -> Reference:
        """Return it without the gradients."""
        points = {place: point for place, point in self.points.items() if not place.what.startswith("gradient")}
        return replace(self, points=points)
