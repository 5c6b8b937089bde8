"""Weights drawn or loaded after sharding, from which the unsharded step must start too.

The ranks' parts are put together here, by the layout that they claim, and never by torch's own collectives. What was
only moved, repeated, zeroed, scaled or rounded by the sharding is still the same weight: the step has to show that.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

import torch

from shardviz.layout.layout import FlatView, Layout
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.claims.registry import local_tensors, unwrapped

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from shardviz.layout.mesh import Mesh
    from shardviz.live.claims.local import Local

SAME_DIRECTION = 0.95
"""Weights whose cosine with the built ones is above this were scaled or rounded, not drawn."""

FEW = 8
"""Of fewer elements than this a cosine says nothing."""

Part = tuple[torch.Tensor, torch.Tensor]
"""The places of elements in the whole tensor, counted row-major, and their values."""


def drawn_after_sharding(model: nn.Module, built: nn.Module, mesh: Mesh, rank: int) -> dict[str, torch.Tensor]:
    """Return parameters with new values since the build, whole, by name. Every rank calls this."""
    wholes = {local.name: local for local in local_tensors(built) if local.role == "param"}
    locals_ = [
        local for local in local_tensors(unwrapped(model), mesh) if local.name in wholes and local.role == "param"
    ]
    shards = {local.name: shard for local in locals_ if (shard := _part(local, wholes[local.name], rank)) is not None}
    changed = {name for name, (at, values) in shards.items() if not _is_built(wholes[name], at, values)}
    names = set.union(*of_all_ranks(changed))
    of_all = of_all_ranks({name: part for name, part in shards.items() if name in names}) if names else []
    gathered: dict[str, torch.Tensor] = {}
    for name in sorted(names):
        whole = _join_parts([parts[name] for parts in of_all if name in parts], wholes[name])
        if whole is not None:
            gathered[name] = whole
    drawn = {name for name, whole in gathered.items() if _is_drawn(whole, wholes[name].values)}
    # A vector may be too uniform to tell whether it was drawn again.
    small = {name for name, whole in gathered.items() if whole.ndim < 2 and bool(whole.isfinite().all())}
    return {name: whole for name, whole in gathered.items() if name in drawn or (drawn and name in small)}


def repeating(built: nn.Module, mesh: Mesh) -> dict[str, Local]:
    """Return copies of a built model's tensors whose possible shards repeat each other.

    So do experts that were copied from one network: that shards of them are alike says nothing of who drew them.
    """
    counts = {math.prod(sizes) for many in range(1, mesh.ndim + 1) for sizes in combinations(mesh.shape, many)} - {1}
    return {
        local.name: replace(local, values=_copyable(local.values.detach()).clone().view(local.values.dtype))
        for local in local_tensors(built)
        if not local.values.is_meta and any(_repeats(local.values, count) for count in counts)
    }


def _repeats(values: torch.Tensor, count: int) -> bool:
    """Whether the second of so many parts of a dim begins as the first does."""
    starts = ((dim, -(-size // count)) for dim, size in enumerate(values.shape))
    pairs = (tuple(values.select(dim, place) for place in (0, at)) for dim, at in starts if at < values.shape[dim])
    return any(torch.equal(_bytes(first), _bytes(second)) for first, second in pairs)


def as_built(model: nn.Module, wholes: Mapping[str, Local], mesh: Mesh, rank: int) -> list[str]:
    """Return a sharded model's tensors whose part on this rank is as it was built."""
    names = []
    for local in local_tensors(unwrapped(model), mesh) if wholes else ():
        shard = _part(local, wholes[local.name], rank) if local.name in wholes else None
        if shard is not None and _is_built(wholes[local.name], *shard):
            names.append(local.name)
    return names


def load(model: nn.Module, values: Mapping[str, torch.Tensor]) -> nn.Module:
    """Write values into an unsharded model, and return it."""
    with torch.no_grad():
        for local in local_tensors(model) if values else ():
            if local.name in values:
                local.values.copy_(values[local.name])
    return model


def _part(local: Local, whole: Local, rank: int) -> Part | None:
    """Return this rank's part of a parameter; None if its place in the whole is not known."""
    if local.values.is_meta or local.shape != whole.shape:
        return None
    if local.claim is None:
        if local.values.shape != whole.values.shape:
            return None
        return torch.arange(local.values.numel()), local.values.detach().cpu().flatten()
    mesh, placements = local.claim
    view = None if local.flat is None else FlatView(local.flat[0].shape, local.flat[0].offset)
    layout = Layout.from_placements(mesh, local.claimed_shape, placements, view)
    region = layout.region_of_rank(rank)
    if layout.partial or region.shape != tuple(local.values.shape):
        return None
    ids = region.flat_ids(layout.index_shape)
    return torch.from_numpy(ids).flatten(), local.values.detach().cpu().flatten()


def _is_built(whole: Local, at: torch.Tensor, values: torch.Tensor) -> bool:
    return torch.equal(_bytes(whole.values)[at], _bytes(values.to(whole.values.dtype)))


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of every element, a row each: float8 and others have no `equal`."""
    return _copyable(values.detach().cpu()).contiguous().flatten().unsqueeze(-1).view(torch.uint8)


def _copyable(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a dtype of one byte, and others as they are: torch 2.9.1 copies no float4."""
    return values.view(torch.uint8) if values.dtype.itemsize == 1 else values


def _join_parts(parts: Sequence[Part], whole: Local) -> torch.Tensor | None:
    """Return the whole tensor; None if copies differ or elements are missing."""
    values = torch.zeros(whole.values.numel(), dtype=whole.values.dtype)
    is_there = torch.zeros(whole.values.numel(), dtype=torch.bool)
    for at, held in parts:
        overlap = is_there[at]
        if not torch.equal(values[at][overlap], held.to(values.dtype)[overlap]):
            return None
        values[at] = held.to(values.dtype)
        is_there[at] = True
    return values.reshape(whole.values.shape) if bool(is_there.all()) else None


def _is_drawn(new: torch.Tensor, built: torch.Tensor) -> bool:
    """Whether values are neither the built ones in other places, nor these scaled or rounded."""
    new, old = new.flatten().double(), built.detach().cpu().flatten().double()
    if new.numel() < FEW or not bool(new.isfinite().all()) or not bool(new.any()):
        return False
    if bool(torch.isin(new, old).any()):
        return False
    cosine = float(new @ old / (new.norm() * old.norm()).clamp_min(1e-30))
    return abs(cosine) < SAME_DIRECTION
