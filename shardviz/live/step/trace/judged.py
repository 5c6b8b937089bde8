"""Judge every point of a sharded step: which part of the unsharded model's values a rank has there, if any.

Gradients of activations are those of a rank's own loss, which is a mean over its part of the batch, or of one
micro-batch: they are the unsharded model's times one number. The last module's gradient gives that number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch

from shardviz.layout.candidates import placements_of
from shardviz.layout.placements import Partial
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.stamp import dtype_name
from shardviz.live.step.trace.fitting import Allowed, fitting, numpy_of, part_of
from shardviz.live.step.trace.joined import points_of
from shardviz.relate.factors import scale_between
from shardviz.relate.slices import Slices, places_in
from shardviz.relate.sums import placements_of_sum
from shardviz.relate.tolerance import ELEMENT, EPSILON, EXACT, MOST_NOISE, above_noise

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from shardviz.dump.records.trace import State
    from shardviz.layout.candidates import Placements
    from shardviz.layout.mesh import Mesh
    from shardviz.live.step.trace.joined import Place, Point
    from shardviz.live.step.trace.recorded import Trace
    from shardviz.live.step.trace.reference import Reference

MAX_EXCHANGED = 1 << 18
"""Of what no part fits, ranks exchange so many elements, to try whether they are the terms of a sum."""

MAX_ODD = 16
"""Of so many odd points, forward and backward, values are written down."""

MAX_WHOLE = 1 << 20
"""And no more elements than this of the unsharded model's."""

NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Judged:
    """A step compared with the unsharded model's. Every rank makes one, with the same judgement of what it shares.

    Attributes:
        points: This rank's points.
        reference: The unsharded model's.
        mesh: The run's mesh.
        rank: This rank.
        epsilon: How far an element may be off, relative to the largest of its tensor.
        moved: The unsharded model's points when all that it starts from is moved by rounding; None in float64.
        precision: The relative precision of the narrowest dtype.
    """

    points: Mapping[Place, Point]
    reference: Reference
    mesh: Mesh
    rank: int
    epsilon: float
    moved: Reference | None = None
    precision: float = 0.0

    @cached_property
    def places(self) -> list[Place]:
        """The places that both have values at, in the order in which this rank came to them."""
        return [place for place in self.points if self._wanted(place) is not None and self._is_known(place)]

    def _wanted(self, place: Place) -> torch.Tensor | None:
        point = self.reference.points.get(place)
        return None if point is None else point.values

    def _is_known(self, place: Place) -> bool:
        """Whether it is known what is there; of a gradient also that there is none."""
        if self.points[place].values is not None:
            return True
        forward = self.points.get(place._replace(what="input" if place.what.endswith("input") else "output"))
        wanted = self._wanted(place)
        return (
            place.what.startswith("gradient")
            and forward is not None
            and forward.values is not None
            and wanted is not None
            and bool(wanted.any())
        )

    @cached_property
    def scales(self) -> Mapping[int, float]:
        """For each rank, what the gradients of its activations are the unsharded model's times."""
        of_all = of_all_ranks(self._own_scale())
        last = max(at for at, _ in of_all)
        at_end = {scale for at, scale in of_all if at == last}
        common = at_end.pop() if len(at_end) == 1 else None
        return {rank: scale if at == last or common is None else common for rank, (at, scale) in enumerate(of_all)}

    def _own_scale(self) -> tuple[int, float]:
        """Return the scale of the last gradient on this rank that is the unsharded model's times a number, and when."""
        last = [place for place in self.places if place.what == "gradient of output"]
        for place in sorted(last, key=self.order, reverse=True):
            values, whole = self.points[place].values, self._wanted(place)
            if values is not None and whole is not None and bool(whole.any()):
                for _, region in placements_of(tuple(whole.shape), tuple(values.shape), self.mesh, self.rank):
                    scale = scale_between(numpy_of(values), numpy_of(part_of(whole, region)), self.near(place))
                    if scale is not None:
                        return self.order(place), scale
        return -1, 1.0

    def order(self, place: Place) -> int:
        """Return when the call ended in the unsharded model."""
        return self.reference.order.get((place.module, place.call), 0)

    def near(self, place: Place) -> float:
        """Return how far an element may be off: in narrow numbers some times what rounding alone did to the point."""
        whole = self._wanted(place)
        size = float(whole.abs().max()) if whole is not None and whole.numel() else 0.0
        other = self.moved.points.get(place) if self.moved is not None else None
        if whole is None or other is None or other.values is None or other.values.shape != whole.shape:
            return self.epsilon * size
        apart = float((whole.double() - other.values.double()).abs().max()) if whole.numel() else 0.0
        return above_noise(apart, self.precision * size, MOST_NOISE * size)

    def _allowed(self, place: Place) -> Allowed:
        whole = self._wanted(place)
        other = self.moved.points.get(place) if self.moved is not None else None
        if whole is None or other is None or other.values is None or other.values.shape != whole.shape:
            return Allowed(self.near(place))
        return Allowed(self.near(place), (other.values.double() - whole.double()).abs(), self.precision / 4)

    def scale(self, place: Place, rank: int) -> float:
        """Return what the unsharded model's values are multiplied by at a place, on a rank."""
        return self.scales[rank] if place.what.startswith("gradient") else 1.0

    @cached_property
    def layouts(self) -> Mapping[Place, Placements]:
        """The placements, of every place at which one set of them fits all ranks that have it."""
        fits = {place: list(self._fitting(place)) for place in self.places if self.points[place].values is not None}
        of_all = of_all_ranks(fits)
        placements = {}
        for place, local_fits in fits.items():
            shared = [one for one in local_fits if all(one in of[place] for of in of_all if place in of)]
            if shared:
                placements[place] = shared[0]
        return placements | self._pending([place for place in self.places if place not in placements])

    def _fitting(self, place: Place) -> Iterator[Placements]:
        values, whole = self.points[place].values, self._wanted(place)
        if values is not None and whole is not None:
            scale = self.scale(place, self.rank)
            yield from fitting(values.to(whole.dtype), whole, self.mesh, self.rank, self._allowed(place), scale)

    def _pending(self, odd: Sequence[Place]) -> dict[Place, Placements]:
        """Return the placements of what is the terms of a sum along one axis. Every rank calls this."""
        sent: dict[Place, torch.Tensor] = {}
        left = MAX_EXCHANGED
        for place in sorted(odd, key=self.order):
            values = self.points[place].values
            if values is not None and 0 < values.numel() <= left:
                sent[place] = values.cpu()
                left -= values.numel()
        of_all = dict(enumerate(of_all_ranks(sent)))
        sums = {}
        for place in sent:
            whole = self._wanted(place)
            terms = {rank: own[place] for rank, own in of_all.items() if place in own}
            if whole is not None:
                arrays = {rank: numpy_of(term) for rank, term in terms.items()}
                placements = placements_of_sum(arrays, self.mesh, partial(self._fits, place), self.near(place))
                if placements is not None:
                    sums[place] = placements
        return sums

    def _fits(self, place: Place, rank: int, total: NDArray[np.float64]) -> Iterator[Placements]:
        """Yield the placements that give any rank these values."""
        whole = self._wanted(place)
        if whole is not None:
            allowed, scale = Allowed(self.near(place)), self.scale(place, rank)
            yield from fitting(torch.from_numpy(total), whole.cpu().double(), self.mesh, rank, allowed, scale)

    @cached_property
    def slices(self) -> Mapping[Place, Slices]:
        """Of what has no placements: where the slices that ranks have stand in the unsharded model's values."""
        local_slices = {
            place: places for place in self.places if place not in self.layouts and (places := self._slices(place))
        }
        known = [place for place in self.places if self.points[place].values is not None]
        of_all = of_all_ranks({place: None if place in self.layouts else local_slices.get(place) for place in known})
        slices = {}
        for place in local_slices:
            of_ranks = [of[place] for of in of_all if place in of]
            if joined := Slices.joined(of_ranks):
                slices[place] = joined
        return slices

    def _slices(self, place: Place) -> Slices | None:
        values, whole = self.points[place].values, self._wanted(place)
        if values is None or whole is None:
            return None
        scale = self.scale(place, self.rank)
        return places_in(numpy_of(values) / (scale or 1.0), numpy_of(whole), self.near(place))

    def settle(self) -> None:
        """Exchange what is exchanged between ranks, in one order on all of them. Every rank calls this."""
        assert len(self.scales) >= 1
        assert self.layouts is not None
        assert self.slices is not None
        assert self.odd is not None

    @cached_property
    def num_right_before_odd(self) -> int:
        """How many outputs and inputs are the unsharded model's before the first that is not, on this rank."""
        forward = [place for place in self.places if not place.what.startswith("gradient")]
        odd = [at for at, place in enumerate(forward) if self.state(place) == "odd"]
        return odd[0] if odd else len(forward)

    @cached_property
    def odd(self) -> list[Place]:
        """A bounded number of places that are odd on any rank. Every rank calls this.

        Those of forward from the first on, gradients from the last on: behind them all is a consequence.
        """
        of_all = of_all_ranks([place for place in self.places if self.state(place) == "odd"])
        odd = dict.fromkeys(place for own in of_all for place in own)
        forward = sorted((one for one in odd if not one.what.startswith("gradient")), key=self.order)
        backward = sorted((one for one in odd if one.what.startswith("gradient")), key=self.order, reverse=True)
        chosen: list[Place] = []
        elements = 0
        for place in (*forward[:MAX_ODD], *backward[:MAX_ODD], *self._moved[:MAX_ODD]):
            whole = self._wanted(place)
            elements += 0 if whole is None else whole.numel()
            if whole is not None and elements <= MAX_WHOLE:
                chosen.append(place)
        return chosen

    @cached_property
    def _moved(self) -> list[Place]:
        """The places of outputs that have their slices in another order, and that are in order in other layers.

        Every rank calls this: the other layers may be another rank's, as those of a pipeline are.
        """
        outputs = {place: self.state(place) for place in self.places if place.what == "output"}
        of_all = of_all_ranks(outputs)
        in_order = {NUMBER.sub("*", at.module) for own in of_all for at, state in own.items() if state == "right"}
        moved = dict.fromkeys(at for own in of_all for at, state in own.items() if state == "moved")
        return sorted((at for at in moved if NUMBER.sub("*", at.module) in in_order), key=self.order)

    def values_of_odd(self) -> Iterator[tuple[Place, torch.Tensor, tuple[int, ...]]]:
        """Yield the odd places that this rank has, with its values and the shape of the unsharded model's."""
        for place in self.odd:
            values, whole = self.points[place].values if place in self.points else None, self._wanted(place)
            if values is not None and whole is not None:
                yield place, values / self.scale(place, self.rank), tuple(whole.shape)

    def wholes_of_odd(self) -> Iterator[tuple[Place, torch.Tensor]]:
        """Yield the unsharded model's values at odd places."""
        for place in self.odd:
            whole = self._wanted(place)
            if whole is not None:
                yield place, whole

    def state(self, place: Place) -> State:
        """Return what is at a place of the unsharded model's values, in a word."""
        layout, slices, point = self.layouts.get(place), self.slices.get(place), self.points[place]
        if point.values is None:
            return "none" if point.needs_grad else "cut"
        if layout is not None:
            return "pending" if any(isinstance(one, Partial) for one in layout) else "right"
        if slices is not None:
            return "moved" if slices.is_whole else "repeated"
        return "odd"


def judged(
    trace: Trace,
    reference: Reference,
    mesh: Mesh,
    rank: int,
    precision: float,
    moved: Reference | None = None,
    *,
    is_pipeline: bool = False,
) -> Judged:
    """Judge a step. Every rank calls this.

    Args:
        trace: This rank's.
        reference: The unsharded model's.
        mesh: The run's mesh.
        rank: This rank.
        precision: The relative precision of the narrowest dtype in either; 0 if both are in float64 throughout.
        moved: The unsharded model's points when what it starts from is moved by rounding.
        is_pipeline: Whether a rank's model is a stage of the unsharded one, so the whole is not a module to compare.
    """
    points = {
        place: point for place, point in points_of(trace, reference.counts).items() if place.module or not is_pipeline
    }
    narrow = [allowed for dtype, allowed in ELEMENT.items() if EPSILON[dtype] <= precision]
    dtypes = (dtype_name(point.values.dtype) for point in points.values() if point.values is not None)
    narrow += [ELEMENT.get(dtype, EXACT) for dtype in dtypes]
    judgment = Judged(points, reference, mesh, rank, max(of_all_ranks(max(narrow, default=EXACT))), moved, precision)
    judgment.settle()
    return judgment
