"""A layout: mesh, placements and global shape give the region that each coordinate holds.

A dim is described by its chain of splits, outermost first: `("tp", "fsdp")` for `12/tp/fsdp`. Each split follows
`torch.chunk`, level by level, so uneven and empty shards are ordinary. torch applies placements from the first mesh
axis to the last; `Layout.from_placements` reads them exactly so (torch 2.13,
`torch.distributed.tensor._utils._compute_local_shape_and_global_offset`) and then looks for the chain that reads best
and gives every coordinate the same indices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from shardviz.errors import LayoutError
from shardviz.layout.placements import Partial, Placement, Replicate, Shard, StridedShard
from shardviz.layout.region import Ranges, Region, merge_ranges
from shardviz.layout.splits import (
    MAX_SEGMENTS,
    Chain,
    Sizes,
    axes_in,
    bind_chain,
    check_segments,
    follow_chain,
    lengths,
    parts_of,
    placements_of_chain,
    position_numbers,
    readable_chain,
    same_parts,
)
from shardviz.text import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.layout.mesh import Coord, Mesh

MOST_LAYOUTS = 8
"""Layouts whose regions are kept, those of all ranks: a map, its ranks and the next stage's ask for the same ones."""


@dataclass(frozen=True, slots=True)
class FlatView:
    """A tensor as a range of a flattened concatenation: FSDP1 stores original parameters so.

    Attributes:
        offset: The position of its first element in the concatenation.
    """

    shape: tuple[int, ...]
    offset: int = 0

    def window(self, ranges: Ranges) -> Ranges:
        """Cut the tensor's own stretch out of ranges of the concatenation, and count from its start."""
        begin, numel = self.offset, math.prod(self.shape)
        cut = ((max(start - begin, 0), min(stop - begin, numel)) for start, stop in ranges)
        return merge_ranges((start, stop) for start, stop in cut if start < stop)


@dataclass(frozen=True)
class Layout:
    """Which coordinate of a mesh holds which part of a tensor.

    Attributes:
        shape: The global shape. With `flat`, one dim: the elements of the whole concatenation, padding included.
        chains: How each dim is split, outermost first.
        partial: Axes over which a sum (or another reduction) is pending, with the reduction.
        flat: The tensor's place in a flattened concatenation; None for all but FSDP1.
        own_axes: The axes of the tensor's own mesh, if that is a part of `mesh`; empty if it is all of it.

    Raises:
        LayoutError: One axis is used twice, a dim is cut into less than one segment or more than
            `MAX_SEGMENTS`, or a flat view does not lie within its concatenation.
        MeshError: A chain names an axis that the mesh does not have.

    Example:
        >>> from shardviz.layout.mesh import parse_mesh
        >>> layout = Layout(parse_mesh("fsdp=2,tp=2"), (8, 4), (("tp", "fsdp"), ()))  # [8/tp/fsdp, 4]
        >>> for rank, region in layout.regions():
        ...     print(rank, region)
        0 [0:2, 0:4]
        1 [4:6, 0:4]
        2 [2:4, 0:4]
        3 [6:8, 0:4]
        >>> print(*layout.placements())
        _StridedShard(0, split_factor=2) Shard(0)
    """

    mesh: Mesh
    shape: tuple[int, ...]
    chains: tuple[Chain, ...]
    partial: tuple[tuple[str, str], ...] = ()
    flat: FlatView | None = None
    own_axes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if len(self.chains) != len(self.shape):
            raise LayoutError(f"{len(self.chains)} chains of splits for a tensor of {len(self.shape)} dims")
        used = [*self.nested_axes, *(axis for axis, _ in self.partial)]
        for axis in used:
            self.mesh.axis_index(axis)
            if used.count(axis) > 1:
                raise LayoutError(
                    f"axis {axis} is used {used.count(axis)} times in one layout",
                    "an axis can split only one dim",
                )
        for chain in self.chains:
            check_segments(chain)
        self._check_sizes()

    def _check_sizes(self) -> None:
        if min(self.shape, default=0) < 0:
            raise LayoutError(f"a dim has size {min(self.shape)}, expected 0 or more")
        if self.flat is None:
            return
        numel, total = math.prod(self.flat.shape), self.shape[0] if len(self.shape) == 1 else -1
        if not 0 <= self.flat.offset <= total - numel or min(self.flat.shape, default=0) < 0:
            raise LayoutError(
                f"{numel} elements at {self.flat.offset} do not lie within a concatenation of shape {list(self.shape)}"
            )

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
            LayoutError: There is not one placement per axis, or one names a dim that the tensor does not have.

        Example:
            >>> from shardviz.layout.mesh import parse_mesh
            >>> layout = Layout.from_placements(parse_mesh("fsdp=2,tp=4"), (12, 12), (Shard(0), Shard(0)))
            >>> layout.chains
            (('fsdp', 'tp'), ())
        """
        check_placements(mesh, shape, placements)
        sharded = [
            [
                (axis, p)
                for axis, p in zip(mesh.axes, placements, strict=True)
                if isinstance(p, Shard | StridedShard) and p.dim == dim
            ]
            for dim in range(len(shape))
        ]
        partial = tuple((axis, p.op) for axis, p in zip(mesh.axes, placements, strict=True) if isinstance(p, Partial))
        sizes = dict(mesh.sizes)
        chains = tuple(readable_chain(size, tuple(steps), sizes) for size, steps in zip(shape, sharded, strict=True))
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
    def nested_axes(self) -> tuple[str, ...]:
        """The axes that split some dim, dim by dim, the outermost of each first."""
        return tuple(axis for chain in self.chains for axis in axes_in(chain))

    @property
    def replicate_axes(self) -> tuple[str, ...]:
        """The axes along which every rank holds an equal copy, in mesh order."""
        pending = {axis for axis, _ in self.partial}
        return tuple(axis for axis in self.mesh.axes if axis not in self.split_axes and axis not in pending)

    def region(self, coord: Coord) -> Region:
        """Return the elements that the coordinate holds, in `index_shape`."""
        position = dict(zip(self.mesh.axes, coord, strict=True))
        sizes = dict(self.mesh.sizes)
        dims = tuple(
            follow_chain(size, bind_chain(chain, position, sizes))
            for size, chain in zip(self.shape, self.chains, strict=True)
        )
        return Region(dims) if self.flat is None else Region((self.flat.window(dims[0]),))

    def region_of_rank(self, rank: int) -> Region:
        """Return the elements that a rank of the mesh holds, in `index_shape`.

        Raises:
            MeshError: The mesh does not have the rank.
        """
        return self.region(self.mesh.coord_of(rank))

    def regions(self) -> Iterator[tuple[int, Region]]:
        """Yield every rank of the mesh with the region it holds, in mesh order."""
        regions, numbers = self._regions
        yield from zip(self.mesh.ranks, map(regions.__getitem__, numbers), strict=True)

    @property
    def _regions(self) -> tuple[tuple[Region, ...], tuple[int, ...]]:
        """The distinct regions, and the number of its region for every coordinate."""
        return _regions(self.mesh.sizes, self.shape, self.chains, self.flat)

    def holders(self) -> dict[Region, tuple[int, ...]]:
        """Return the distinct regions, each with the ranks that hold it."""
        regions, numbers = self._regions
        ranks_by_region: dict[Region, list[int]] = {}
        ranks_of = [ranks_by_region.setdefault(region, []) for region in regions]
        for rank, number in zip(self.mesh.ranks, numbers, strict=True):
            ranks_of[number].append(rank)
        return {region: tuple(ranks) for region, ranks in ranks_by_region.items()}

    def local_shapes(self) -> NDArray[np.int64]:
        """Return the shape of every region, a row for each rank in mesh order."""
        if self.flat is not None:
            regions, numbers = self._regions
            return np.array([region.shape for region in regions], np.int64)[list(numbers)]
        dims = [lengths(size, chain, self.mesh.sizes) for size, chain in zip(self.shape, self.chains, strict=True)]
        return np.stack(dims, axis=1) if dims else np.zeros((self.mesh.size, 0), np.int64)

    def placements(self) -> tuple[Placement, ...] | None:
        """Return torch's placements, one an axis; None if torch can't express this layout."""
        by_axis: dict[str, Placement] = {axis: Partial(op) for axis, op in self.partial}
        for dim, chain in enumerate(self.chains):
            by_axis |= placements_of_chain(dim, chain, self.mesh)
        spelled = tuple(by_axis.get(axis, Replicate()) for axis in self.mesh.axes)
        try:
            read_back = Layout.from_placements(self.mesh, self.shape, spelled, self.flat)
        except LayoutError:
            return None
        return spelled if read_back.same_regions(self) else None

    def same_regions(self, other: Layout) -> bool:
        """Whether both give every coordinate the same region; chains may be spelled differently."""
        if self.mesh != other.mesh or self.index_shape != other.index_shape:
            return False
        if (self.chains, self.shape, self.flat) == (other.chains, other.shape, other.flat):
            return True
        if self.flat is not None or other.flat is not None:
            return list(self.regions()) == list(other.regions())
        dims = zip(self.shape, self.chains, other.chains, strict=True)
        return all(same_parts(size, one, another, self.mesh.sizes) for size, one, another in dims)


@lru_cache(maxsize=MOST_LAYOUTS)
def _regions(
    sizes: Sizes, shape: tuple[int, ...], chains: tuple[Chain, ...], flat: FlatView | None
) -> tuple[tuple[Region, ...], tuple[int, ...]]:
    axes = [axis for axis, _ in sizes if any(axis in chain for chain in chains)]
    split = tuple((axis, size) for axis, size in sizes if axis in axes)
    dims = []
    for size, chain in zip(shape, chains, strict=True):
        parts = parts_of(size, chain, sizes)
        parts = parts if flat is None else tuple(map(flat.window, parts))
        dims.append([parts[number] for number in position_numbers(split, axes_in(chain)).tolist()])
    regions = tuple(map(Region, zip(*dims, strict=True))) if dims else (Region(()),)
    return regions, tuple(position_numbers(sizes, axes).tolist())


def check_placements(mesh: Mesh, shape: Sequence[int], placements: Sequence[Placement]) -> None:
    """Make sure that placements fit their mesh and their tensor.

    Raises:
        LayoutError: There is not one placement per axis, one names a dim that the tensor does not have, or a split
            factor is below 1 or above `MAX_SEGMENTS`.
    """
    if len(placements) != mesh.ndim:
        given = counted(len(placements), "placement")
        raise LayoutError(
            f"{given} for a mesh of {mesh.ndim} {'axis' if mesh.ndim == 1 else 'axes'} {mesh}",
            f"write one per axis, outermost first: {', '.join(mesh.axes)}",
        )
    for placement in placements:
        if isinstance(placement, Shard | StridedShard) and not 0 <= placement.dim < len(shape):
            dims = f"its dims are 0 to {len(shape) - 1}" if shape else "a single number cannot be split"
            raise LayoutError(f"{placement} on a tensor of {counted(len(shape), 'dim')}", dims)
        if isinstance(placement, StridedShard) and not 1 <= placement.split_factor <= MAX_SEGMENTS:
            raise LayoutError(f"{placement}: a split factor is 1 to {MAX_SEGMENTS:,}")


Placements = tuple[Placement, ...]

MAX_CANDIDATES = 1 << 10
"""A tensor that could be split over the mesh in more ways than this is not searched for."""


@lru_cache(maxsize=4096)
def placements_of(
    shape: tuple[int, ...], local: tuple[int, ...], mesh: Mesh, rank: int
) -> tuple[tuple[Placements, Region], ...]:
    """Return the placements that give a rank a local shape, and its region; fewest splits first."""
    kinds: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    if len(shape) != len(local) or len(kinds) ** mesh.ndim > MAX_CANDIDATES or rank not in mesh:
        return ()
    fitting = []
    for placements in sorted(product(kinds, repeat=mesh.ndim), key=num_splits):
        region = Layout.from_placements(mesh, shape, placements).region_of_rank(rank)
        if region.shape == local:
            fitting.append((placements, region))
    return tuple(fitting)


def shared_placements(
    shape: tuple[int, ...],
    local: Mapping[int, tuple[int, ...]],
    mesh: Mesh,
    fits: Callable[[int, Region], bool],
) -> Placements | None:
    """Return the placements with the fewest splits that fit every rank's part; None without any.

    Args:
        fits: Whether a rank's part is that region of the whole.
    """
    regions = {rank: dict(placements_of(shape, own, mesh, rank)) for rank, own in local.items()}
    for placements in next(iter(regions.values()), {}):
        if all(placements in own and fits(rank, own[placements]) for rank, own in regions.items()):
            return placements
    return None


def padded_shapes(shape: tuple[int, ...], local: tuple[int, ...], sizes: Collection[int]) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of a whole that was padded at the end of one dim, and then split into equal parts.

    Parts that make up the whole without padding have none, and none is padding alone: copies that ranks share, as of
    heads, are as long.

    Args:
        shape: The shape of the whole without padding.
        sizes: Into how many parts a mesh may split a dim; a part that is longer than the whole is no split.

    Example:
        >>> list(padded_shapes((45, 8), (24, 8), (1, 2)))
        [(48, 8)]
    """
    for dim in range(len(shape) if len(shape) == len(local) else 0):
        lengths = [local[dim] * size for size in (sizes if local[dim] < shape[dim] else (1,))]
        for length in lengths if shape[dim] not in lengths else ():
            if shape[dim] < length < shape[dim] + local[dim]:
                yield (*shape[:dim], length, *shape[dim + 1 :])


def num_splits(placements: Placements) -> int:
    """Return along how many axes placements split."""
    return sum(isinstance(one, Shard) for one in placements)
