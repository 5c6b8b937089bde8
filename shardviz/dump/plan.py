"""The ranks, tensors and shards of a plan, each made from a representative's when it is asked for.

What a stranger wrote is checked before anything is made from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property, lru_cache
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs

from shardviz.dump.records.files import RankRecord
from shardviz.dump.records.tensors import MeshRecord, Position
from shardviz.dump.tensor import LazyShards, Shard, Tensor
from shardviz.dump.validate import check_rank, layout_of, mesh_of
from shardviz.errors import DumpError
from shardviz.layout.mesh import Mesh
from shardviz.layout.splits import numbers_in
from shardviz.text import Fold, counted, fold

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shardviz.dump.records.files import PlanPart, PlanRecord, RunRecord
    from shardviz.dump.records.step import CollectiveRecord
    from shardviz.dump.records.tensors import Body
    from shardviz.dump.validate import StampedShapes
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Coord
    from shardviz.layout.splits import Chain


def sizes(planned_part: PlannedPart, index: int) -> NDArray[np.int64]:
    """Return the elements of one of a part's bodies, by its number, on each of its ranks."""
    body = planned_part.part.record.bodies[index]
    key = (body.layout, body.local_shape)
    if key not in planned_part.sizes:
        planned_part.sizes[key] = _sizes(planned_part, index)
    return planned_part.sizes[key]


def equally_full(planned_part: PlannedPart) -> list[tuple[int, ...]]:
    """Group a part's ranks by the sizes that they hold, the lowest rank's group first."""
    bodies = range(len(planned_part.part.record.bodies))
    distinct = {
        id(found): found for found in (sizes(planned_part, index) for index in bodies) if found.min() < found.max()
    }
    ranks = np.array(planned_part.ranks)
    if not distinct:
        return [planned_part.ranks]
    _, first, group = np.unique(np.stack([*distinct.values()]), axis=1, return_index=True, return_inverse=True)
    return [tuple(ranks[group.ravel() == number].tolist()) for number in np.argsort(first)]


def _sizes(planned_part: PlannedPart, index: int) -> NDArray[np.int64]:
    body = planned_part.part.record.bodies[index]
    if body.layout is None:
        return np.full(len(planned_part.ranks), math.prod(body.local_shape), np.int64)
    layout = planned_part.layout(planned_part.part.record.rank, body.layout)
    if any(rank not in layout.mesh for rank in planned_part.ranks):
        return np.array(
            [math.prod(planned_part.body(rank, index).local_shape) for rank in planned_part.ranks], np.int64
        )
    counts = _on_mesh(layout)[[layout.mesh.index_of_rank[rank] for rank in planned_part.ranks]]
    counts[planned_part.ranks.index(planned_part.part.record.rank)] = math.prod(body.local_shape)
    return counts


@lru_cache(maxsize=256)
def _on_mesh(layout: Layout) -> NDArray[np.int64]:
    """Return how many elements each rank of a layout's mesh holds."""
    counts: NDArray[np.int64] = layout.local_shapes().prod(axis=1)
    return counts


def is_even(mesh: Mesh, size: int, chain: Chain) -> bool:
    """Whether all parts of a dim have the same size."""
    axes = (mesh.axis_size(link) if link in mesh.axes else link for link in chain)
    return not size % math.prod(numbers_in(axes))


MAX_SHIFTED = 1 << 12
"""A mesh that is another one on every rank is kept for so many ranks at a time."""


class PlannedPart:
    """The records of the ranks that one planned rank stands for.

    Attributes:
        sizes: Elements on each rank, of every body by its layout and its shape, as `plan.sizes` has worked them out.
    """

    def __init__(self, plan_part: PlanPart, mesh: Mesh) -> None:
        self.part = plan_part
        self.mesh = mesh
        self.sizes: dict[tuple[int | None, tuple[int, ...]], NDArray[np.int64]] = {}
        self._bodies: dict[tuple[int, Coord], Body] = {}
        self._claims: dict[int, dict[Layout | None, tuple[int, ...]]] = {}

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that it stands for, rising."""
        return ranks_of(self.part, self.mesh)

    @cached_property
    def _meshes(self) -> list[Mesh]:
        return [mesh_of(record) for record in self.part.record.meshes]

    @cached_property
    def _layouts(self) -> list[Layout]:
        """The layouts on the meshes of the rank that was asked, which most others share."""
        return [_layout(record, self._meshes[record.mesh]) for record in self.part.record.layouts]

    @cached_property
    def _even(self) -> list[bool]:
        return [has_equal_parts(layout) for layout in self._layouts]

    def layout(self, rank: int, index: int) -> Layout:
        """Return one of the layouts that a rank claims."""
        layout = self._layouts[index]
        if rank in layout.mesh:
            return layout
        return _layout(self.part.record.layouts[index], mesh_for(rank, layout.mesh, self.part.record.rank, self.mesh))

    def body(self, rank: int, index: int) -> Body:
        """Return one of a rank's bodies, with the shape of the rank's own part."""
        body = self.part.record.bodies[index]
        if body.layout is None or rank == self.part.record.rank or self._even[body.layout]:
            return body
        layout = self.layout(rank, body.layout)
        if rank not in layout.mesh:
            return body
        coord = layout.mesh.coord_of(rank)
        if (index, coord) not in self._bodies:
            shape = layout.region(coord).shape
            self._bodies[index, coord] = body if shape == body.local_shape else structs.replace(body, local_shape=shape)
        return self._bodies[index, coord]

    def claims(self, index: int) -> dict[Layout | None, tuple[int, ...]]:
        """Return its ranks, rising, by the layout that they claim for one of its bodies."""
        number = self.part.record.bodies[index].layout
        if number is None:
            return {None: self.ranks}
        if number not in self._claims:
            self._claims[number] = self._ranks_claiming(number)
        return self._claims[number]

    def _ranks_claiming(self, number: int) -> dict[Layout | None, tuple[int, ...]]:
        ranks_by_layout: dict[Layout | None, list[int]] = {}
        ranks_left = dict.fromkeys(self.ranks)
        while ranks_left:
            rank = next(iter(ranks_left))
            layout = self.layout(rank, number)
            group = (
                [rank] if rank not in layout.mesh else [member for member in layout.mesh.ranks if member in ranks_left]
            )
            ranks_by_layout.setdefault(layout, []).extend(group)
            for member in group:
                del ranks_left[member]
        return {layout: tuple(sorted(ranks)) for layout, ranks in ranks_by_layout.items()}

    def unlike(self, index: int) -> Iterator[int]:
        """Yield a body's recorded rank and the lowest rank of each claim and shape."""
        number = self.part.record.bodies[index].layout
        for layout, ranks in self.claims(index).items():
            if layout is None or number is None or self._even[number]:
                yield ranks[0]
                continue
            members, shapes = set(ranks), layout.local_shapes().tolist()
            by_rank = sorted(zip(layout.mesh.ranks, map(tuple, shapes), strict=True), reverse=True)
            lowest = {shape: rank for rank, shape in by_rank if rank in members}
            yield from {*lowest.values(), self.part.record.rank} & members or {ranks[0]}

    def record(self, rank: int) -> RankRecord:
        """Return a rank's record."""
        planned = self.part.record
        if rank == planned.rank:
            return planned
        meshes = [mesh_for(rank, mesh, planned.rank, self.mesh) for mesh in self._meshes]
        coords = [(index, mesh.coord_of(rank)) for index, mesh in enumerate(meshes) if rank in mesh]
        return structs.replace(
            planned,
            rank=rank,
            meshes=tuple(MeshRecord(mesh.axes, mesh.shape, mesh.ranks) for mesh in meshes),
            positions=tuple(Position(index, at, at) for index, at in coords),
            bodies=tuple(self.body(rank, index) for index in range(len(planned.bodies))),
            collectives=without_ranks(planned.collectives),
        )


def without_ranks(collectives: tuple[CollectiveRecord, ...]) -> tuple[CollectiveRecord, ...]:
    """Drop the ranks of groups that run along no axis: they differ between the ranks of a part."""
    return tuple(structs.replace(one, ranks=()) if one.ranks else one for one in collectives)


def has_equal_parts(layout: Layout) -> bool:
    """Whether every part of a tensor has the same shape."""
    dims = zip(layout.shape, layout.chains, strict=True)
    return layout.flat is None and all(is_even(layout.mesh, size, chain) for size, chain in dims)


@lru_cache(maxsize=1 << 14)
def _layout(record: object, mesh: Mesh) -> Layout:
    return layout_of(record, mesh)  # type: ignore[arg-type]


class PlannedRanks(Mapping[int, RankRecord]):
    """The records of all ranks of a plan, made on demand."""

    def __init__(self, plan: PlanRecord, mesh: Mesh) -> None:
        self.plan = plan
        self.mesh = mesh
        self.parts = tuple(PlannedPart(part, mesh) for part in plan.parts)
        self._part_of = {rank: part for part in self.parts for rank in part.ranks}
        self._sorted = tuple(sorted(self._part_of))

    def __getitem__(self, rank: int) -> RankRecord:
        return self._part_of[rank].record(rank)

    def __iter__(self) -> Iterator[int]:
        return iter(self._sorted)

    def __len__(self) -> int:
        return len(self._sorted)

    def __contains__(self, rank: object) -> bool:
        return rank in self._part_of

    def alike(self) -> Iterator[tuple[RankRecord, tuple[int, ...]]]:
        """Yield the record of one rank of each part, and the ranks that did the same in the step."""
        for planned_part in self.parts:
            yield planned_part.part.record, planned_part.ranks

    def equally_full(self) -> Iterator[tuple[int, ...]]:
        """Yield the ranks in groups that hold as much of every tensor as each other."""
        for planned_part in self.parts:
            yield from equally_full(planned_part)

    def part_of(self, rank: int) -> PlannedPart:
        """Return the part that a rank belongs to."""
        return self._part_of[rank]


def ranks_of(plan_part: PlanPart, mesh: Mesh) -> tuple[int, ...]:
    """Return the ranks that a part stands for, rising.

    Raises:
        DumpError: It names an axis or a position that the mesh does not have.
    """
    for axis, positions in plan_part.at.items():
        if axis not in mesh.axes:
            raise DumpError(f"at names axis {axis}, expected one of {', '.join(mesh.axes)}")
        if max(positions) >= mesh.axis_size(axis) or len(set(positions)) < len(positions):
            raise DumpError(f"at {axis}: positions are 0 to {mesh.axis_size(axis) - 1}, each once")
    ways = (plan_part.at.get(axis, range(size)) for axis, size in mesh.sizes)
    return tuple(sorted(map(mesh.rank_at, product(*ways))))


@lru_cache(maxsize=MAX_SHIFTED)
def mesh_for(rank: int, mesh: Mesh, asked_rank: int, whole: Mesh) -> Mesh:
    """Return the mesh on which a rank has what the rank that was asked has on its own.

    Along the plan's axes on which all ranks of a mesh are at one position, the other rank's mesh is at its own one.
    """
    if rank in mesh or asked_rank not in mesh or any(one not in whole for one in mesh.ranks):
        return mesh
    coords = [whole.coord_of(one) for one in mesh.ranks]
    here = whole.coord_of(rank)
    fixed = [len({coord[axis] for coord in coords}) == 1 for axis in range(whole.ndim)]
    moved = (
        tuple(mine if is_fixed else at for mine, at, is_fixed in zip(here, coord, fixed, strict=True))
        for coord in coords
    )
    return Mesh(mesh.axes, mesh.shape, tuple(map(whole.rank_at, moved)))


def check_plan(plan: PlanRecord, run: RunRecord, stamped: StampedShapes) -> PlannedRanks:
    """Make sure that the parts of a plan fit each other and its run, and return its ranks.

    Raises:
        DumpError: They do not.
    """
    if run.mesh is None:
        raise DumpError("run.json has no mesh, and a plan needs one")
    mesh = mesh_of(run.mesh)
    if mesh.size != run.num_ranks:
        raise DumpError(f"the mesh has {counted(mesh.size, 'rank')}, expected {run.num_ranks:,}")
    for index, plan_part in enumerate(plan.parts):
        try:
            check_rank(plan_part.record, run, stamped)
            if any(body.held or body.runs or body.dense or body.values is not None for body in plan_part.record.bodies):
                raise DumpError("a plan has no values and no ids, and a body of this part has some")
        except DumpError as error:
            raise DumpError(f"parts[{index}]: {error.message}") from error
    ranks = PlannedRanks(plan, mesh)
    counts = sum(len(part.ranks) for part in ranks.parts)
    if counts != mesh.size or len(ranks) != mesh.size:
        raise DumpError(f"its parts stand for {counts:,} ranks, {len(ranks):,} of them different, of {mesh.size:,}")
    return ranks


Bodies = tuple[tuple[int, int], ...]
"""For every part that has a tensor, its number among the parts, and that of the tensor's body in it."""

Place = tuple[str, str]
"""Role and moment."""


class PlannedShards(LazyShards):
    """The shards of one tensor on all ranks of some parts.

    Args:
        bodies: Every part that has the tensor, with the number of its body.
    """

    def __init__(self, ranks: PlannedRanks, bodies: list[tuple[PlannedPart, int]]) -> None:
        self._ranks = ranks
        self._bodies = dict(bodies)

    def __getitem__(self, rank: int) -> Shard:
        planned_part = self._ranks.part_of(rank)
        index = self._bodies[planned_part]
        body = planned_part.body(rank, index)
        return Shard(rank, body, None if body.layout is None else planned_part.layout(rank, body.layout))

    def __iter__(self) -> Iterator[int]:
        return iter(self._sorted)

    @cached_property
    def _sorted(self) -> tuple[int, ...]:
        if len(self._bodies) == 1:
            return next(iter(self._bodies)).ranks
        return tuple(sorted(rank for part in self._bodies for rank in part.ranks))

    def __len__(self) -> int:
        return sum(len(part.ranks) for part in self._bodies)

    def __contains__(self, rank: object) -> bool:
        return rank in self._ranks and self._ranks.part_of(rank) in self._bodies  # type: ignore[arg-type]

    @property
    def asked(self) -> list[int]:
        """The ranks that were asked for it: one of each part."""
        return [part.part.record.rank for part in self._bodies]

    def claims(self) -> dict[Layout | None, tuple[int, ...]]:
        """Return the ranks, rising, by what they claim."""
        ranks_by_layout: dict[Layout | None, tuple[int, ...]] = {}
        for planned_part, index in self._bodies.items():
            for layout, ranks in planned_part.claims(index).items():
                ranks_by_layout[layout] = (*ranks_by_layout.get(layout, ()), *ranks)
        return {layout: tuple(sorted(ranks)) for layout, ranks in ranks_by_layout.items()}

    def distinct(self) -> list[Shard]:
        """Return one shard for each claim and each shape of a part, by rank, rising."""
        shards: dict[tuple[Layout | None, tuple[int, ...]], Shard] = {}
        for rank in sorted(rank for part, index in self._bodies.items() for rank in part.unlike(index)):
            shard = self[rank]
            shards.setdefault((shard.layout, shard.body.local_shape), shard)
        return list(shards.values())


def tensors_of(ranks: PlannedRanks) -> list[Tensor]:
    """Return every tensor of a plan; names that all parts have with the same bodies are folded."""
    tensors: list[Tensor] = []
    for folded, (_, bodies) in fold(_keyed(ranks)):
        parts = [(ranks.parts[number], index) for number, index in bodies]
        first = parts[0][0].part.record.bodies[parts[0][1]]
        tensors.append(Tensor(folded, first.role, first.moment, PlannedShards(ranks, parts)))
    return tensors


def _keyed(ranks: PlannedRanks) -> Iterator[tuple[str, tuple[Place, Bodies]]]:
    by_name: dict[tuple[str, Place], list[tuple[int, int]]] = {}
    for number, planned_part in enumerate(ranks.parts):
        for tensor in planned_part.part.record.tensors:
            body = planned_part.part.record.bodies[tensor.body]
            for name in Fold(tensor.name, tensor.numbers, tensor.suffix).names():
                by_name.setdefault((name, (body.role, body.moment)), []).append((number, tensor.body))
    for (name, place), bodies in by_name.items():
        yield name, (place, tuple(bodies))
