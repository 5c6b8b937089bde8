"""The holders of a tensor, from overlaid regions or from one layout, on a mesh of any size.

One layout gives the parts of a dim before any rank is asked. It splits each dim by axes of its own, so parts follow
each other without a gap, and each rank has one. The ranks of a part are looked up on demand: 16,384 parts on 16,384
ranks would be 32 MiB of sets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, overload

import numpy as np

from shardviz.layout.splits import parts_of, position_numbers
from shardviz.picture.model.holders import Holders, Stripes, mask_of, mask_of_flags, ranks_on
from shardviz.picture.model.mesh import coords_among

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shardviz.dump.dump import Dump, Tensor
    from shardviz.layout.layout import Layout
    from shardviz.layout.region import Ranges, Region
    from shardviz.layout.splits import Chain
    from shardviz.picture.model.holders import Mask, Masks

    Indices = NDArray[np.int64]


@dataclass
class PartOverlay:
    """Overlaid parts of a tensor; the attributes are those of `Holders`."""

    regions: dict[Region, Mask] = field(default_factory=dict)
    runs: dict[Ranges, Mask] = field(default_factory=dict)

    def add(self, region: Region, mask: Mask, *, flat: bool = False) -> None:
        """Add the holders of a part; that of a flat parameter is a stretch of row-major indices."""
        if flat:
            self.add_run(region.dims[0], mask)
        elif all(region.dims):
            self.regions[region] = self.regions.get(region, 0) | mask

    def add_run(self, ranges: Ranges, mask: Mask) -> None:
        """Add the holders of stretches of row-major indices."""
        self.runs[ranges] = self.runs.get(ranges, 0) | mask

    def holders(self, shape: Sequence[int]) -> Holders:
        """Return who holds a tensor of a shape; all maps are grids, so it gets at least two dims."""
        return Holders((1,) * (2 - len(shape)) + tuple(shape), self.regions, self.runs)


class PartRanks(Sequence["Mask"]):
    """The ranks of each part of a dim, as sets that are made on demand.

    Args:
        ranks: The ranks of a mesh.
        part_of: The part that each of them has.
        count: How many parts there are.
    """

    def __init__(self, ranks: Indices, part_of: Indices, count: int) -> None:
        order = np.lexsort((ranks, part_of))
        self._ranks = ranks[order]
        self._starts = np.searchsorted(part_of[order], np.arange(count + 1))
        self._part_of = np.full(int(ranks.max(initial=-1)) + 1, count, np.int64)
        self._part_of[ranks] = part_of

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, at: int) -> Mask: ...

    @overload
    def __getitem__(self, at: slice) -> list[Mask]: ...

    def __getitem__(self, at: int | slice) -> Mask | list[Mask]:
        if isinstance(at, slice):
            return [self[part] for part in range(*at.indices(len(self)))]
        return mask_of(self._ranks[self._starts[at] : self._starts[at + 1]])

    def together(self, parts: Indices) -> Mask:
        """Return the ranks of several parts."""
        is_one = np.zeros(len(self) + 1, np.bool_)
        is_one[parts] = True
        return mask_of_flags(is_one[self._part_of])

    @property
    def lowest(self) -> Indices:
        """The lowest rank of each part."""
        return self._ranks[self._starts[:-1]]


class PartStripes(Stripes):
    """A dim cut into parts that share no rank."""

    masks: PartRanks

    def _masks(self, first: int, last: int) -> Masks:
        """Return the ranks of some stripes; for several parts, those of one and of all together.

        That is enough to show that parts have different ranks.
        """
        parts = self.kinds[first : last + 1]
        one = self.masks[int(parts.min())]
        return frozenset((one,)) if first == last else frozenset((one, self.masks.together(parts)))

    def lowest(self, shift: int, low: Mask) -> Indices:
        """Return the lowest rank of each kind; there is one side alone, and somebody holds each."""
        return self.masks.lowest

    def claim_edges(self, low: Mask) -> Indices:
        """Return the edges of the parts: each has other ranks."""
        return self.edges


def is_whole(layout: Layout, ranks: frozenset[int]) -> bool:
    """Whether some ranks hold every part as the whole mesh would; one pipeline stage's ranks do."""
    mesh = layout.mesh
    if layout.flat is not None or not all(layout.shape):
        return False
    if ranks.issuperset(mesh.ranks):
        return True
    members = np.array([rank for rank in mesh.ranks if rank in ranks], np.int64)
    if not len(members):
        return False
    along = [len(np.unique(positions)) for positions in coords_among(mesh, members).T]
    is_box = math.prod(along) == len(members)
    return is_box and all(mesh.axis_size(axis) == along[mesh.axis_index(axis)] for axis in layout.split_axes)


def only_layout(dump: Dump, tensor: Tensor) -> tuple[Layout, frozenset[int]] | None:
    """Return a tensor's single layout and its ranks, if that is all there is to draw."""
    layouts = [layout for layout in tensor.claims if layout is not None]
    if tensor.moment == "stamped" or len(layouts) != 1:
        return None
    ranks = frozenset((*tensor.claims[layouts[0]], *dump.files.missing_ranks))
    return (layouts[0], ranks) if is_whole(layouts[0], ranks) else None


class LayoutRegions(Mapping["Region", "Mask"]):
    """The ranks that hold each region of a layout, computed when first asked for.

    Args:
        ranks: The ranks that claim it, for which it is whole.
    """

    def __init__(self, layout: Layout, ranks: frozenset[int]) -> None:
        self._layout = layout
        self._ranks = ranks

    @cached_property
    def _all_regions(self) -> dict[Region, Mask]:
        found = ((region, self._members(ranks)) for region, ranks in self._layout.holders().items() if all(region.dims))
        return {region: mask_of(ranks) for region, ranks in found if ranks}

    def _members(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if rank in self._ranks]

    def __getitem__(self, region: Region) -> Mask:
        return self._all_regions[region]

    def __iter__(self) -> Iterator[Region]:
        return iter(self._all_regions)

    def __len__(self) -> int:
        return len(self._all_regions)

    def stripes(self, num_dims: int) -> tuple[Stripes, ...]:
        """Return the stripes of each dim, with dims of size 1 before them up to so many."""
        missing = num_dims - len(self._layout.shape)
        dims = (*((1, ()),) * missing, *zip(self._layout.shape, self._layout.chains, strict=True))
        return tuple(self._stripes(size, links) for size, links in dims)

    def _stripes(self, size: int, links: Chain) -> Stripes:
        mesh = self._layout.mesh
        sizes = tuple(zip(mesh.axes, mesh.shape, strict=True))
        parts = parts_of(size, links, sizes)
        numbers = position_numbers(sizes, [axis for axis, _ in sizes if axis in links])
        bounds = np.fromiter(chain.from_iterable(chain.from_iterable(parts)), np.int64).reshape(-1, 2)
        owner = np.repeat(np.arange(len(parts)), np.fromiter(map(len, parts), np.int64, len(parts)))
        order = np.argsort(bounds[:, 0], kind="stable")
        kinds = owner[order]
        first = np.flatnonzero(np.diff(kinds, prepend=-1))
        edges = np.append(bounds[order, 0][first], size)
        ranks = PartRanks(ranks_on(mesh)[self._own_ranks], numbers[self._own_ranks], len(parts))
        return PartStripes(edges, kinds[first], ranks)

    @cached_property
    def _own_ranks(self) -> NDArray[np.bool_]:
        """Which of the mesh's ranks are its own."""
        mesh = self._layout.mesh.ranks
        if self._ranks.issuperset(mesh):
            return np.ones(len(mesh), np.bool_)
        return np.array([rank in self._ranks for rank in mesh], np.bool_)


class LayoutHolders(Holders):
    """Who holds a tensor with a single layout; dims are cut without listing every region."""

    regions: LayoutRegions

    @classmethod
    def of(cls, layout: Layout, ranks: frozenset[int]) -> LayoutHolders:
        """Return the holders of a layout; the arguments are those of `LayoutRegions`."""
        return cls((1,) * (2 - len(layout.shape)) + layout.shape, LayoutRegions(layout, ranks), {})

    @cached_property
    def dims(self) -> tuple[Stripes, ...]:
        """The stripes of each dim."""
        return self.regions.stripes(len(self.shape))
