"""Weights cut by hand and split again by a library, whose mesh lacks the axis of the cut.

A module on a tensor-parallel rank holds the rank's columns as its whole weight, and `fully_shard` splits those over dp.
The DTensor's mesh has no tp, so its placements claim nothing along tp, and its shape is that of the columns. The ids
say which columns they are, and the layout is extended by the missing axes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs

from shardviz.errors import LayoutError
from shardviz.groups import the_only
from shardviz.layout.layout import JOIN
from shardviz.layout.region import indices
from shardviz.layout.splits import axes_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.dump.records.tensors import Stamp
    from shardviz.dump.tensor import Shard, Tensor
    from shardviz.layout.layout import Chain, Layout
    from shardviz.layout.region import Region

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
