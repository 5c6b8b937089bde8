"""Infer the layout of plain activations: the placements that fit the unsharded model's values on every rank.

A module between tensor-parallel ones returns plain tensors without placements, and a DTensor on a sub-mesh lacks the
batch's axes. The unsharded model's step has every activation whole, so a rank's part is compared with every part that
chunking could give it. An activation that no part fits may be a term of a sum: ranks exchange the first few of these,
and those that add up to a part along an axis are pending there.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import torch

from shardviz.layout.layout import Layout
from shardviz.layout.placements import Partial, Placement, Replicate, Shard
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.stamp import dtype_name
from shardviz.relate.tolerance import ELEMENT, EXACT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardviz.layout.mesh import Mesh
    from shardviz.live.capture.locals import Local

MAX_CANDIDATES = 1 << 10
"""If a tensor could be split over the mesh in more ways than this, its placements are not searched for."""

MAX_SUMMED = 4
"""At most this many activations that no part fits are tried as terms of a sum."""

MAX_ELEMENTS = 1 << 16
"""Activations with more elements are not exchanged."""

MAX_WHOLE = 1 << 20
"""Of the unsharded model's activations that no part fits, as many as these elements are written down."""


def placed(locals_: Mapping[str, Local], wholes: Mapping[str, Local], mesh: Mesh, rank: int) -> list[Local]:
    """Give activations without placements the claim that fits on every rank that has them.

    Every rank calls this; the stages of a pipeline have different activations.

    Args:
        locals_: This rank's activations by module.
        wholes: The unsharded model's.
        mesh: The run's mesh.
        rank: This rank.

    Returns:
        The activations; if no placements fit on every rank, an activation claims only the whole's shape.
    """
    fitting = {
        name: list(_fitting(local.values, wholes[name].values, mesh, rank))
        for name, local in locals_.items()
        if name in wholes and (local.claim is None or local.shape != wholes[name].shape)
    }
    of_all = of_all_ranks(fitting)
    found = {name: _claimed(local, fitting.get(name, []), of_all, wholes, mesh) for name, local in locals_.items()}
    odd = [local for name, local in found.items() if name in fitting and local.claim is None]
    small = {local.name: local.values.cpu() for local in odd if local.values.numel() <= MAX_ELEMENTS}
    found |= _pending(found, dict(list(small.items())[:MAX_SUMMED]), wholes, mesh)
    return list(found.values())


def wholes_of_odd(found: list[Local], wholes: Mapping[str, Local]) -> Iterator[Local]:
    """Yield the unsharded model's activations of modules whose outputs no placements fit, the first of them."""
    elements = 0
    for local in found:
        whole = wholes.get(local.name)
        if whole is not None and local.claim is None:
            elements += whole.values.numel()
            if elements > MAX_WHOLE:
                return
            yield replace(whole, claim=None, grad=None)


Placements = tuple[Placement, ...]


def _pending(
    found: Mapping[str, Local], mine: Mapping[str, torch.Tensor], wholes: Mapping[str, Local], mesh: Mesh
) -> dict[str, Local]:
    """Return the activations that are terms of a sum along one axis, with that claim. Every rank calls this."""
    of_all = dict(enumerate(of_all_ranks(dict(mine))))
    pending = {}
    for name in mine:
        terms = {rank: values[name] for rank, values in of_all.items() if name in values and rank in mesh}
        for axis in mesh.axes:
            placements = _of_sum(terms, axis, wholes[name].values.cpu(), mesh)
            if placements is not None:
                pending[name] = replace(found[name], shape=wholes[name].shape, claim=(mesh, placements))
                break
    return pending


def _of_sum(terms: Mapping[int, torch.Tensor], axis: str, whole: torch.Tensor, mesh: Mesh) -> Placements | None:
    """Return the placements of terms whose sum along an axis is the right part on every rank."""
    groups = {rank: mesh.group_of(rank, axis) for rank in terms}
    at = mesh.axis_index(axis)
    fitting: list[set[Placements]] = []
    for rank, group in groups.items():
        if len(group) < 2 or not all(other in terms and terms[other].shape == terms[rank].shape for other in group):
            return None
        total = torch.stack([terms[other] for other in group]).sum(0)
        fitting.append({one for one in _fitting(total, whole, mesh, rank) if isinstance(one[at], Replicate)})
    for placements in sorted(set.intersection(*fitting), key=_num_splits) if fitting else ():
        return (*placements[:at], Partial("sum"), *placements[at + 1 :])
    return None


def _num_splits(placements: Placements) -> int:
    return sum(isinstance(one, Shard) for one in placements)


def _claimed(
    local: Local,
    fitting: list[Placements],
    of_all: list[dict[str, list[Placements]]],
    wholes: Mapping[str, Local],
    mesh: Mesh,
) -> Local:
    for placements in fitting:
        if all(placements in of_rank[local.name] for of_rank in of_all if local.name in of_rank):
            return replace(local, shape=wholes[local.name].shape, claim=(mesh, placements))
    whole = wholes.get(local.name)
    return replace(local, shape=whole.shape) if whole is not None and local.claim is None else local


def _fitting(values: torch.Tensor, whole: torch.Tensor, mesh: Mesh, rank: int) -> Iterator[Placements]:
    """Yield the placements that give this rank the values that it holds, fewest splits first."""
    kinds: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(whole.ndim))]
    if values.ndim != whole.ndim or len(kinds) ** mesh.ndim > MAX_CANDIDATES:
        return
    for placements in sorted(product(kinds, repeat=mesh.ndim), key=_num_splits):
        region = Layout.from_placements(mesh, tuple(whole.shape), placements).region(mesh.coord_of(rank))
        if region.shape == tuple(values.shape):
            ids = torch.from_numpy(region.flat_ids(tuple(whole.shape)))
            if _near(values, whole.flatten()[ids.to(whole.device)]):
                yield placements


def _near(one: torch.Tensor, other: torch.Tensor) -> bool:
    close = ELEMENT.get(dtype_name(one.dtype), EXACT)
    return bool(torch.allclose(one.double(), other.double(), rtol=close, atol=close))
