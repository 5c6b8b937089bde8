"""One tensor over all ranks: what each holds and claims of it, and its whole values, put together offline.

Weights may be cut by hand and split again by a library, whose mesh lacks the axis of the cut: a module on a
tensor-parallel rank holds the rank's columns as its whole weight, and `fully_shard` splits those over dp. The DTensor's
mesh has no tp, so its placements claim nothing along tp, and its shape is that of the columns. The ids say which
columns they are, and the layout is extended by the missing axes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations, product
from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs

from shardviz.dump.records.base import DIGEST_LENGTH
from shardviz.errors import DumpError, LayoutError
from shardviz.groups import the_only
from shardviz.layout.mesh import ranks_by
from shardviz.layout.region import Region, indices
from shardviz.layout.splits import JOIN, axes_in
from shardviz.text import Fold, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from shardviz.dump.dump import Dump
    from shardviz.dump.records.base import Moment, Role
    from shardviz.dump.records.tensors import Body, Stamp
    from shardviz.layout.layout import Layout
    from shardviz.layout.splits import Chain


@dataclass(frozen=True)
class Shard:
    """What one rank holds of a tensor.

    Attributes:
        rank: The global rank.
        body: Its record.
        layout: What its placements claim; None for a plain tensor.
        digests: For every name of the fold, 16 hex digits of the numbers' hash; empty if none was taken.
    """

    rank: int
    body: Body
    layout: Layout | None
    digests: str = ""

    @cached_property
    def held(self) -> Region | None:
        """The region that it holds, if the ids are a product of ranges in every dim."""
        return Region(self.body.held) if self.body.held is not None else None

    def digest(self, index: int) -> str:
        """Return the digest of the fold's name number `index`; empty if none was taken."""
        return self.digests[index * DIGEST_LENGTH : (index + 1) * DIGEST_LENGTH]


class LazyShards(Mapping[int, Shard]):
    """Shards made on demand, with summaries that don't need every rank's shard."""

    @abstractmethod
    def claims(self) -> dict[Layout | None, tuple[int, ...]]:
        """Return the ranks, rising, by what they claim."""

    @abstractmethod
    def distinct(self) -> list[Shard]:
        """Return one shard for each claim and each shape of a part, by rank, rising."""


@dataclass(frozen=True)
class Tensor:
    """One tensor over all ranks, or several layers' whose records are the same on every rank.

    Attributes:
        fold: Its name, or the folded names of identical layers.
        role: What it is to the model.
        moment: When it was captured.
        shards: What each rank holds, by rank, rising; in a plan made when it is asked for.
    """

    fold: Fold
    role: Role
    moment: Moment
    shards: Mapping[int, Shard]

    @property
    def name(self) -> str:
        """The name, or the folded names: `layers.[0-31].wq.weight`."""
        return str(self.fold)

    @cached_property
    def names(self) -> list[str]:
        """Every name."""
        return self.fold.names()

    def index(self, name: str) -> int:
        """Return the position of one of its names, which is that of its digest, too."""
        return self._positions[name]

    def is_equal_on_ranks(self, name: str) -> bool:
        """Whether digests show that one of its names has the same values on all ranks."""
        digests = {shard.digest(self.index(name)) for shard in self.shards.values()}
        return len(digests) == 1 and "" not in digests

    @cached_property
    def _positions(self) -> Mapping[str, int]:
        return {name: position for position, name in enumerate(self.names)}

    @cached_property
    def first(self) -> Shard:
        """The shard of the lowest rank that has the tensor."""
        return next(iter(self.shards.values()))

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape, as the lowest rank sees it."""
        return self.first.body.shape

    @property
    def dtype(self) -> str:
        """The dtype, as the lowest rank sees it."""
        return self.first.body.dtype

    @property
    def claimed(self) -> Layout | None:
        """The layout that the placements claim on the lowest rank; None for a plain tensor."""
        return self.first.layout

    @cached_property
    def distinct(self) -> list[Shard]:
        """One shard for each claim and each shape of a part, by rank, rising."""
        if isinstance(self.shards, LazyShards):
            return self.shards.distinct()
        shards: dict[tuple[int, tuple[int, ...]], Shard] = {}
        for shard in self.shards.values():
            shards.setdefault((id(shard.layout), shard.body.local_shape), shard)
        return list(shards.values())

    @cached_property
    def claims(self) -> dict[Layout | None, tuple[int, ...]]:
        """Ranks by claimed layout; several keys if ranks disagree or meshes are disjoint."""
        if isinstance(self.shards, LazyShards):
            return self.shards.claims()
        groups = ranks_by((rank, shard.layout) for rank, shard in self.shards.items())
        return {layout: tuple(ranks) for layout, ranks in groups.items()}


def whole_values(dump: Dump, tensor: Tensor, name: str) -> NDArray[np.float64]:
    """Return a tensor's values, each from the lowest rank that has it; NaN if no rank does.

    Returns:
        Them in the shape in which the claimed regions count; the lowest rank's own of a plain tensor.

    Raises:
        DumpError: The dump does not have the values, or a rank does not have the shape that it claims.
    """
    return values_and_places(dump, tensor, name)[0]


def values_and_places(dump: Dump, tensor: Tensor, name: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return a tensor's whole values, and which of them any rank of the dump has.

    Raises:
        DumpError: The dump does not have the values, or a rank does not have the shape that it claims.
    """
    shape = tensor.claimed.index_shape if tensor.claimed else tensor.shape
    whole, has = np.full(shape, np.nan), np.zeros(shape, dtype=bool)
    for rank, shard in reversed(list(tensor.shards.items())):
        values = dump.values(shard, name)
        if shard.layout is None:
            whole, has = values, np.ones(values.shape, dtype=bool)
            continue
        region = shard.layout.region_of_rank(rank)
        if region.shape != values.shape:
            own_shape, claimed = list(values.shape), list(region.shape)
            raise DumpError(f"{printable(name)}: rank {rank} has a shape of {own_shape}, but claims {claimed}")
        if not region.is_within(shape):
            raise DumpError(f"{printable(name)}: rank {rank} claims a part that lies outside {list(shape)}")
        places = region.flat_ids(shape)
        whole.ravel()[places], has.ravel()[places] = values, True
    return whole, has


def shape_before(dump: Dump, tensor: Tensor, name: str) -> tuple[int, ...]:
    """Return a tensor's global shape; a plain one's is its weight's before sharding.

    A plain tensor that doesn't have the local shape of its stamped weight keeps its own shape.

    Args:
        tensor: The tensor, or the fold that it is in.
        name: Its name; that of an optimizer's state begins with its weight's.
    """
    weight = name.rpartition(".")[0] if tensor.role == "optim" else name
    stamp = dump.stamps.get(weight)
    stamped = dump.stamped.get(weight) if tensor.claimed is None else None
    is_alike = stamped is not None and stamped.first.body.local_shape == tensor.first.body.local_shape
    return stamp.shape if stamp is not None and is_alike else tensor.shape


SEGMENTS = (1, 2, 3)
"""Numbers of fused segments of which a part has its share: one, gate and up, or q, k and v."""

ROLES = ("param", "buffer", "grad", "optim")


@dataclass(frozen=True, slots=True)
class ExtendedLayout:
    """A hand-cut part's layout, and the layout of the whole that it extends to.

    Attributes:
        part: The layout that the part's placements claim.
        whole: The layout of the whole tensor; None if no layout gives ranks what they hold.
    """

    part: Layout
    whole: Layout | None


def with_whole_layouts(tensors: list[Tensor], stamps: Sequence[Stamp]) -> list[Tensor]:
    """Extend the layouts of hand-cut parts to layouts of the whole tensor, where ids allow it."""
    if not any(shard.layout is not None and shard.layout.own_axes for tensor in tensors for shard in tensor.distinct):
        return tensors
    shapes = {stamp.name: stamp.shape for stamp in stamps}
    extended = dict(_extended_layouts(tensors, shapes))
    return [_with_whole_layout(tensor, extended) for tensor in tensors] if extended else tensors


def _extended_layouts(
    tensors: Sequence[Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, ExtendedLayout]]:
    """Yield the stamped tensors that ranks have parts of."""
    for tensor in tensors:
        layout = tensor.claimed
        shape = the_only({shapes.get(name) for name in tensor.names})
        if tensor.moment != "stamped" or shape is None or layout is None or not _is_of_part(layout, shape):
            continue
        held = {rank: shard.held for rank, shard in tensor.shards.items()}
        whole = next((candidate for candidate in _candidates(layout, shape) if _is_held(candidate, held)), None)
        if whole is not None or _are_parts(layout, held):
            yield from ((name, ExtendedLayout(layout, whole)) for name in tensor.names)


def _is_of_part(layout: Layout, shape: tuple[int, ...]) -> bool:
    is_smaller = all(length <= size for length, size in zip(layout.shape, shape, strict=False))
    is_part = is_smaller and layout.shape != shape and len(layout.shape) == len(shape)
    return bool(layout.own_axes) and layout.flat is None and is_part


def _candidates(layout: Layout, shape: tuple[int, ...]) -> Iterator[Layout]:
    """Yield the layouts of a whole tensor of which each rank's part is split as a layout says."""
    outside = [axis for axis in layout.mesh.axes if axis not in layout.own_axes and layout.mesh.axis_size(axis) > 1]
    if {*outside} & {*layout.split_axes}:
        return
    per_dim: list[list[Chain]] = [
        list(_chains(layout, outside, dim, size)) if size != layout.shape[dim] else [layout.chains[dim]]
        for dim, size in enumerate(shape)
    ]
    for chains in product(*per_dim):
        axes = [axis for chain in chains for axis in axes_in(chain)]
        if len({*axes}) == len(axes):
            yield replace(layout, shape=shape, chains=chains)


def _chains(layout: Layout, outside: Sequence[str], dim: int, size: int) -> Iterator[Chain]:
    splits = layout.chains[dim]
    for count in range(1, len(outside) + 1):
        for axes in permutations(outside, count):
            parts = layout.mesh.size_over(axes)
            if -(-size // parts) == layout.shape[dim]:
                for segments in SEGMENTS:
                    front: Chain = axes if segments == 1 else (segments, *axes)
                    yield (*front, JOIN, *splits) if splits and segments > 1 else (*front, *splits)


def _is_held(layout: Layout, held: Mapping[int, Region | None]) -> bool:
    regions = dict(layout.regions())
    return all(
        region is not None and rank in regions and (region == regions[rank] or region.size == regions[rank].size == 0)
        for rank, region in held.items()
    )


def _are_parts(layout: Layout, held: Mapping[int, Region | None]) -> bool:
    """Whether the ranks at each place of the other axes hold one part, split as a layout says."""
    mesh, regions = layout.mesh, dict(layout.regions())
    parts: dict[object, list[NDArray[np.int64]]] = {}
    for rank, region in held.items():
        if region is None or rank not in regions:
            return False
        if not region.size and not regions[rank].size:
            continue
        coord = zip(mesh.axes, mesh.coord_of(rank), strict=True)
        outside = tuple(at for axis, at in coord if axis not in layout.own_axes)
        if outside not in parts:
            parts[outside] = [np.full(size, -1) for size in layout.shape]
        for places, claimed, ranges in zip(parts[outside], regions[rank].dims, region.dims, strict=True):
            at, elements = indices(claimed), indices(ranges)
            if len(at) != len(elements) or np.any((places[at] != elements) & (places[at] >= 0)):
                return False
            places[at] = elements
    is_complete = all(np.all(places >= 0) for part in parts.values() for places in part)
    return len(parts) > 1 and (is_complete or len(held) < mesh.size)


def _with_whole_layout(tensor: Tensor, extended: Mapping[str, ExtendedLayout]) -> Tensor:
    """Return a tensor with the layout of the whole instead of that of its hand-cut part.

    If no layout assigns the parts to ranks they become plain: nothing claims which part a rank has.
    """
    names = {name.rpartition(".")[0] if tensor.role == "optim" else name for name in tensor.names}
    claimed = tensor.claimed
    if tensor.role not in ROLES or claimed is None or not names <= extended.keys():
        return tensor
    layouts, *others = {extended[name] for name in names}
    part_layout = layouts.part
    if others or (claimed.shape, claimed.own_axes, claimed.mesh) != (
        part_layout.shape,
        part_layout.own_axes,
        part_layout.mesh,
    ):
        return tensor
    if layouts.whole is None:
        return replace(tensor, shards={rank: _plain_shard(shard) for rank, shard in tensor.shards.items()})
    whole = _with_own_splits(claimed, part_layout, layouts.whole)
    if whole is None:
        return tensor
    return replace(tensor, shards={rank: _whole_shard(shard, whole) for rank, shard in tensor.shards.items()})


def _with_own_splits(claimed: Layout, part_layout: Layout, whole: Layout) -> Layout | None:
    """Return the whole's layout with its parts split as the tensor's own placements claim."""
    outside = [chain[: len(chain) - len(split)] for chain, split in zip(whole.chains, part_layout.chains, strict=True)]
    chains = tuple((*front, *split) for front, split in zip(outside, claimed.chains, strict=True))
    try:
        return replace(whole, chains=chains, partial=claimed.partial)
    except LayoutError:  # an axis of the cut is pending as well
        return None


def _plain_shard(shard: Shard) -> Shard:
    return replace(shard, layout=None, body=structs.replace(shard.body, layout=None, shape=shard.body.local_shape))


def _whole_shard(shard: Shard, layout: Layout) -> Shard:
    return replace(shard, layout=layout, body=structs.replace(shard.body, shape=layout.shape))
