"""A job whose ranks' values are put together, to be compared with a different job.

Plain activations do not say how they are split. So every way is tried that the parts themselves allow: equal parts are
copies, others stand behind each other along a dim, or are terms of a sum. The way is chosen that matches the other
job's. If none does, the two differ there, and the tensor is put together as in other layers, or as its forward side is.

If the model claims no mesh, the process groups that the ranks made have one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, islice
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.comparison import weight_of
from shardviz.check.step.jobs.starts import Way, chosen_weight
from shardviz.check.step.trace.calls import NUMBER, is_pipeline, with_first_module
from shardviz.check.step.trace.judging import Judging
from shardviz.check.step.trace.traces import (
    JobTrace,
    Kept,
    Point,
    Weight,
    added,
    joined_along,
    joined_rows,
    largest_of,
    places_in_whole,
)
from shardviz.groups import in_groups
from shardviz.layout.mesh import Coord, Mesh
from shardviz.layout.placements import Partial, Placement, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from shardviz.check.step.jobs.paddings import Unpadded
    from shardviz.check.step.jobs.starts import PartsByName
    from shardviz.dump.dump import Dump
    from shardviz.dump.records.base import Moment
    from shardviz.dump.records.step import WrapperRecord
    from shardviz.dump.records.trace import Place
    from shardviz.layout.layout import Layout, Placements
    from shardviz.layout.region import Region

    Groups = frozenset[tuple[int, ...]]
    Parts = Mapping[Coord, Kept]
    Together = tuple[Placements, Kept]
    Placing = Callable[[int, Sequence[Sequence[Kept]]], Sequence[Placement]]


def together(parts: Mapping[int, Kept], mesh: Mesh, *, is_exact: bool = False) -> Iterator[Together]:
    """Yield the ways to put a tensor together, each with the whole, those without sums first.

    Args:
        parts: What each rank has; ranks that have none of it, as those of other stages, are left out.
        is_exact: Whether copies are equal bit by bit and nothing is a sum, as with weights.
    """

    def placements(axis: int, groups: Sequence[Sequence[Kept]]) -> Sequence[Placement]:
        if all(_are_copies(group, is_exact=is_exact) for group in groups):
            return [Replicate()]
        return [*(Shard(dim) for dim in range(len(groups[0][0].shape))), *([] if is_exact else [Partial("sum")])]

    ways = _merged(_by_coord(parts, mesh), mesh.ndim - 1, (), placements)
    yield from sorted(ways, key=lambda way: sum(isinstance(placement, Partial) for placement in way[0]))


def put_as(parts: Mapping[int, Kept], mesh: Mesh, way: Placements) -> Kept | None:
    """Return a tensor put together in one way; None if parts do not fit, or copies are not equal."""

    def placements(axis: int, groups: Sequence[Sequence[Kept]]) -> Sequence[Placement]:
        is_copied = isinstance(way[axis], Replicate)
        return [] if is_copied and not all(_are_copies(group, is_exact=False) for group in groups) else [way[axis]]

    return next((whole for _, whole in _merged(_by_coord(parts, mesh), mesh.ndim - 1, (), placements)), None)


def _by_coord(parts: Mapping[int, Kept], mesh: Mesh) -> Parts:
    return {mesh.coord_of(rank): part for rank, part in parts.items() if rank in mesh}


def _merged(parts: Parts, axis: int, way: Placements, placements: Placing) -> Iterator[Together]:
    """Put parts together along an axis and all before it."""
    if axis < 0:
        yield from ((way, whole) for whole in parts.values())
        return
    groups = in_groups((coord[:axis], parts[coord]) for coord in sorted(parts))
    for placement in placements(axis, list(groups.values())) if groups else ():
        joined = {coord: _joined(group, placement) for coord, group in groups.items()}
        whole = {coord: one for coord, one in joined.items() if one is not None}
        if len(whole) == len(groups):
            yield from _merged(whole, axis - 1, (placement, *way), placements)


def _are_copies(group: Sequence[Kept], *, is_exact: bool) -> bool:
    first = group[0]
    near = 0.0 if is_exact else first.tolerance * largest_of(first)
    return all(
        copy.shape == first.shape
        and copy.values.shape == first.values.shape
        and bool(np.all((np.abs(copy.values - first.values) <= near) | (copy.values == first.values)))
        for copy in group[1:]
    )


def _joined(group: Sequence[Kept], placement: Placement) -> Kept | None:
    if isinstance(placement, Shard):
        return joined_along(placement.dim, group)
    if isinstance(placement, Replicate):
        return group[0]
    return added(group)


def put_together(parts: Mapping[int, Kept], layouts: Mapping[int, Layout]) -> Kept | None:
    """Return the whole of a tensor whose placements claim what each rank has.

    Returns:
        The elements that were kept; None if parts are not as claimed, leave gaps, or copies are not equal.
    """
    layout = next(iter(layouts.values()))
    regions = {rank: layouts[rank].region_of_rank(rank) for rank in parts}
    if any(regions[rank].shape != part.shape for rank, part in parts.items()):
        return None
    whole = _overlaid(layout.index_shape, [(part, regions[rank]) for rank, part in parts.items()])
    if whole is None or layout.flat is None:
        return whole
    shape = layout.tensor_shape
    return Kept.of(shape, whole.values.reshape(shape), whole.dtype) if whole.is_whole else None


def _overlaid(shape: tuple[int, ...], parts: Sequence[tuple[Kept, Region]]) -> Kept | None:
    places = [places_in_whole(part, region) for part, region in parts]
    at = tuple(np.unique(np.concatenate(of_dim)) for of_dim in zip(*places, strict=True))
    values = np.full(tuple(map(len, at)), np.nan)
    for (shard, _), indices in zip(parts, places, strict=True):
        where = np.ix_(*(np.searchsorted(every, some) for every, some in zip(at, indices, strict=True)))
        before, near = values[where], shard.tolerance * largest_of(shard)
        if np.any(np.abs(before - shard.values) > near):
            return None
        values[where] = shard.values
    first = parts[0][0]
    return None if np.any(np.isnan(values)) else Kept(shape, at, values, first.dtype, first.device)


MAX_KINDS = 8
"""Of so many ways in which groups divide the ranks, all combinations are tried."""


def mesh_of_job(dump: Dump, job: JobTrace) -> Mesh:
    """Return the mesh of a job's model, or that of its process groups if this has more axes; else all its ranks."""
    num_ranks = job.dump.files.run.num_ranks
    recorded = dump.files.mesh if dump.files.run.mesh is not None and dump.files.mesh.size == num_ranks else None
    records = [mesh for record in job.records.values() for mesh in record.meshes]
    from_groups = mesh_of_groups(
        [(mesh.axes[0], mesh.ranks) for mesh in dict.fromkeys(records) if len(mesh.axes) == 1], num_ranks
    )
    meshes = [mesh for mesh in (recorded, from_groups) if mesh is not None]
    return max(meshes, key=lambda mesh: mesh.ndim, default=Mesh(("world",), (num_ranks,)))


def mesh_of_groups(groups: Iterable[tuple[str, tuple[int, ...]]], num_ranks: int) -> Mesh | None:
    """Return the mesh along whose axes groups run: each divides all ranks, two cross in one.

    If groups of one kind are all there is, the axis that crosses them has no groups of its own.
    """
    by_axis: dict[str, set[tuple[int, ...]]] = {}
    for axis, ranks in groups:
        by_axis.setdefault(axis, set()).add(ranks)
    divisions = {name: of for axis, every in by_axis.items() for name, of in _divisions(axis, every)}
    kinds = {axis: frozenset(of) for axis, of in divisions.items() if _divide(of, num_ranks)}
    names = list(kinds)[:MAX_KINDS]
    for count in range(len(names), 0, -1):
        for axes in combinations(names, count):
            mesh = _crossing(axes, [kinds[axis] for axis in axes], num_ranks)
            if mesh is not None:
                return mesh
    for axis in names:
        crossing = frozenset(zip(*sorted(kinds[axis]), strict=True))
        other = f"of_{len(next(iter(crossing)))}"
        mesh = _crossing((other if other != axis else f"{other}_2", axis), [crossing, kinds[axis]], num_ranks)
        if mesh is not None:
            return mesh
    return None


def _divisions(axis: str, groups: set[tuple[int, ...]]) -> Iterator[tuple[str, set[tuple[int, ...]]]]:
    """Yield groups of one name in sets of which no two share a rank: those of two axes of one size are named alike."""
    divisions: list[set[tuple[int, ...]]] = []
    for group in sorted(groups):
        apart = (of for of in divisions if not any(set(group) & set(ranks) for ranks in of))
        division = next(apart, None)
        if division is None:
            divisions.append({group})
        else:
            division.add(group)
    yield from ((axis if not at else f"{axis}_{at + 1}", of) for at, of in enumerate(divisions))


def _divide(groups: set[tuple[int, ...]], num_ranks: int) -> bool:
    every = sorted(rank for group in groups for rank in group)
    sizes = {len(group) for group in groups}
    return every == list(range(num_ranks)) and len(sizes) == 1 and sizes != {1}


def _crossing(axes: Sequence[str], kinds: Sequence[Groups], num_ranks: int) -> Mesh | None:
    """Return the mesh with an axis for each division of the ranks; None if they are not a grid."""
    shape = tuple(len(next(iter(groups))) for groups in kinds)
    if math.prod(shape) != num_ranks:
        return None
    grid = np.full(shape, -1)
    for rank in range(num_ranks):
        at = tuple(next(group.index(rank) for group in groups if rank in group) for groups in kinds)
        grid[at] = rank
    if np.any(grid < 0):
        return None
    mesh = Mesh(tuple(axes), shape, tuple(grid.ravel().tolist()))
    is_grid = all(frozenset(mesh.groups(axis)) == groups for axis, groups in zip(axes, kinds, strict=True))
    return mesh if is_grid else None


MAX_BATCHES = 8
"""A batch is put together in no more ways."""

Choice = tuple["Placements", "Point"]


@dataclass(frozen=True)
class WholeJob(JobTrace):
    """A job that another one is compared with.

    Attributes:
        name: What it is called: the first run, or the second.
        replaced: Parameters of which some rank's optimizer has the tensor from before sharding.
        padded: The weights that it pads, by name.
    """

    mesh: Mesh
    name: str
    replaced: frozenset[str] = frozenset()
    padded: Mapping[str, Unpadded] = field(default_factory=dict)

    def weights(self, role: str, moment: Moment = "step") -> dict[str, dict[int, Weight]]:
        """Return ranks' weights, or what belongs to them, without their padding."""
        weights = super().weights(role, moment)
        for name, parts in weights.items() if self.padded else ():
            unpadded = self.padded.get(weight_of(role, name))
            if unpadded is not None:
                weights[name] = {rank: unpadded.part(rank, part) for rank, part in parts.items()}
        return weights

    @property
    def steps_before(self) -> int:
        """How many optimizer steps it made before the traced one."""
        return max(record.steps_before for record in self.records.values())

    @property
    def wrappers(self) -> list[WrapperRecord]:
        """What wraps modules of the model, on any rank."""
        return [wrapper for record in self.records.values() for wrapper in record.wrappers or ()]

    @property
    def is_pipeline(self) -> bool:
        """Whether its ranks have other modules."""
        return is_pipeline(self.ranks)

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """How often each module was called, on the rank that called it most often."""
        counts: dict[str, int] = {}
        for of_rank in self.ranks.values():
            for module, count in of_rank.counts.items():
                counts[module] = max(counts.get(module, 0), count)
        return counts

    @cached_property
    def first_module(self) -> str:
        """The module whose call ended first."""
        first_rank = self.ranks[min(self.ranks)]
        calls = {one.module: one.order for one in reversed(first_rank.records) if one.module and one.what != "batch"}
        return min(calls, key=calls.__getitem__, default="")

    def batches(self) -> Iterator[list[Kept]]:
        """Yield the model's batch in every way to put ranks' parts together."""
        batches = {rank: own.batch for rank, own in with_first_module(self.first_module, self.ranks).items()}
        batches = {rank: own for rank, own in batches.items() if own}
        first = {rank: own[0] for rank, own in batches.items()}
        count = min(map(len, batches.values()), default=0)
        for way, joined in islice(together(first, self.mesh, is_exact=True), MAX_BATCHES):
            parts = ({rank: own[index] for rank, own in batches.items()} for index in range(1, count))
            others = [put_as(of_ranks, self.mesh, way) for of_ranks in parts]
            whole = [joined, *(other for other in others if other is not None)]
            if len(whole) == 1 + len(others):
                yield whole

    def rows(self, counts: Mapping[str, int]) -> dict[Place, frozenset[int]]:
        """Return how many rows there are at every place in forward, in any call on any rank."""
        return joined_rows(own.rows(counts) for own in self.ranks.values())

    def choices(self, counts: Mapping[str, int], rows: Mapping[Place, frozenset[int]]) -> dict[Place, list[Choice]]:
        """Return the ways to assemble ranks' values at each place.

        Args:
            counts: How often each module is called in one forward.
            rows: How many rows the other job has at every place.
        """
        of_ranks = {rank: own.points(counts, rows=rows) for rank, own in self.ranks.items()}
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
        return [(way, replace(point, values=whole)) for way, whole in together(parts, self.mesh)]

    def ways(self, others: PartsByName, mesh: Mesh) -> dict[str, Way]:
        """Return its weights before the step, plain ones put together as ranks of the other job have them, by name."""
        params = self.weights("param").items()
        return {name: self._weight(parts, others.get(name, {}), mesh) for name, parts in params}

    def put_as_weights(
        self, ways: Mapping[str, Way], role: str, moment: Moment = "step", *, since: Moment | None = None
    ) -> dict[str, Weight]:
        """Return what belongs to its weights, such as gradients and states, each put together as the weight is.

        Args:
            since: The moment whose parts ranks still have if they have none of the other moment.
        """
        before = self.weights(role, since) if since is not None else {}
        of_weights = (
            (name, weight_of(role, name), {**before.get(name, {}), **parts})
            for name, parts in self.weights(role, moment).items()
        )
        return {name: self._put_alike(parts, ways[weight]) for name, weight, parts in of_weights if weight in ways}

    def _weight(self, parts: Mapping[int, Weight], others: Mapping[int, Weight], mesh: Mesh) -> Way:
        first, values = next(iter(parts.values())), _values(parts)
        if values is None or all(part.layout is not None for part in parts.values()):
            return Way((), Weight(first.shape, None, _as_claimed(parts)))
        assembled = together(values, self.mesh, is_exact=True)
        ways = [Way(way, Weight(whole.shape, None, whole)) for way, whole in assembled]
        return chosen_weight(ways, others, mesh) if ways else Way((), Weight(first.shape, None, None))

    def _put_alike(self, parts: Mapping[int, Weight], way: Way) -> Weight:
        """Put what belongs to a weight together as the weight is."""
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


GOOD = ("right", "pending", "moved")


@dataclass
class _Choosing:
    """The choice in the making.

    Attributes:
        choices: Every way, by place.
        judging: Both jobs, with what was chosen so far.
        ways: The way that was chosen, by place.
    """

    choices: Mapping[Place, Sequence[Choice]]
    judging: Judging
    ways: dict[Place, Placements] = field(default_factory=dict)

    def settle(self, place: Place, choice: Choice) -> None:
        """Take one way."""
        self.ways[place], self.whole[place] = choice

    @property
    def whole(self) -> dict[Place, Point]:
        """What was chosen."""
        assert isinstance(self.judging.whole, dict)
        return self.judging.whole

    def is_good(self, place: Place, choice: Choice) -> bool:
        """Whether the other job has the same, put together in this way."""
        self.whole[place] = choice[1]
        judgment = self.judging.judged(place)
        return judgment is not None and all(state in GOOD for state in judgment.state.values())

    def alike(self, place: Place) -> Iterator[Placements]:
        """Yield the ways of the same place in other layers, and of its forward side."""
        kind = NUMBER.sub("*", place.module), place.what, place.tensor
        yield from (way for at, way in self.ways.items() if (NUMBER.sub("*", at.module), at.what, at.tensor) == kind)
        if place.forward in self.ways:
            yield self.ways[place.forward]


def chosen(
    choices: Mapping[Place, Sequence[Choice]], ranks: Mapping[int, Mapping[Place, Point]], mesh: Mesh
) -> dict[Place, Point]:
    """Choose how to assemble a job's values at every place, guided by the other job's ranks."""
    nonempty = {place: ways for place, ways in choices.items() if ways}
    if all(len(ways) == 1 for ways in nonempty.values()):
        return {place: ways[0][1] for place, ways in nonempty.items()}
    choosing = _Choosing(nonempty, Judging({}, ranks, mesh))
    forward = [place for place in nonempty if not place.what.startswith("gradient")]
    backward = [place for place in nonempty if place.what.startswith("gradient")]
    _choose(choosing, forward)
    for place in backward:  # scales come from gradients: each is put together as its forward side is, to begin with
        choosing.settle(place, _default(choosing, place))
    _choose(choosing, backward)
    return choosing.whole


def _choose(choosing: _Choosing, places: Sequence[Place]) -> None:
    undecided = []
    for place in places:
        good = next((one for one in choosing.choices[place] if choosing.is_good(place, one)), None)
        if good is None:
            undecided.append(place)
        else:
            choosing.settle(place, good)
    for place in undecided:
        choosing.settle(place, _default(choosing, place))


def _default(choosing: _Choosing, place: Place) -> Choice:
    ways = choosing.choices[place]
    by_way = dict(ways)
    return next(((way, by_way[way]) for way in choosing.alike(place) if way in by_way), ways[0])
