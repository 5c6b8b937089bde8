"""The audit's cases: every small shape and placement, smallest first. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Literal

from shardviz.layout.layout import Layout
from shardviz.layout.mesh import Mesh
from shardviz.layout.placements import Partial, Placement, Replicate, Shard, StridedShard, spell

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.layout.region import Region

Operation = Literal["distribute", "gather", "redistribute", "fsdp_tp", "checkpoint"]
Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Case:
    """One operation to try, and its right result.

    Attributes:
        operation: What torch is asked to do.
        mesh: On which mesh; its ranks may be permuted.
        shape: The global shape.
        source: How the tensor lies before.
        target: How it must lie after.
        flattened: The mesh's axes are also flattened into one, over which torch may then merge collectives.
    """

    operation: Operation
    mesh: Mesh
    shape: tuple[int, ...]
    source: Placements
    target: Placements
    flattened: bool = False

    def layout(self, placements: Placements) -> Layout:
        """Return the oracle's reading of placements on this case's mesh and shape."""
        return Layout.from_placements(self.mesh, self.shape, placements)

    def wanted(self, rank: int) -> Region:
        """Return the region that a rank must hold after the operation."""
        return self.wanted_layout.region_of_rank(rank)

    def wanted_ids(self, rank: int) -> list[int]:
        """Return the ids that a rank must hold after the operation, in memory order."""
        return self.ids(self.wanted(rank))

    def ids(self, region: Region) -> list[int]:
        """Return the ids of a region; they count from 1, so that padding is none of them."""
        ids: list[int] = (region.flat_ids(self.shape) + 1).ravel().tolist()
        return ids

    def start(self, rank: int) -> list[int]:
        """Return a rank's first values in memory order: ids, or its share of a pending sum."""
        share = self.share(rank)
        return [share * number for number in self.ids(self.layout(self.source).region_of_rank(rank))]

    def share(self, rank: int) -> int:
        """Return the factor of a rank's ids if a sum is pending: a different one on every rank.

        The shares of ranks that are summed give 1, so that a rank left out, counted twice or taken for another shows.
        """
        coord, index, count = self.mesh.coord_of(rank), 0, 1
        for at, placement in enumerate(self.source):
            if isinstance(placement, Partial):
                index, count = index * self.mesh.shape[at] + coord[at], count * self.mesh.shape[at]
        return index + 1 if index else 1 - sum(range(2, count + 1))

    @property
    def wanted_layout(self) -> Layout:
        """The layout that must come of it."""
        if self.operation == "gather":
            return Layout.replicated(self.mesh, self.shape)
        return self.layout(self.target)

    @property
    def family(self) -> tuple[object, ...]:
        """What one kind of disagreement shares: all but sizes; on a permuted mesh, the operation."""
        if is_permuted(self.mesh):
            return self.operation, "permuted"
        return self.operation, self.flattened, spell(self.source), spell(self.target)

    @property
    def weight(self) -> tuple[int, int, tuple[int, ...]]:
        """Sorts smaller and plainer cases first."""
        return math.prod(self.shape), sum(self.shape), self.shape

    def __str__(self) -> str:
        before, after = spell(self.source), spell(self.target)
        arrow = f"{before} -> {after}" if self.operation in ("redistribute", "checkpoint") else after
        flat = " with its axes flattened" if self.flattened else ""
        ranks = f" of ranks {list(self.mesh.ranks)}" if is_permuted(self.mesh) else ""
        return f"{self.operation} {list(self.shape)} on {self.mesh}{ranks}{flat}: {arrow}"


def all_cases(mesh: Mesh, max_size: int) -> list[Case]:
    """Return every case, the smallest of each operation first."""
    reversed_mesh = Mesh(mesh.axes, mesh.shape, tuple(reversed(mesh.ranks)))
    cases: list[Case] = []
    for shape in shapes(max_size):
        for on in (mesh, reversed_mesh) if mesh.size > 1 else (mesh,):
            cases += _cases_of_shape(on, shape)
    order: dict[str, int] = {"distribute": 0, "gather": 1, "redistribute": 2, "fsdp_tp": 3, "checkpoint": 4}
    return sorted(cases, key=lambda case: (order[case.operation], case.weight))


def shapes(max_size: int) -> Iterator[tuple[int, ...]]:
    """Yield vectors of up to `max_size` elements, and matrices of up to half as many a side."""
    for size in range(1, max_size + 1):
        yield (size,)
    side = max(2, max_size // 2)
    yield from product(range(1, side + 1), repeat=2)


def is_permuted(mesh: Mesh) -> bool:
    """Whether the mesh's ranks do not rise."""
    return mesh.ranks != tuple(sorted(mesh.ranks))


def _cases_of_shape(mesh: Mesh, shape: tuple[int, ...]) -> Iterator[Case]:
    kinds: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    plain: list[Placements] = list(product(kinds, repeat=mesh.ndim))
    strided = list(_strided(mesh, len(shape)))
    summed = [placements for placements in product([*kinds, Partial()], repeat=mesh.ndim) if Partial() in placements]
    is_flattened = [False, True] if mesh.ndim > 1 and not is_permuted(mesh) else [False]
    for placements in plain:
        yield Case("distribute", mesh, shape, placements, placements)
    for placements, flat in product([*plain, *strided, *summed], is_flattened):
        yield Case("gather", mesh, shape, placements, placements, flattened=flat)
    for source, target, flat in product([*plain, *strided, *summed], plain, is_flattened):
        if source != target:
            yield Case("redistribute", mesh, shape, source, target, flattened=flat)
    if is_permuted(mesh):
        return
    if mesh.ndim >= 2 and len(shape) == 2:
        for placements in _fsdp_tp(mesh):
            yield Case("fsdp_tp", mesh, shape, placements, placements)
    if len(shape) == 1:
        for source, target in product([*plain, *strided], [*plain, *strided]):
            yield Case("checkpoint", mesh, shape, source, target)


def _strided(mesh: Mesh, ndim: int) -> Iterator[Placements]:
    """Yield FSDP2's placements over one later axis: a dim split by an inner axis first."""
    for dim in range(ndim):
        for outer in range(mesh.ndim - 1):
            for inner in range(outer + 1, mesh.ndim):
                placements: list[Placement] = [Replicate()] * mesh.ndim
                placements[outer] = StridedShard(dim, mesh.shape[inner])
                placements[inner] = Shard(dim)
                if mesh.shape[inner] > 1:
                    yield tuple(placements)


def _fsdp_tp(mesh: Mesh) -> Iterator[Placements]:
    """Yield the placements of `fully_shard` over column- and row-wise tensor parallel."""
    tp = mesh.shape[-1]
    copies = (Replicate(),) * (mesh.ndim - 2)
    column: Placement = StridedShard(0, tp) if tp > 1 else Shard(0)
    yield (*copies, column, Shard(0))
    yield (*copies, Shard(0), Shard(1))
