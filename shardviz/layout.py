"""The oracle: a mesh, placements and a global shape give the region of the tensor that every coordinate holds.

A dim is described by its chain of splits, outermost first: `("tp", "fsdp")` for `12/tp/fsdp`. Each split follows
`torch.chunk`, level by level, so uneven and empty shards are ordinary. torch applies placements from the first mesh
axis to the last; `Layout.from_placements` reads them exactly so (torch 2.13,
`torch.distributed.tensor._utils._compute_local_shape_and_global_offset`) and then looks for the chain that reads best
and gives every coordinate the same indices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Literal

from shardviz.errors import LayoutError
from shardviz.placements import Partial, Placement, Replicate, Shard, StridedShard
from shardviz.region import Ranges, Region, length, merged

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardviz.mesh import Coord, Mesh

JOIN: Literal["|"] = "|"
"""A link that glues the segments of a number before the next split: `(9/2/fsdp)/tp`."""

Link = str | int
"""One split of a chain: an axis's name, a number of segments that are not distributed, or `JOIN`."""

Chain = tuple[Link, ...]


@dataclass(frozen=True, slots=True)
class FlatView:
    """A tensor that is a stretch of a flattened concatenation: how FSDP1 holds its original parameters.

    Attributes:
        shape: The tensor's own shape.
        offset: Where its first element stands in the concatenation.
    """

    shape: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True)
class Layout:
    """Which coordinate of a mesh holds which part of a tensor.

    Attributes:
        mesh: The mesh.
        shape: The global shape. With `flat`, one dim: the elements of the whole concatenation, padding included.
        chains: How each dim is split, outermost first.
        partial: Axes over which a sum (or another reduction) is pending, with the reduction.
        flat: The tensor's place in a flattened concatenation; None for all but FSDP1.

    Raises:
        LayoutError: A chain names an axis that the mesh does not have, or one axis stands in two places.
    """

    mesh: Mesh
    shape: tuple[int, ...]
    chains: tuple[Chain, ...]
    partial: tuple[tuple[str, str], ...] = ()
    flat: FlatView | None = None

    def __post_init__(self) -> None:
        if len(self.chains) != len(self.shape):
            raise LayoutError(f"{len(self.chains)} chains of splits for a tensor of {len(self.shape)} dims")
        used = [link for chain in self.chains for link in chain if isinstance(link, str) and link != JOIN]
        used += [axis for axis, _ in self.partial]
        for axis in used:
            self.mesh.axis_index(axis)
            if used.count(axis) > 1:
                raise LayoutError(
                    f"axis {axis} stands {used.count(axis)} times in one layout",
                    "an axis can split one dim only",
                )
        if any(isinstance(link, int) and link < 1 for chain in self.chains for link in chain):
            raise LayoutError("a dim is split into less than one segment")

    @classmethod
    def replicated(cls, mesh: Mesh, shape: Sequence[int]) -> Layout:
        """Return the layout in which every rank holds all of the tensor."""
        return cls(mesh, tuple(shape), ((),) * len(shape))

    @classmethod
    def from_placements(
        cls, mesh: Mesh, shape: Sequence[int], placements: Sequence[Placement], flat: FlatView | None = None
    ) -> Layout:
        """Read torch's placements, one for each axis of the mesh.

        Raises:
            LayoutError: Not one placement an axis, or a placement names a dim that the tensor does not have.
        """
        if len(placements) != mesh.ndim:
            raise LayoutError(f"{len(placements)} placements for a mesh of {mesh.ndim} axes {mesh}")
        for placement in placements:
            if isinstance(placement, Shard | StridedShard) and not 0 <= placement.dim < len(shape):
                raise LayoutError(f"{placement} on a tensor of {len(shape)} dims")
        sharded = [
            [
                (axis, p)
                for axis, p in zip(mesh.axes, placements, strict=True)
                if isinstance(p, Shard | StridedShard) and p.dim == dim
            ]
            for dim in range(len(shape))
        ]
        partial = tuple((axis, p.op) for axis, p in zip(mesh.axes, placements, strict=True) if isinstance(p, Partial))
        sizes = dict(zip(mesh.axes, mesh.shape, strict=True))
        chains = tuple(_readable_chain(size, tuple(steps), sizes) for size, steps in zip(shape, sharded, strict=True))
        return cls(mesh, tuple(shape), chains, partial, flat)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape that the model sees."""
        return self.flat.shape if self.flat else self.shape

    @property
    def index_shape(self) -> tuple[int, ...]:
        """The shape in which regions count: the tensor's own, flattened to one dim for a flat view."""
        return (math.prod(self.flat.shape),) if self.flat else self.shape

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axes that split some dim, in mesh order."""
        used = {link for chain in self.chains for link in chain}
        return tuple(axis for axis in self.mesh.axes if axis in used)

    @property
    def replicate_axes(self) -> tuple[str, ...]:
        """The axes along which every rank holds an equal copy, in mesh order."""
        pending = {axis for axis, _ in self.partial}
        return tuple(axis for axis in self.mesh.axes if axis not in self.split_axes and axis not in pending)

    def region(self, coord: Coord) -> Region:
        """Return what the coordinate holds, in `index_shape`."""
        position = dict(zip(self.mesh.axes, coord, strict=True))
        sizes = dict(zip(self.mesh.axes, self.mesh.shape, strict=True))
        dims = tuple(
            _held(size, _bound(chain, position, sizes)) for size, chain in zip(self.shape, self.chains, strict=True)
        )
        return Region(dims) if self.flat is None else Region((self._window(dims[0]),))

    def _window(self, ranges: Ranges) -> Ranges:
        """Cut the tensor's own stretch out of ranges of the concatenation, and count from its start."""
        assert self.flat is not None
        begin, numel = self.flat.offset, math.prod(self.flat.shape)
        cut = ((max(start - begin, 0), min(stop - begin, numel)) for start, stop in ranges)
        return merged((start, stop) for start, stop in cut if start < stop)

    def regions(self) -> Iterator[tuple[int, Region]]:
        """Yield every rank of the mesh with the region it holds, in mesh order."""
        for coord, rank in zip(self.mesh.coords(), self.mesh.ranks, strict=True):
            yield rank, self.region(coord)

    def holders(self) -> dict[Region, tuple[int, ...]]:
        """Return the distinct regions, each with the ranks that hold it."""
        found: dict[Region, list[int]] = {}
        for rank, region in self.regions():
            found.setdefault(region, []).append(rank)
        return {region: tuple(ranks) for region, ranks in found.items()}

    def placements(self) -> tuple[Placement, ...] | None:
        """Return torch's spelling, one placement for each axis; None where torch cannot say this layout."""
        by_axis: dict[str, Placement] = {axis: Partial(op) for axis, op in self.partial}
        for dim, chain in enumerate(self.chains):
            steps = _steps(dim, chain, self.mesh)
            if steps is None:
                return None
            by_axis |= steps
        spelled = tuple(by_axis.get(axis, Replicate()) for axis in self.mesh.axes)
        same = Layout.from_placements(self.mesh, self.shape, spelled, self.flat)
        return spelled if same.same_regions(self) else None

    def same_regions(self, other: Layout) -> bool:
        """Whether both give every coordinate the same region; chains may be spelled differently."""
        if self.chains == other.chains and self.flat == other.flat:
            return self.shape == other.shape and self.mesh == other.mesh
        return self.mesh == other.mesh and all(
            self.region(coord) == other.region(coord) for coord in self.mesh.coords()
        )


def _bound(chain: Chain, position: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
    """Give each link its numbers: (parts, chosen part), with -1 for all parts and (0, 0) for a join."""
    links = []
    for link in chain:
        if link == JOIN:
            links.append((0, 0))
        elif isinstance(link, int):
            links.append((link, -1))
        else:
            links.append((sizes[link], position[link]))
    return tuple(links)


@lru_cache(maxsize=1 << 16)
def _held(size: int, links: tuple[tuple[int, int], ...]) -> Ranges:
    """Follow a bound chain from the whole dim to the indices that are left."""
    segments: list[Ranges] = [((0, size),)]
    for parts, chosen in links:
        if parts == 0:
            segments = [merged(range_ for segment in segments for range_ in segment)]
        elif chosen < 0:
            segments = [chunk(segment, parts, part) for segment in segments for part in range(parts)]
        else:
            segments = [chunk(segment, parts, chosen) for segment in segments]
    return merged(range_ for segment in segments for range_ in segment)


def chunk(ranges: Ranges, parts: int, part: int) -> Ranges:
    """Return the part that `torch.chunk(indices, parts)[part]` would be; past the last chunk it is empty."""
    step = -(-length(ranges) // parts)
    first, last = part * step, (part + 1) * step
    kept, before = [], 0
    for start, stop in ranges:
        low, high = max(first - before, 0), min(last - before, stop - start)
        if low < high:
            kept.append((start + low, start + high))
        before += stop - start
    return tuple(kept)


def _literal_chain(steps: Sequence[tuple[str, Shard | StridedShard]]) -> Chain:
    """Spell placements exactly as torch applies them: left to right, gluing the segments before each axis."""
    chain: list[Link] = []
    for axis, placement in steps:
        if any(isinstance(link, int) for link in chain):
            chain.append(JOIN)
        if isinstance(placement, StridedShard) and placement.split_factor > 1:
            chain.append(placement.split_factor)
        chain.append(axis)
    return tuple(chain)


def _nested_chain(steps: Sequence[tuple[str, Shard | StridedShard]], sizes: Mapping[str, int]) -> Chain | None:
    """Undo the split factors: each says how many parts, made by later axes and numbers, its axis splits again."""
    chain: list[Link] = []
    for axis, placement in reversed(steps):
        factor = placement.split_factor if isinstance(placement, StridedShard) else 1
        before = [math.prod(_parts(link, sizes) for link in chain[:count]) for count in range(len(chain) + 1)]
        if factor in before:
            chain.insert(before.index(factor), axis)
        elif factor % before[-1] == 0:
            chain += [factor // before[-1], axis]
        else:
            return None
    return tuple(chain)


def _parts(link: Link, sizes: Mapping[str, int]) -> int:
    return link if isinstance(link, int) else sizes[link]


def _readable_chain(size: int, steps: tuple[tuple[str, Shard | StridedShard], ...], sizes: Mapping[str, int]) -> Chain:
    """Choose the nested chain where it gives every coordinate what torch's own reading gives, else the literal one."""
    literal = _literal_chain(steps)
    if not any(isinstance(link, int) for link in literal):
        return literal
    nested = _nested_chain(steps, sizes)
    return nested if nested is not None and _same_chain(size, literal, nested, tuple(sizes.items())) else literal


@lru_cache(maxsize=4096)
def _same_chain(size: int, one: Chain, other: Chain, sizes: tuple[tuple[str, int], ...]) -> bool:
    by_name = dict(sizes)
    axes = [axis for axis in by_name if axis in one]
    for position in product(*(range(by_name[axis]) for axis in axes)):
        at = dict(zip(axes, position, strict=True))
        if _held(size, _bound(one, at, by_name)) != _held(size, _bound(other, at, by_name)):
            return False
    return True


def _steps(dim: int, chain: Chain, mesh: Mesh) -> dict[str, Placement] | None:
    """Spell one dim's chain as placements: an axis's split factor is the product of what stands before it in the
    chain and is not already applied, that is numbers and axes that come later on the mesh."""
    sizes = dict(zip(mesh.axes, mesh.shape, strict=True))
    if JOIN in chain:
        return _literal_steps(dim, chain, mesh)
    steps: dict[str, Placement] = {}
    for index, link in enumerate(chain):
        if isinstance(link, int):
            continue
        earlier = set(mesh.axes[: mesh.axis_index(link)])
        factor = math.prod(_parts(other, sizes) for other in chain[:index] if other not in earlier)
        steps[link] = StridedShard(dim, factor) if factor > 1 else Shard(dim)
    trailing = chain and isinstance(chain[-1], int)
    return None if trailing else steps


def _literal_steps(dim: int, chain: Chain, mesh: Mesh) -> dict[str, Placement] | None:
    """Spell a chain with joins: each glued group is one axis with its own factor, in mesh order."""
    steps: dict[str, Placement] = {}
    factor = 1
    for link in chain:
        if isinstance(link, int):
            factor *= link
        elif link != JOIN:
            steps[link] = StridedShard(dim, factor) if factor > 1 else Shard(dim)
            factor = 1
    in_order = [axis for axis in mesh.axes if axis in steps] == list(steps)
    return steps if in_order else None
