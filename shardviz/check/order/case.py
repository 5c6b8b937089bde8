"""Stamped tensors as cases: each rank's claim on one mesh and the elements it holds.

Each tensor of a dump is laid out once. The families of checks and the inference look at cases; they do not read the
dump's records.

A buffer may be a copy of a weight, as an average of the weights is when it starts. Sharding code may copy the weight
into it, and its own ids are then gone: the weight's ids are its own, if it was equal to the weight before sharding too.
Copies of one number, as of ones or zeros, show nothing; neither does a weight that holds something else than its own
elements, as two that were swapped.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.check.order.infer import infer_layout
from shardviz.check.order.infer.layout import axes_of_change, holds
from shardviz.layout.notation import DimOrder, write
from shardviz.layout.region import Ranges, Region, index_of, region_of
from shardviz.relate.relations import Group, Located, Related

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.dump.dump import Dump, Shard, Tensor
    from shardviz.dump.records.tensors import Stamp
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding
    from shardviz.explain.placement.order import Disorder
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Coord, Mesh


@dataclass(frozen=True)
class Case:
    """One stamped tensor over the ranks of one mesh.

    Attributes:
        tensor: The tensor, or the fold that it stands for.
        name: Its name, or the first of the fold's.
        mesh: The mesh that it claims; the run's for a plain tensor.
        claimed: What most ranks claim; None for a plain tensor.
        shards: The records, by coordinate on the mesh.
        regions: What a coordinate holds, if that is a product of index ranges of this tensor.
        ids: What it holds otherwise: ids from 1 within the tensor, 0 for zero, `-1` for no id, `-1 - id` for an id of
            another tensor.
    """

    dump: Dump
    tensor: Tensor
    name: str
    mesh: Mesh
    claimed: Layout | None
    shards: Mapping[Coord, Shard]
    regions: Mapping[Coord, Region]
    ids: Mapping[Coord, NDArray[np.int64]]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in which regions count."""
        return self.claimed.index_shape if self.claimed else _own_shape(self.dump, self.tensor, self.name)

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def num_held(self) -> int:
        """Number of elements that all ranks hold together."""
        return sum(region.size for region in self.regions.values()) + sum(ids.size for ids in self.ids.values())

    @property
    def initial(self) -> Tensor | None:
        """The tensor with the model's own values, if they were captured."""
        return self.dump.find("initial", self.tensor.role, self.name)

    @cached_property
    def absent(self) -> tuple[Coord, ...]:
        """Coordinates of the mesh without a record of this tensor."""
        return tuple(coord for coord in self.mesh.coords() if coord not in self.shards)

    @cached_property
    def changing_axes(self) -> list[str]:
        """The axes along which two coordinates that differ in nothing else hold something else."""
        held = {
            coord: self.regions[coord] if coord in self.regions else self.ids[coord].tobytes() for coord in self.shards
        }
        return axes_of_change(self.mesh, held)

    @cached_property
    def held(self) -> Layout | None:
        """The held layout; None if the notation has none for it."""
        if self.ids or not self.regions:
            return None
        return infer_layout(self.mesh, self.shape, self.regions, self.claimed)

    @property
    def as_claimed(self) -> bool:
        """Whether every rank holds the elements its placements claim."""
        return self.claimed is not None and not self.ids and holds(self.claimed, self.regions)

    @cached_property
    def claimed_text(self) -> str:
        """What is claimed, in the notation; empty for a plain tensor."""
        return write(self.claimed) if self.claimed else ""

    def finding(self, cause: Cause, ranks: Iterable[int], sentence: str, **others: Any) -> Finding:
        """Return the finding about this tensor that has a cause."""
        return cause.finding(self.name, tuple(sorted(ranks)), sentence, claimed=self.claimed_text, **others)

    def only(self, coords: Collection[Coord]) -> Case:
        """Return the case of some of its coordinates."""
        return replace(
            self,
            shards={coord: shard for coord, shard in self.shards.items() if coord in coords},
            regions={coord: region for coord, region in self.regions.items() if coord in coords},
            ids={coord: ids for coord, ids in self.ids.items() if coord in coords},
        )

    def in_order(self, order: DimOrder) -> Case:
        """Return the case with every element counted from where a dim's intended order has it.

        Raises:
            NotationError: The order does not fit the tensor.
        """
        shape = _own_shape(self.dump, self.tensor, self.name)
        placed = {coord: order.places(self.local_ids(coord), shape) for coord in self.shards}
        by_coord = {coord: region_of(ids, self.shape) for coord, ids in placed.items() if ids.size}
        regions = {coord: region for coord, region in by_coord.items() if region is not None}
        empty = {coord: region for coord, region in self.regions.items() if not region.size}
        ids = {coord: placed[coord] for coord, region in by_coord.items() if region is None}
        return replace(self, regions={**regions, **empty}, ids=ids)

    def rank(self, coord: Coord) -> int:
        """Return the rank at a coordinate."""
        return self.mesh.rank_at(coord)

    def local_ids(self, coord: Coord) -> NDArray[np.int64]:
        """Return what a coordinate holds as ids from 1 within the tensor."""
        if coord in self.ids:
            return self.ids[coord]
        return self.regions[coord].flat_ids(self.shape) + 1

    def claimed_ids(self, coord: Coord) -> NDArray[np.int64]:
        """Return what a coordinate claims as ids from 1 within the tensor."""
        assert self.claimed is not None
        return self.claimed.region(coord).flat_ids(self.shape) + 1

    def index(self, element: int) -> list[int]:
        """Return the index of the element number `element`, counted row-major from 0."""
        return index_of(element, self.shape)

    def owner(self, model_id: int) -> tuple[str, int]:
        """Return the tensor that an id of the model belongs to, and the element's number in it."""
        name = self.dump.owner(model_id)
        return name, model_id - self.dump.first_ids[name]


def cases_of(dump: Dump, tensor: Tensor, name: str, *, claims: bool = True) -> Iterator[Case]:
    """Lay a tensor out as cases, one for each mesh that its ranks are on.

    Args:
        tensor: The tensor, or the fold that it is in.
        claims: Whether what the placements say is taken up. If even the global shape is wrong, it cannot be.

    Raises:
        DumpError: The dump does not have the ids, or they are too many to lay out.
    """
    for mesh, shards in _shards_by_mesh(dump, tensor).items():
        usual = Counter(shard.layout for shard in shards.values()).most_common(1)[0][0]
        yield _case(dump, tensor, name, mesh, usual if claims else None, shards)


def _shards_by_mesh(dump: Dump, tensor: Tensor) -> dict[Mesh, dict[Coord, Shard]]:
    meshes: dict[Mesh, dict[Coord, Shard]] = {}
    for rank, shard in tensor.shards.items():
        mesh = shard.layout.mesh if shard.layout else dump.files.mesh
        if rank in mesh:
            meshes.setdefault(mesh, {})[mesh.coord_of(rank)] = shard
    return meshes


def _case(
    dump: Dump, tensor: Tensor, name: str, mesh: Mesh, claimed: Layout | None, shards: dict[Coord, Shard]
) -> Case:
    shape = claimed.index_shape if claimed else _own_shape(dump, tensor, name)
    regions: dict[Coord, Region] = {}
    ids: dict[Coord, NDArray[np.int64]] = {}
    for coord, shard in shards.items():
        region = _region(dump, shard, name, shape)
        owned = as_own(dump, name, dump.local_ids(shard, name)) if region is None else None
        if owned is not None and shard.body.runs is not None:
            region = region_of(owned, shape)
        if region is not None:
            regions[coord] = region
        elif owned is not None:
            ids[coord] = owned
    return Case(dump, tensor, name, mesh, claimed, shards, regions, ids)


def _own_shape(dump: Dump, tensor: Tensor, name: str) -> tuple[int, ...]:
    """Return a plain tensor's whole shape: as stamped, because a rank knows only its shard's."""
    stamp = dump.stamps.get(name)
    return stamp.shape if stamp else tensor.shape


def _region(dump: Dump, shard: Shard, name: str, shape: tuple[int, ...]) -> Region | None:
    body = shard.body
    if not math.prod(body.local_shape):
        empty = body.local_shape if len(body.local_shape) == len(shape) else (0,) * len(shape)
        return Region(tuple(((0, size),) if size else () for size in empty))
    if shard.held is not None:
        return shard.held if len(shard.held.dims) == len(shape) else None
    if body.dense:
        return region_of(dump.dense(shard, name), shape, dump.first_ids.get(name, 1))
    return None


def as_own(dump: Dump, name: str, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a rank's ids; a buffer that is a copy of a weight has the weight's ids as its own."""
    stamp = dump.stamps.get(name)
    if stamp is None or not ids.size or not np.all(ids < -1):
        return ids
    first = counted_from(dump, stamp, int(-1 - ids.max()), int(-1 - ids.min()))
    return ids if first == stamp.first else -ids - first


def counted_from(dump: Dump, stamp: Stamp, least: int, most: int) -> int:
    """Return the first id of a tensor, or of the weight whose copy it is."""
    if stamp.role != "buffer" or not 1 <= least <= most <= dump.last_id:
        return stamp.first
    owner = dump.owner(least)
    is_copy = dump.owner(most) == owner and _is_copy(dump, stamp, owner)
    return dump.first_ids[owner] if is_copy else stamp.first


def _is_copy(dump: Dump, stamp: Stamp, owner: str) -> bool:
    """Whether a buffer equaled a weight before sharding, and the weight kept its elements."""
    weight = dump.stamped.get(owner)
    digests = {_digest_before(dump, "buffer", stamp.name), _digest_before(dump, "param", owner)}
    return weight is not None and len(digests) == 1 and "" not in digests and _has_its_elements(dump, weight, owner)


def _has_its_elements(dump: Dump, weight: Tensor, name: str) -> bool:
    """Whether all elements that ranks hold of a weight are its own, in whatever order."""
    return all(
        shard.held is not None or not math.prod(shard.body.local_shape) or dump.local_ids(shard, name).min() > 0
        for shard in weight.shards.values()
    )


def _digest_before(dump: Dump, role: str, name: str) -> str:
    """Return the unsharded tensor's digest; empty if it wasn't captured or is constant."""
    tensor = dump.find("reference", role, name)
    if tensor is None or tensor.first.body.constant:
        return ""
    return tensor.first.digest(tensor.index(name))


@dataclass(frozen=True, slots=True)
class Fit:
    """One cause that fits.

    Attributes:
        cause: What happened to the tensor, and its fix.
        sentence: What it means here, with the numbers in it; empty if the cause says it all.
        held: Where the elements are: in the notation if it has a word for it, in words otherwise.
        layout: The held layout, if the notation has one.
        details: Clauses that follow the sentence.
    """

    cause: Disorder
    sentence: str
    held: str
    layout: Layout | None = None
    details: tuple[str, ...] = ()

    @property
    def clause(self) -> str:
        """How a finding's sentence ends that has this cause."""
        return f": {self.sentence}" if self.sentence else ""


def is_as_claimed(dump: Dump, tensor: Tensor) -> bool:
    """Whether all ranks claim one layout of the whole stamped tensor and hold what it says."""
    layout = tensor.claimed
    if layout is None or len(tensor.shards) != len(layout.mesh.ranks):
        return False
    claimed = claimed_dims(layout)
    for rank, shard in tensor.shards.items():
        if shard.layout is not layout and shard.layout != layout:
            return False
        claimed_here = claimed.get(rank, ((),))
        if shard.body.held != claimed_here and (0 not in shard.body.local_shape or all(claimed_here)):
            return False
    return all(name not in dump.stamps or dump.stamps[name].shape == layout.tensor_shape for name in tensor.names)


@lru_cache(maxsize=256)
def claimed_dims(layout: Layout) -> dict[int, tuple[Ranges, ...]]:
    """Return the ranges that each rank of a layout's mesh claims in each dim."""
    return {rank: region.dims for rank, region in layout.regions()}


MAX_KEPT = 1 << 24
"""Numbers that are kept of all cases together; past that, a tensor is laid out again when it is asked for."""

KEPT_PER_SHARD = 32
"""What a shard takes in addition to its ids, in numbers."""


class LaidOut:
    """The stamped tensors of a dump, each laid out when it is first asked for."""

    def __init__(self, dump: Dump) -> None:
        """Lay out nothing yet."""
        self.dump = dump
        self._cases: dict[tuple[str, str, bool], tuple[Case, ...]] = {}
        self._room = MAX_KEPT

    def cases(self, tensor: Tensor, name: str, *, claims: bool = True) -> tuple[Case, ...]:
        """Return a tensor's cases, one for each mesh of its ranks; none if it was not stamped.

        Raises:
            DumpError: The dump does not have the ids, or there are too many to lay out.
        """
        if tensor.moment != "stamped":
            return ()
        key = (tensor.role, name, claims)
        if key not in self._cases:
            cases = tuple(cases_of(self.dump, tensor, name, claims=claims))
            num_ids = sum(ids.size for case in cases for ids in case.ids.values())
            size = num_ids + KEPT_PER_SHARD * sum(len(case.shards) for case in cases)
            if size > self._room:
                return cases
            self._room -= size
            self._cases[key] = cases
        return self._cases[key]


@dataclass(frozen=True)
class PairOfIds:
    """A stamped tensor on one mesh: each rank's ids as claimed, and as held.

    It is laid out again when it is asked for, if it is too large to be kept.

    Attributes:
        tensor: The tensor, or the fold that it is in.
        wanted: The layout: what is claimed, or what is intended; None if a plain tensor claims nothing.
        order: The order that a dim is meant to have; None for its own.
    """

    laid_out: LaidOut
    tensor: Tensor
    name: str
    mesh: Mesh
    wanted: Layout | None
    order: DimOrder | None = None

    @property
    def case(self) -> Case:
        """The tensor as the judge had it."""
        case = next(case for case in self.laid_out.cases(self.tensor, self.name) if case.mesh == self.mesh)
        return case if self.order is None else case.in_order(self.order)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the mesh that have the tensor, rising."""
        case = self.case
        return tuple(sorted(map(case.rank, case.shards)))

    @property
    def related(self) -> Related | None:
        """The layout that the ranks hold; None if the notation has none for it."""
        held = self.case.held
        return Related((Group(self.ranks, (Located(held),)),)) if held is not None else None

    def wanted_of(self, rank: int) -> NDArray[np.int64] | None:
        """Return the ids that a rank should hold, from 1 within the tensor; None if nothing says it."""
        if self.wanted is None:
            return None
        return self.wanted.region_of_rank(rank).flat_ids(self.wanted.index_shape) + 1

    def held_of(self, rank: int) -> NDArray[np.int64]:
        """Return a rank's ids, from 1 within the tensor; ids of other tensors are 0 or negative."""
        return self.case.local_ids(self.mesh.coord_of(rank))
