"""The judge of steps: matches each rank's values at every place with the unsharded step's.

Ranks record values and judge nothing. A probe's ranks ask for this judgement while they wait (`step_judge`), and
`shardviz diff` makes it of two jobs' traces. A part of the whole's values is found by some split over the mesh, as the
terms of a sum, or as slices in another order. Gradients of activations are those of a rank's own loss, which is a mean
over its part of the batch: they are the whole's times one number, which the last module's gradient gives.

How far values may be off: some times what rounding alone does to the place, if that was measured. Otherwise in narrow
numbers two right jobs drift apart from module to module, so that places may be as far apart as those before them that
are right, and a little more.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.trace.calls import NUMBER, enclosing, is_within
from shardviz.check.step.trace.traces import Kept, Point, in_both, largest_of
from shardviz.dump.records.trace import Place, PointRecord, State
from shardviz.groups import the_only
from shardviz.layout.dtypes import HALVES
from shardviz.layout.layout import Layout, Placements, placements_of, shared_placements
from shardviz.layout.notation import write
from shardviz.layout.placements import Partial
from shardviz.relate.factors import placements_of_sum, scale_between, whole_multiple
from shardviz.relate.orders import Slices
from shardviz.relate.tolerance import (
    DRIFT,
    ELEMENT,
    ELEMENT_OF_STEP,
    EPSILON,
    EXACT,
    FEW,
    MANY,
    MOST_NOISE,
    TENSOR_FLOAT,
    TYPICAL_POINT,
    above_noise,
)
from shardviz.relate.values import is_near_but_for_kinks, root_mean_square

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.layout.mesh import Mesh
    from shardviz.layout.region import Region

BAD: tuple[State, ...] = ("odd", "repeated")

MAX_WRONG = 16
"""The values of so many wrong places, forward and backward, are looked at: behind them all is a consequence."""


@dataclass(frozen=True, slots=True)
class Noise:
    """How far rounding alone takes a step.

    Attributes:
        points: The whole's points, from weights and batch that were moved by a rounding.
        precision: The relative precision of the narrowest numbers in the step.
    """

    points: Mapping[Place, Point]
    precision: float

    @property
    def is_double(self) -> bool:
        """Whether the step is in float64 throughout: noise was measured because its results nearly cancel."""
        return self.precision <= EPSILON["float64"]


@dataclass(frozen=True, slots=True)
class Judgment:
    """What the ranks have at a place.

    Attributes:
        state: In a word, on each rank that has it.
        layout: The placements that fit all of them; None if none do.
        near: How far an element was allowed to be off.
        slices: Where their slices stand, if no placements fit and that can be told.
    """

    state: Mapping[int, State]
    layout: Placements | None
    near: float
    slices: Slices | None = None


@dataclass
class Judging:
    """A step on many ranks and the whole step, at every place that both have.

    Attributes:
        whole: What the unsharded step has.
        ranks: What each rank has.
        noise: How far rounding alone takes the whole; None if that was not measured.
        coarsest: The coarsest dtype that either step computes in, if rounding to it was not measured: what is wider
            may be computed of it.
        drifted: By module, how far steps before took its weights by rounding alone, relative to their size.
        drift: How far apart places are that are right, at most, relative to their size.
        num_not_finite: Places at which the whole has NaN or infinity, so that nothing can be judged.
        orders: Where slices stand at the places before that ranks have in another order.
    """

    whole: Mapping[Place, Point]
    ranks: Mapping[int, Mapping[Place, Point]]
    mesh: Mesh
    noise: Noise | None = None
    coarsest: str = ""
    drifted: Mapping[str, float] = field(default_factory=dict)
    drift: float = 0.0
    num_not_finite: int = 0
    orders: dict[object, Slices] = field(default_factory=dict)

    @cached_property
    def judgments(self) -> Mapping[Place, Judgment]:
        """What is at every place, in the order of the whole: forward, then backward."""
        places = [place for place in self.whole if any(place in own for own in self.ranks.values())]
        forward = sorted((place for place in places if not place.is_gradient), key=self._order)
        backward = sorted((place for place in places if place.is_gradient), key=self._order, reverse=True)
        return {place: judgment for place in (*forward, *backward) if (judgment := self.judged(place)) is not None}

    def _order(self, place: Place) -> int:
        return self.whole[place].order

    @cached_property
    def scales(self) -> Mapping[int, float]:
        """For each rank, what the gradients of its activations are the whole's times.

        The last gradient that is the whole's times a number gives it; ranks that have no such place share the others'.
        """
        by_rank = {rank: self._scale_of(rank) for rank in self.ranks}
        pairs = [pair for pair in by_rank.values() if pair is not None]
        last = max((order for order, _ in pairs), default=-1)
        common = the_only({scale for order, scale in pairs if order == last})
        return {
            rank: pair[1] if pair is not None and (pair[0] == last or common is None) else common or 1.0
            for rank, pair in by_rank.items()
        }

    def _scale_of(self, rank: int) -> tuple[int, float] | None:
        shared = (place for place in self.ranks[rank] if place in self.whole)
        outputs = (place for place in shared if place.what == "gradient of output")
        for place in sorted(outputs, key=self._order, reverse=True):
            whole, shard = self.whole[place].values, self.ranks[rank][place].values
            if whole is not None and shard is not None and largest_of(whole):
                near = self._near(place, whole, {rank: shard}, drift=0.0)
                for _, region in placements_of(whole.shape, shard.shape, self.mesh, rank):
                    pair = in_both(whole, shard, region)
                    if pair is not None and (scale := scale_between(pair[1], pair[0], near)) is not None:
                        return self._order(place), scale
        return None

    def scale(self, place: Place, rank: int) -> float:
        """Return what the whole's values are multiplied by at a place, on a rank."""
        return self.scales[rank] if place.is_gradient else 1.0

    def _near(self, place: Place, whole: Kept, parts: Mapping[int, Kept], drift: float) -> float:
        """Return how far an element may be off."""
        size, moved = largest_of(whole), self._moved(place, whole)
        is_double = self.noise is not None and self.noise.is_double
        if moved is not None and self.noise is not None and not is_double:
            return above_noise(largest_of(moved), self.noise.precision * size, MOST_NOISE * size)
        base = max((max(whole.tolerance, part.tolerance) for part in parts.values()), default=EXACT)
        of_weights = min(DRIFT * self.drifted.get(place.module, 0.0), MOST_NOISE)
        base = max(base, ELEMENT_OF_STEP.get(self.coarsest, 0.0), of_weights)
        base = max(base, min(DRIFT * drift, MOST_NOISE)) if base >= ELEMENT[TENSOR_FLOAT] else base
        return above_noise(largest_of(moved), base * size)

    def _moved(self, place: Place, whole: Kept) -> Kept | None:
        """Return how far rounding alone moves each element of the whole; None if that was not measured there."""
        point = self.noise.points.get(place) if self.noise is not None else None
        if point is None or point.values is None or point.values.values.shape != whole.values.shape:
            return None
        return whole.with_values(np.abs(point.values.values - whole.values))

    def held(self, place: Place) -> dict[int, Kept]:
        """Return what was kept of ranks' values at a place."""
        by_rank = {rank: points[place].values for rank, points in self.ranks.items() if place in points}
        return {rank: values for rank, values in by_rank.items() if values is not None}

    def judged(self, place: Place) -> Judgment | None:
        """Judge ranks' values at a place; return None if nothing can be judged."""
        whole = self.whole[place].values
        by_rank = {rank: points[place] for rank, points in self.ranks.items() if place in points}
        parts = self.held(place)
        absent: dict[int, State] = {
            rank: "none" if point.needs_grad else "cut"
            for rank, point in by_rank.items()
            if point.values is None and self._is_known_to_be_absent(place, rank)
        }
        if whole is None or not (parts or absent):
            return None
        if not np.all(np.isfinite(whole.values)):
            self.num_not_finite += 1
            return None
        at = _Place(self, place, whole, parts, self._near(place, whole, parts, self.drift))
        judgment = at.judgment(at.split() or at.sum() or self._of_branch(at, by_rank) or at.split_without_mask())
        if judgment.layout is not None:
            self.drift = max(self.drift, at.farthest)
        return replace(judgment, state={**judgment.state, **absent})

    def _of_branch(self, at: _Place, points: Mapping[int, Point]) -> Placements | None:
        """Return the placements of a gradient that fits once what a residual sends back is taken from the whole's.

        A module of the unsharded model reads the tensor that the residual around it reads, and its gradient is the sum
        of both. Ranks that give the module a copy, as tensor parallelism does, get that of the module alone.
        """
        input_place = at.place.forward
        for outer in enclosing(at.place.module) if at.place.what == "gradient of input" else ():
            outer_input = input_place._replace(module=outer)
            around = self.whole.get(outer_input._replace(what="gradient of output", tensor=0))
            is_shared = _are_one(self.whole, input_place, outer_input)
            if not is_shared or any(_are_one(self.ranks[rank], input_place, outer_input) for rank in points):
                continue
            if around is not None and around.values is not None and around.values.shape == at.whole.shape:
                alone = at.whole.with_values(at.whole.values - around.values.values)
                branch = replace(at, whole=alone)
                if (layout := branch.split() or branch.sum()) is not None:
                    return layout
        return None

    def _is_known_to_be_absent(self, place: Place, rank: int) -> bool:
        """Whether a gradient is not there that should be: what it is the gradient of was kept."""
        whole = self.whole[place].values
        forward = self.ranks[rank].get(place.forward)
        is_of_kept = place.is_gradient and forward is not None and forward.values is not None
        return is_of_kept and whole is not None and bool(np.any(whole.values))

    @cached_property
    def wrong(self) -> list[Place]:
        """The first wrong places, forward and backward, inputs before and what alone is out of order."""
        states = {place: {*judgment.state.values()} for place, judgment in self.judgments.items()}
        wrong = [place for place, kinds in states.items() if kinds & {*BAD}]
        forward, backward = ([place for place in wrong if place.is_gradient == back] for back in (False, True))
        in_order = {_layer(place) for place, kinds in states.items() if place.what == "output" and "right" in kinds}
        moved = [place for place, kinds in states.items() if "moved" in kinds]
        outputs = [place for place in moved if place.what == "output" and _layer(place) in in_order]
        outputs += [place for place in moved if place.is_gradient and states.get(place.forward) == {"right"}]
        later = {*list(states)[list(states).index(forward[0]) :]} if forward else states.keys()
        inputs = [place for place in moved if place.what == "input" and place not in later]
        return [*forward[:MAX_WRONG], *backward[:MAX_WRONG], *outputs[:MAX_WRONG], *inputs[-MAX_WRONG:]]

    def records(self, rank: int) -> list[PointRecord]:
        """Return a rank's judgments at every place; the first wrong ones with their extra term."""
        wrong = set(self.wrong)
        return [
            self._record(place, judgment, rank, is_wrong=place in wrong)
            for place, judgment in self.judgments.items()
            if rank in judgment.state
        ]

    def _record(self, place: Place, judgment: Judgment, rank: int, *, is_wrong: bool) -> PointRecord:
        whole, point, is_odd = self.whole[place], self.ranks[rank][place], is_wrong and judgment.state[rank] == "odd"
        has_noise, layout = self.noise is not None or (whole.values is not None and whole.values.dtype in HALVES), ""
        if judgment.layout is not None and point.values is not None and whole.values is not None:
            layout = write(Layout.from_placements(self.mesh, whole.values.shape, judgment.layout))
        return PointRecord(
            place.module,
            place.what,
            whole.order,
            judgment.state[rank],
            place.call,
            place.tensor,
            point.tensor,
            layout,
            whole.type,
            judgment.near if has_noise else 0.0,
            self.scale(place, rank),
            *(self._added(place, rank) if is_odd else ("", 0)),
            self._skipped(place) if is_odd else "",
            is_overwritten=point.is_overwritten,
            is_without_graph=point.is_without_graph and not whole.is_without_graph,
            again="" if whole.again else point.again,
        )

    def _skipped(self, place: Place) -> str:
        """Return a module that no rank calls, if it is given what ranks have here, or alone reads it; else empty."""
        held = self.held(place)
        for given in self._given_to_uncalled:
            whole = self.whole[given].values
            if place.what == "gradient of output" and _are_one(self.whole, given, place.forward):
                return "" if any(self._is_read(place.forward, own) for own in self.ranks.values()) else given.module
            if place.what != "input" or whole is None or not held or np.ptp(whole.values) == 0:
                continue
            if _Place(self, given, whole, held, self._near(given, whole, held, self.drift)).split() is not None:
                return given.module
        return ""

    @cached_property
    def _given_to_uncalled(self) -> list[Place]:
        """The first inputs of the outermost modules that the whole calls once, and no rank."""
        called = {place.module for own in self.ranks.values() for place in own}
        uncalled = {place.module: None for place in self.whole if place.module and place.module not in called}
        outermost = [name for name in uncalled if not any(outer in uncalled for outer in enclosing(name))]
        twice = {place.module for place in self.whole if place.call}
        given = (Place(name, 0, "input", 0) for name in outermost if name not in twice)
        return [place for place in given if place in self.whole]

    def _is_read(self, place: Place, points: Mapping[Place, Point]) -> bool:
        """Whether a module on a rank is given the tensor at a place."""
        return any(other.what == "input" and _are_one(points, place, other) for other in points)

    def _added(self, place: Place, rank: int) -> tuple[str, int]:
        """Return the term that a value has too often, and how often (-1: it lacks it).

        What a module returns is often a sum, of what it was given and what modules in it return, and the gradient of an
        input is one of what the module sends back and what goes around it, as a residual does.
        """
        whole, shard = self.whole[place].values, self.ranks[rank][place].values
        if whole is None or shard is None or not (whole.is_whole and shard.is_whole) or shard.values.size < FEW:
            return "", 0
        terms = list(self._terms(place, rank, shard.shape))
        for _, region in placements_of(whole.shape, shard.shape, self.mesh, rank) if terms else ():
            pair = in_both(whole, shard, region)
            excess = pair[1] - pair[0] * self.scale(place, rank) if pair is not None else None
            for name, term in terms:
                times = whole_multiple(excess, term, self.judgments[place].near) if excess is not None else 0
                if times:
                    return name, times
        return "", 0

    def _terms(self, place: Place, rank: int, shape: tuple[int, ...]) -> Iterator[tuple[str, NDArray[np.float64]]]:
        for term_place, point in self.ranks[rank].items():
            name = _name_of_term(place, term_place)
            judgment = self.judgments.get(term_place)
            is_right = name == "input" or (judgment is not None and judgment.state.get(rank) == "right")
            if name and is_right and point.values is not None and point.values.is_whole and point.values.shape == shape:
                yield name, point.values.values


def _are_one(points: Mapping[Place, Point], place: Place, other_place: Place) -> bool:
    """Whether the same tensor is at two places."""
    return place in points and other_place in points and points[place].tensor == points[other_place].tensor


def _layer(place: Place) -> str:
    return NUMBER.sub("*", place.module)


def _name_of_term(place: Place, term_place: Place) -> str:
    """Return the name of a term of a sum; empty if the value at `term_place` is not a term of that at `place`."""
    is_same_call = (term_place.module, term_place.call) == (place.module, place.call)
    if place.what == "output" and term_place.what == "input" and is_same_call:
        return "input"
    if place.what == "output":
        return term_place.module if term_place.what == "output" and is_within(term_place.module, place.module) else ""
    parent = place.module.rpartition(".")[0]
    is_beside = term_place.module.rpartition(".")[0] == parent and term_place.module != place.module
    is_around = bool(parent) and term_place.what == "gradient of output" and (is_beside or term_place.module == parent)
    return term_place.module if place.what == "gradient of input" and is_around else ""


@dataclass
class _Place:
    """One place that is judged.

    Attributes:
        whole: What the unsharded step has there.
        parts: What ranks have.
        near: How far an element may be off.
        farthest: How far the parts are off that were found to be right, relative to the whole's size.
    """

    judging: Judging
    place: Place
    whole: Kept
    parts: Mapping[int, Kept]
    near: float
    farthest: float = 0.0

    def split(self) -> Placements | None:
        """Return the placements that give every rank the values that it has, with the fewest splits."""
        off: dict[int, float] = {}

        def fits(rank: int, region: Region) -> bool:
            apart = self._apart(rank, self.parts[rank], region)
            off[rank] = apart or 0.0
            return apart is not None

        shapes = {rank: part.shape for rank, part in self.parts.items()}
        placements = shared_placements(self.whole.shape, shapes, self.judging.mesh, fits)
        if placements is not None:
            self.farthest = max(off.values()) / (largest_of(self.whole) or 1.0)
        return placements

    def split_without_mask(self) -> Placements | None:
        """Return the placements of parts without last slices of one number, as what masks a padded vocabulary."""
        parts = {rank: _without_mask(part, self.whole) for rank, part in self.parts.items()}
        is_cut = any(part is not self.parts[rank] for rank, part in parts.items())
        return replace(self, parts=parts).split() if is_cut else None

    def _apart(self, rank: int, shard: Kept, region: Region, *, is_sum: bool = False) -> float | None:
        """Return how far a part is from a region of the whole; None if that is too far, or nothing is kept of both."""
        pair = in_both(self.whole, shard, region)
        if pair is None:
            return None
        scale = self.judging.scale(self.place, rank)
        off = np.abs(pair[1] - pair[0] * scale)
        apart = float(np.max(off, initial=0.0)) / max(1.0, abs(scale))
        if not apart <= self.near:
            return self._apart_but_for_kinks(off, pair[0] * scale)
        return apart if is_sum or self._is_typical(off, pair[0], shard, region, scale) else None

    def _apart_but_for_kinks(self, off: NDArray[np.float64], expected: NDArray[np.float64]) -> float | None:
        """Return how far a gradient in narrow numbers is off on the whole, if few elements are too far; else None."""
        is_narrow = (
            self.judging.noise is None and ELEMENT_OF_STEP.get(self.judging.coarsest, 0.0) >= ELEMENT[TENSOR_FLOAT]
        )
        if not (is_narrow and self.place.is_gradient and is_near_but_for_kinks(off, self.near, expected)):
            return None
        return root_mean_square(off) / (root_mean_square(expected) or 1.0) * largest_of(self.whole)

    def _is_typical(
        self, off: NDArray[np.float64], expected: NDArray[np.float64], shard: Kept, region: Region, scale: float
    ) -> bool:
        """Whether a part's mean error is within that of rounding, if that was measured."""
        noise, moved = self.judging.noise, self._moved
        pair = in_both(moved, shard, region) if moved is not None and off.size >= MANY else None
        if noise is None or pair is None or noise.is_double:
            return True
        allowed = max(TYPICAL_POINT * root_mean_square(pair[0]), noise.precision / 4 * root_mean_square(expected))
        return root_mean_square(off) <= allowed * abs(scale)

    @cached_property
    def _moved(self) -> Kept | None:
        return self.judging._moved(self.place, self.whole)

    def sum(self) -> Placements | None:
        """Return the placements of terms whose sum along one axis is the right part, each term in its rank's scale."""

        def fits(rank: int, total: NDArray[np.float64]) -> Iterator[Placements]:
            shard = replace(self.parts[rank], values=total * scales[rank])
            for placements, region in placements_of(self.whole.shape, shard.shape, self.judging.mesh, rank):
                if self._apart(rank, shard, region, is_sum=True) is not None:
                    yield placements

        scales = {rank: self.judging.scale(self.place, rank) or 1.0 for rank in self.parts}
        terms = {rank: part.values / scales[rank] for rank, part in self.parts.items()}
        return placements_of_sum(terms, self.judging.mesh, fits, self.near)

    def judgment(self, layout: Placements | None) -> Judgment:
        """Say what ranks have under the placements that fit, or which slices of the whole if none do."""
        if layout is not None:
            is_sum = any(isinstance(placement, Partial) for placement in layout)
            return Judgment(dict.fromkeys(self.parts, "pending" if is_sum else "right"), layout, self.near)
        slices = None
        if self.whole.is_whole and all(part.is_whole for part in self.parts.values()):
            scales = {rank: self.judging.scale(self.place, rank) or 1.0 for rank in self.parts}
            values = {rank: part.values / scales[rank] for rank, part in self.parts.items()}
            slices = Slices.of(values, dict.fromkeys(values, self.whole.values), self.near)
            if slices is None or slices.state == "odd":
                slices = next(
                    filter(None, (self._in_order_of(known, values) for known in self.judging.orders.values())), slices
                )
            elif slices.state == "moved":
                self.judging.orders.setdefault(slices.key, slices)
        return Judgment(dict.fromkeys(self.parts, slices.state if slices else "odd"), None, self.near, slices)

    def _in_order_of(self, known: Slices, values: Mapping[int, NDArray[np.float64]]) -> Slices | None:
        """Return that slices stand where those of an earlier place do, if they do: one number alone does not tell."""
        whole = self.whole.values
        for dim in (dim for dim, size in enumerate(whole.shape) if size == known.size):
            parts = {rank: whole.take(at, dim) for rank, at in known.places.items() if rank in values}
            is_alike = parts.keys() == values.keys() and all(parts[r].shape == values[r].shape for r in parts)
            if is_alike and all(np.all(np.abs(parts[rank] - values[rank]) <= self.near) for rank in parts):
                return replace(known, dim=dim)
        return None


def _without_mask(part: Kept, whole: Kept) -> Kept:
    """Return a part without the last slices of its last dim that are one number, which the whole's last is not."""
    values, size = part.values, part.values.shape[-1] if part.values.ndim else 0
    if not (part.is_whole and whole.is_whole and values.ndim == whole.values.ndim > 1 and values.size):
        return part
    is_masked = np.all(values == values[..., -1].flat[0], axis=tuple(range(values.ndim - 1)))
    end = size - int(np.argmin(is_masked[::-1]))  # all are kept if all are masked
    if end < whole.shape[-1] <= size or np.all(whole.values[..., -1] == values[..., -1].flat[0]):
        return part  # as long as the whole, it lacks what the number stands for
    at, shape = (*part.at[:-1], part.at[-1][:end]), (*part.shape[:-1], end)
    return replace(part, shape=shape, at=at, values=values[..., :end]) if end < size else part


def judged_output(
    module: str, whole: NDArray[np.float64], parts: Mapping[int, NDArray[np.float64]], mesh: Mesh, near: float
) -> Judgment:
    """Judge ranks' parts of a module's output, of which nothing but the values is known."""
    held = {rank: Kept.whole(values) for rank, values in parts.items()}
    at = _Place(Judging({}, {}, mesh), Place(module, 0, "output", 0), Kept.whole(whole), held, near)
    return at.judgment(at.split() or at.sum())
