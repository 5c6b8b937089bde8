"""A job whose ranks' values are put together, to be compared with a different job."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from shardviz.check.step.jobs.starts import Way, by_name, chosen_weight
from shardviz.check.step.jobs.whole_tensors import put_as, put_together, together
from shardviz.check.step.trace.traces import Weight, is_pipeline, with_first_module

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardviz.check.step.trace.traces import JobTrace, OfRank, Point
    from shardviz.check.step.trace.values import Kept
    from shardviz.dump.records.trace import Place
    from shardviz.layout.candidates import Placements
    from shardviz.layout.mesh import Mesh

MAX_BATCHES = 8
"""A batch is put together in no more ways."""

Choice = tuple["Placements", "Point"]


@dataclass(frozen=True)
class WholeJob:
    """A job that another one is compared with.

    Attributes:
        job: Its trace.
        mesh: Its mesh.
        name: What it is called: the first run, or the second.
    """

    job: JobTrace
    mesh: Mesh
    name: str

    @property
    def is_of_one(self) -> bool:
        """Whether the job is one process."""
        return self.job.is_of_one

    @property
    def is_pipeline(self) -> bool:
        """Whether its ranks have other modules."""
        return is_pipeline(self.job.ranks)

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """How often each module was called, on the rank that called it most often."""
        counts: dict[str, int] = {}
        for of_rank in self.job.ranks.values():
            for module, count in of_rank.counts.items():
                counts[module] = max(counts.get(module, 0), count)
        return counts

    @cached_property
    def first_module(self) -> str:
        """The module whose call ended first."""
        first_rank = self.job.ranks[min(self.job.ranks)]
        calls = {one.module: one.order for one in reversed(first_rank.records) if one.module and one.what != "batch"}
        return min(calls, key=calls.__getitem__, default="")

    def batches(self) -> Iterator[list[Kept]]:
        """Yield the model's batch in every way to put ranks' parts together."""
        batches = {rank: own.batch for rank, own in with_first_module(self.first_module, self.job.ranks).items()}
        batches = {rank: own for rank, own in batches.items() if own}
        first = {rank: own[0] for rank, own in batches.items()}
        count = min(map(len, batches.values()), default=0)
        for way in [*together(first, self.mesh, is_exact=True)][:MAX_BATCHES]:
            parts = ({rank: own[index] for rank, own in batches.items()} for index in range(1, count))
            others = [put_as(of_ranks, self.mesh, way.way) for of_ranks in parts]
            whole = [way.values, *(other for other in others if other is not None)]
            if len(whole) == 1 + len(others):
                yield whole

    def choices(self, counts: Mapping[str, int]) -> dict[Place, list[Choice]]:
        """Return the ways to assemble ranks' values at each place."""
        of_ranks = {rank: own.points(counts) for rank, own in self.job.ranks.items()}
        places = dict.fromkeys(place for own in of_ranks.values() for place in own)
        return {
            place: self._ways({rank: own[place] for rank, own in of_ranks.items() if place in own}) for place in places
        }

    def _ways(self, points: Mapping[int, Point]) -> list[Choice]:
        first = next(iter(points.values()))
        parts = {rank: point.values for rank, point in points.items() if point.values is not None}
        point = replace(
            first,
            needs_grad=any(one.needs_grad for one in points.values()),
            draws=any(one.draws for one in points.values()),
        )
        if len(parts) < len(points):
            return [((), replace(point, values=None))]
        return [(one.way, replace(point, values=one.values)) for one in together(parts, self.mesh)]

    def weights(self, others: Mapping[int, OfRank], mesh: Mesh) -> tuple[dict[str, Weight], dict[str, Weight]]:
        """Return its weights before the step and their gradients.

        Args:
            others: The ranks of the other job; plain tensors are put together to match their weights.
            mesh: The other job's mesh.
        """
        other_params = by_name(others, "param")
        gradients = by_name(self.job.ranks, "grad")
        params, grads = {}, {}
        for name, parts in by_name(self.job.ranks, "param").items():
            way = self._weight(parts, other_params.get(name, {}), mesh)
            params[name] = way.weight
            if name in gradients:
                grads[name] = self._gradient(gradients[name], way)
        return params, grads

    def _weight(self, parts: Mapping[int, Weight], others: Mapping[int, Weight], mesh: Mesh) -> Way:
        first, values = next(iter(parts.values())), _values(parts)
        if values is None or all(part.layout is not None for part in parts.values()):
            return Way((), Weight(first.shape, None, _as_claimed(parts)))
        assembled = together(values, self.mesh, is_exact=True)
        ways = [Way(one.way, Weight(one.values.shape, None, one.values)) for one in assembled]
        return chosen_weight(ways, others, mesh) if ways else Way((), Weight(first.shape, None, None))

    def _gradient(self, parts: Mapping[int, Weight], way: Way) -> Weight:
        values, shape = _values(parts), way.weight.shape
        if values is None or all(part.layout is not None for part in parts.values()):
            return Weight(shape, None, _as_claimed(parts))
        whole = put_as(values, self.mesh, way.placements) if way.placements else None
        return Weight(shape, None, whole if whole is None or way.order is None else whole.reordered(way.order))


def _values(parts: Mapping[int, Weight]) -> dict[int, Kept] | None:
    values = {rank: part.values for rank, part in parts.items() if part.values is not None}
    return values if len(values) == len(parts) else None


def _as_claimed(parts: Mapping[int, Weight]) -> Kept | None:
    """Return a weight put together as its placements claim; None if that does not come out even."""
    values = _values(parts)
    layouts = {rank: part.layout for rank, part in parts.items() if part.layout is not None}
    if values is None or any(layout.partial for layout in layouts.values()):
        return None
    return put_together(values, layouts)
