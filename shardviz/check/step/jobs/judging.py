"""What each rank of a job has, at every place of a step, of what a job of one process has there.

The rules are those of a probe's step (`live/step/trace/judged`), on what both jobs have written: a part by some split
over the mesh, the terms of a sum, slices in another order, or something else. In narrow numbers two right jobs drift
apart from module to module, so that places may be as far apart as those before them that are right, and a little more.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.jobs.traces import float_of
from shardviz.check.step.jobs.values import in_both
from shardviz.dump.records.trace import PointRecord
from shardviz.layout.candidates import placements_of
from shardviz.layout.layout import Layout
from shardviz.layout.notation import write
from shardviz.layout.placements import Partial
from shardviz.relate.factors import scale_between
from shardviz.relate.slices import Slices, places_in
from shardviz.relate.sums import placements_of_sum
from shardviz.relate.tolerance import DRIFT, EXACT, MOST_NOISE, TENSOR_FLOAT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.check.step.jobs.traces import Place, Point
    from shardviz.check.step.jobs.values import Kept
    from shardviz.dump.records.trace import State
    from shardviz.layout.candidates import Placements
    from shardviz.layout.mesh import Mesh

NARROW = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Found:
    """What the ranks have at a place.

    Attributes:
        state: In a word, on each rank that has it.
        layout: The placements that fit all of them; None if none do.
        near: How far an element was allowed to be off.
    """

    state: Mapping[int, State]
    layout: Placements | None
    near: float


@dataclass
class Judging:
    """Two jobs at every place that both have.

    Attributes:
        whole: What the job of one process has.
        ranks: What each rank of the other has.
        mesh: The other job's mesh.
        drift: How far apart places are that are right, at most, relative to their size.
        num_not_finite: Places at which the job of one process has NaN or infinity, so that nothing can be judged.
    """

    whole: Mapping[Place, Point]
    ranks: Mapping[int, Mapping[Place, Point]]
    mesh: Mesh
    drift: float = field(default=0.0)
    num_not_finite: int = field(default=0)

    @cached_property
    def judgments(self) -> Mapping[Place, Found]:
        """What is at every place, in the order of the job of one process: forward, then backward."""
        places = [place for place in self.whole if any(place in own for own in self.ranks.values())]
        forward = sorted((one for one in places if not _is_gradient(one)), key=self._order)
        backward = sorted((one for one in places if _is_gradient(one)), key=self._order, reverse=True)
        return {place: judgment for place in (*forward, *backward) if (judgment := self.judged(place)) is not None}

    @cached_property
    def places(self) -> list[Place]:
        """The places at which any rank has values."""
        by_rank = (own.items() for own in self.ranks.values())
        return list(dict.fromkeys(place for own in by_rank for place, point in own if point.values is not None))

    def _order(self, place: Place) -> int:
        return self.whole[place].order

    @cached_property
    def scales(self) -> Mapping[int, float]:
        """For each rank, what the gradients of its activations are the other job's times: its loss is its own mean.

        The last gradient that is the other's times a number gives it; ranks that have no such place share the others'.
        """
        by_rank = {rank: self._scale_of(rank) for rank in self.ranks}
        known = [pair for pair in by_rank.values() if pair is not None]
        last = max((order for order, _ in known), default=-1)
        at_end = {scale for order, scale in known if order == last}
        common = at_end.pop() if len(at_end) == 1 else None
        return {
            rank: pair[1] if pair is not None and (pair[0] == last or common is None) else common or 1.0
            for rank, pair in by_rank.items()
        }

    def _scale_of(self, rank: int) -> tuple[int, float] | None:
        own = [place for place in self.ranks[rank] if place.what == "gradient of output" and place in self.whole]
        for place in sorted(own, key=self._order, reverse=True):
            whole, part = self.whole[place].values, self.ranks[rank][place].values
            if whole is not None and part is not None and float_of(whole):
                scale = self._scale_between(whole, part, rank)
                if scale is not None:
                    return self._order(place), scale
        return None

    def _scale_between(self, whole: Kept, part: Kept, rank: int) -> float | None:
        for _, region in placements_of(whole.shape, part.shape, self.mesh, rank):
            pair = in_both(whole, part, region)
            near = self._base(whole, part) * float_of(whole)
            if pair is not None and (scale := scale_between(pair[1], pair[0], near)) is not None:
                return scale
        return None

    def scale(self, place: Place, rank: int) -> float:
        """Return what the other job's values are multiplied by at a place, on a rank."""
        return self.scales[rank] if _is_gradient(place) else 1.0

    def _base(self, *sides: Kept) -> float:
        return max(one.tolerance for one in sides)

    def judged(self, place: Place) -> Found | None:
        """Return what the ranks have at a place; None if nothing can be judged."""
        whole = self.whole[place].values
        by_rank = {rank: points[place] for rank, points in self.ranks.items() if place in points}
        values = {rank: point.values for rank, point in by_rank.items() if point.values is not None}
        absent: dict[int, State] = {
            rank: "none" if point.needs_grad else "cut"
            for rank, point in by_rank.items()
            if point.values is None and self._is_known_to_be_absent(place, rank)
        }
        if whole is None or not (values or absent):
            return None
        if not np.all(np.isfinite(whole.values)):
            self.num_not_finite += 1
            return None
        base = max((self._base(whole, part) for part in values.values()), default=EXACT)
        relative = max(base, min(DRIFT * self.drift, MOST_NOISE)) if base >= TENSOR_FLOAT else base
        near = relative * float_of(whole)
        layout = self._fit(place, whole, values, near) or self._sum(place, whole, values, near)
        state: State = "odd"
        if layout is not None:
            state = "pending" if any(isinstance(one, Partial) for one in layout) else "right"
        elif values:
            state = self._of_slices(place, whole, values, near)
        return Found(dict.fromkeys(values, state) | absent, layout, near)

    def _is_known_to_be_absent(self, place: Place, rank: int) -> bool:
        """Whether a gradient is not there that should be: what it is the gradient of was kept."""
        whole = self.whole[place].values
        side = place._replace(what="input" if place.what.endswith("input") else "output")
        forward = self.ranks[rank].get(side)
        is_kept = forward is not None and forward.values is not None
        return _is_gradient(place) and is_kept and whole is not None and bool(np.any(whole.values))

    def _fit(self, place: Place, whole: Kept, values: Mapping[int, Kept], near: float) -> Placements | None:
        """Return the placements that give every rank the values that it has, with the fewest splits."""
        fits = [dict(self._fitting(place, whole, part, rank, near)) for rank, part in values.items()]
        shared = [one for one in fits[0] if all(one in other for other in fits[1:])] if fits else []
        if not shared:
            return None
        size = float_of(whole)
        if size:
            self.drift = max(self.drift, max(fit[shared[0]] for fit in fits) / size)
        return shared[0]

    def _fitting(
        self, place: Place, whole: Kept, part: Kept, rank: int, near: float
    ) -> Iterator[tuple[Placements, float]]:
        """Yield the placements that give a rank its values, each with how far they are off."""
        scale = self.scale(place, rank)
        for placements, region in placements_of(whole.shape, part.shape, self.mesh, rank):
            pair = in_both(whole, part, region)
            if pair is None:
                continue
            apart = float(np.max(np.abs(pair[1] - pair[0] * scale), initial=0.0)) / max(1.0, abs(scale))
            if apart <= near:
                yield placements, apart

    def _sum(self, place: Place, whole: Kept, values: Mapping[int, Kept], near: float) -> Placements | None:
        """Return the placements of terms whose sum along one axis is the right part on every rank."""

        def fits(rank: int, total: NDArray[np.float64]) -> Iterator[Placements]:
            part = replace(values[rank], values=total)
            return (placements for placements, _ in self._fitting(place, whole, part, rank, near))

        return placements_of_sum({rank: part.values for rank, part in values.items()}, self.mesh, fits, near)

    def _of_slices(self, place: Place, whole: Kept, values: Mapping[int, Kept], near: float) -> State:
        """Return whether ranks have slices of the whole in another order, once each or some of them repeatedly."""
        if not whole.is_whole or not all(part.is_whole for part in values.values()):
            return "odd"
        of_ranks = [
            places_in(part.values / self.scale(place, rank), whole.values, near) for rank, part in values.items()
        ]
        joined = Slices.joined(of_ranks)
        return "odd" if joined is None else "moved" if joined.is_whole else "repeated"

    def records(self, rank: int) -> list[PointRecord]:
        """Return what a rank has at every place, as a probe's step has it."""
        records = []
        for place, judgment in self.judgments.items():
            point = self.ranks[rank].get(place)
            if point is not None and rank in judgment.state:
                records.append(self._record(place, judgment, point, rank))
        return records

    def _record(self, place: Place, judgment: Found, point: Point, rank: int) -> PointRecord:
        whole = self.whole[place]
        is_narrow = whole.values is not None and whole.values.dtype in NARROW
        layout = ""
        if judgment.layout is not None and point.values is not None and whole.values is not None:
            layout = write(Layout.from_placements(self.mesh, whole.values.shape, judgment.layout))
        return PointRecord(
            place.module,
            place.what,  # type: ignore[arg-type]
            whole.order,
            judgment.state[rank],
            place.call,
            place.tensor,
            point.tensor,
            layout,
            whole.type,
            judgment.near if is_narrow else 0.0,
            self.scale(place, rank),
        )


def _is_gradient(place: Place) -> bool:
    return place.what.startswith("gradient")
