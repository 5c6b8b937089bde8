"""Parts that code cuts by hand and a library splits again: placements on its own mesh say how, but not of which part.

A module of a tensor-parallel rank holds the rank's columns as its whole weight, and `fully_shard` splits those over dp.
The DTensor's mesh does not have tp, so its placements claim nothing along tp, and its shape is that of the part. What
part it is, the ids say: the layout is extended by the axes that the mesh does not have.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations, product
from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs

from shardviz.layout.layout import JOIN
from shardviz.layout.region import indices

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


def with_whole_layouts(tensors: list[Tensor], stamps: Sequence[Stamp]) -> list[Tensor]:
    """Return tensors with the layouts of parts extended to layouts of the whole tensor, where the ids say of which."""
    if not any(shard.layout is not None and shard.layout.own_axes for tensor in tensors for shard in tensor.distinct):
        return tensors
    shapes = {stamp.name: stamp.shape for stamp in stamps}
    extended = dict(_extended(tensors, shapes))
    return [_of_whole(tensor, extended) for tensor in tensors] if extended else tensors


def _extended(tensors: Sequence[Tensor], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Layout | None]]:
    """Yield the stamped tensors that ranks have parts of, with the layout of the whole; None if no layout fits them."""
    for tensor in tensors:
        layout = tensor.claimed
        whole = {shapes.get(name) for name in tensor.names}
        shape = whole.pop() if len(whole) == 1 else None
        if tensor.moment != "stamped" or shape is None or layout is None or not _is_of_part(layout, shape):
            continue
        held = {rank: shard.held for rank, shard in tensor.shards.items()}
        whole_layout = next((one for one in _candidates(layout, shape) if _is_held(one, held)), None)
        if whole_layout is not None or _are_parts(layout, held):
            yield from ((name, whole_layout) for name in tensor.names)


def _is_of_part(layout: Layout, shape: tuple[int, ...]) -> bool:
    is_smaller = all(own <= size for own, size in zip(layout.shape, shape, strict=False))
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
        links = [link for chain in chains for link in chain if isinstance(link, str) and link != JOIN]
        if len({*links}) == len(links):
            yield replace(layout, shape=shape, chains=chains)


def _chains(layout: Layout, outside: Sequence[str], dim: int, size: int) -> Iterator[Chain]:
    own = layout.chains[dim]
    for count in range(1, len(outside) + 1):
        for axes in permutations(outside, count):
            parts = math.prod(layout.mesh.axis_size(axis) for axis in axes)
            if -(-size // parts) == layout.shape[dim]:
                for segments in SEGMENTS:
                    front: Chain = axes if segments == 1 else (segments, *axes)
                    yield (*front, JOIN, *own) if own and segments > 1 else (*front, *own)


def _is_held(layout: Layout, held: Mapping[int, Region | None]) -> bool:
    mesh = layout.mesh
    return all(rank in mesh and layout.region(mesh.coord_of(rank)) == own for rank, own in held.items())


def _are_parts(layout: Layout, held: Mapping[int, Region | None]) -> bool:
    """Whether ranks that share their place on all other axes hold one part of the whole, split as a layout says."""
    mesh = layout.mesh
    parts: dict[object, list[NDArray[np.int64]]] = {}
    for rank, region in held.items():
        if region is None or rank not in mesh:
            return False
        coord = mesh.coord_of(rank)
        outside = tuple(at for axis, at in zip(mesh.axes, coord, strict=True) if axis not in layout.own_axes)
        part = parts.setdefault(outside, [np.full(size, -1) for size in layout.shape])
        for places, claimed, own in zip(part, layout.region(coord).dims, region.dims, strict=True):
            at, indices_held = indices(claimed), indices(own)
            if len(at) != len(indices_held) or np.any((places[at] != indices_held) & (places[at] >= 0)):
                return False
            places[at] = indices_held
    return len(parts) > 1 and all(np.all(places >= 0) for part in parts.values() for places in part)


def _of_whole(tensor: Tensor, extended: Mapping[str, Layout | None]) -> Tensor:
    """Return a tensor, its gradient or a state with the layout of the whole, if its own is that of the part.

    Parts that no layout gives to ranks are plain: nothing is claimed of which part a rank has.
    """
    names = {name.rpartition(".")[0] if tensor.role == "optim" else name for name in tensor.names}
    own = tensor.claimed
    if tensor.role not in ROLES or own is None or not own.own_axes or not names <= extended.keys():
        return tensor
    layout, *others = {extended[name] for name in names}
    if others:
        return tensor
    if layout is None:
        return replace(tensor, shards={rank: _plain_shard(shard) for rank, shard in tensor.shards.items()})
    is_same = len(own.chains) == len(layout.chains) and own.own_axes == layout.own_axes
    if not is_same or not all(_ends_with(chain, part) for chain, part in zip(layout.chains, own.chains, strict=True)):
        return tensor
    whole = replace(layout, partial=own.partial)
    return replace(tensor, shards={rank: _whole_shard(shard, whole) for rank, shard in tensor.shards.items()})


def _ends_with(chain: Chain, part: Chain) -> bool:
    return chain[len(chain) - len(part) :] == part


def _plain_shard(shard: Shard) -> Shard:
    return replace(shard, layout=None, body=structs.replace(shard.body, layout=None, shape=shard.body.local_shape))


def _whole_shard(shard: Shard, layout: Layout) -> Shard:
    return replace(shard, layout=layout, body=structs.replace(shard.body, shape=layout.shape))
