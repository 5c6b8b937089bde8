"""The records of a plan's ranks, each made from its representative's when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from msgspec import structs

from shardviz.dump.records.files import RankRecord
from shardviz.dump.records.tensors import MeshRecord, Position
from shardviz.dump.validate import layout_of, mesh_of
from shardviz.plan.counting.sizes import equally_full, is_even
from shardviz.plan.places import mesh_for, ranks_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from shardviz.dump.records.step import CollectiveRecord
    from shardviz.dump.records.tensors import Body
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Coord, Mesh
    from shardviz.plan.records import PlanPart, PlanRecord


class PlannedPart:
    """What the ranks of one part of a plan have.

    Args:
        part: The part's record.
        mesh: The plan's mesh.

    Attributes:
        sizes: Elements on each rank, of every body by its layout and its shape, as `plan.sizes` has worked them out.
    """

    def __init__(self, part: PlanPart, mesh: Mesh) -> None:
        self.part = part
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
        own = self._layouts[index]
        if rank in own.mesh:
            return own
        return _layout(self.part.record.layouts[index], mesh_for(rank, own.mesh, self.part.record.rank, self.mesh))

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
            self._claims[number] = self._claiming(number)
        return self._claims[number]

    def _claiming(self, number: int) -> dict[Layout | None, tuple[int, ...]]:
        found: dict[Layout | None, list[int]] = {}
        left = dict.fromkeys(self.ranks)
        while left:
            rank = next(iter(left))
            layout = self.layout(rank, number)
            group = [rank] if rank not in layout.mesh else [one for one in layout.mesh.ranks if one in left]
            found.setdefault(layout, []).extend(group)
            for one in group:
                del left[one]
        return {layout: tuple(sorted(ranks)) for layout, ranks in found.items()}

    def unlike(self, index: int) -> Iterator[int]:
        """Yield the lowest rank of each claim and each shape of one of its bodies, and the rank that was asked."""
        number = self.part.record.bodies[index].layout
        for layout, ranks in self.claims(index).items():
            if layout is None or number is None or self._even[number]:
                yield ranks[0]
                continue
            own, shapes = set(ranks), layout.local_shapes().tolist()
            by_rank = sorted(zip(layout.mesh.ranks, map(tuple, shapes), strict=True), reverse=True)
            lowest = {shape: rank for rank, shape in by_rank if rank in own}
            yield from {*lowest.values(), self.part.record.rank} & own or {ranks[0]}

    def record(self, rank: int) -> RankRecord:
        """Return a rank's record."""
        own = self.part.record
        if rank == own.rank:
            return own
        meshes = [mesh_for(rank, mesh, own.rank, self.mesh) for mesh in self._meshes]
        positions = [Position(index, at, at) for index, mesh in enumerate(meshes) for at in _coord(mesh, rank)]
        return structs.replace(
            own,
            rank=rank,
            meshes=tuple(MeshRecord(mesh.axes, mesh.shape, mesh.ranks) for mesh in meshes),
            positions=tuple(positions),
            bodies=tuple(self.body(rank, index) for index in range(len(own.bodies))),
            collectives=without_ranks(own.collectives),
        )


def without_ranks(collectives: tuple[CollectiveRecord, ...]) -> tuple[CollectiveRecord, ...]:
    """Return collectives as all ranks of a part have them: a group that runs along no axis has other ranks on each."""
    return tuple(structs.replace(one, ranks=()) if one.ranks else one for one in collectives)


def has_equal_parts(layout: Layout) -> bool:
    """Whether every part of a tensor has the same shape."""
    dims = zip(layout.shape, layout.chains, strict=True)
    return layout.flat is None and all(is_even(layout.mesh, size, chain) for size, chain in dims)


@lru_cache(maxsize=1 << 14)
def _layout(record: object, mesh: Mesh) -> Layout:
    return layout_of(record, mesh)  # type: ignore[arg-type]


def _coord(mesh: Mesh, rank: int) -> Iterator[Coord]:
    if rank in mesh:
        yield mesh.coord_of(rank)


class PlannedRanks(Mapping[int, RankRecord]):
    """The records of all ranks of a plan, made when they are asked for.

    Args:
        plan: The plan.
        mesh: Its mesh.
    """

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
        for part in self.parts:
            yield part.part.record, part.ranks

    def equally_full(self) -> Iterator[tuple[int, ...]]:
        """Yield the ranks in groups that hold as much of every tensor as each other."""
        for part in self.parts:
            yield from equally_full(part)

    def part_of(self, rank: int) -> PlannedPart:
        """Return the part that a rank belongs to."""
        return self._part_of[rank]
