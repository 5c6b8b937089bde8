"""Where a plain activation is: the placements that fit its values on every rank, beside the unsharded model's.

A module between tensor-parallel ones puts out plain tensors, of which nothing says how they are split; a DTensor on a
sub-mesh says nothing of the batch's axes. The unsharded model's step has the whole of each; a rank's part is compared
with every part that chunking could give it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import torch

from shardviz.layout import Layout
from shardviz.live import gather
from shardviz.placements import Placement, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardviz.live.locals import Local
    from shardviz.mesh import Mesh

MAX_CANDIDATES = 1 << 10
"""Of a mesh and a tensor with more ways to be split than this, none is looked for."""

TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-4}
"""How far rounding in a dtype may take an activation from the reference, relative and absolute; else 1e-9."""


def placed(locals_: Mapping[str, Local], wholes: Mapping[str, Local], mesh: Mesh, rank: int) -> list[Local]:
    """Give activations that do not say where they are the claim that fits on every rank that has them.

    Every rank calls this; the stages of a pipeline have activations of their own.

    Args:
        locals_: This rank's activations by module.
        wholes: The unsharded model's.
        mesh: The run's mesh.
        rank: This rank.

    Returns:
        The activations; those that no placement fits everywhere claim nothing but the whole's shape.
    """
    fitting = {
        name: list(_fitting(local, wholes[name].values, mesh, rank))
        for name, local in locals_.items()
        if name in wholes and (local.claim is None or local.shape != wholes[name].shape)
    }
    of_all = gather.of_all_ranks(fitting)
    return [_claimed(local, fitting.get(name, []), of_all, wholes, mesh) for name, local in locals_.items()]


Placements = tuple[Placement, ...]


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


def _fitting(local: Local, whole: torch.Tensor, mesh: Mesh, rank: int) -> Iterator[Placements]:
    """Yield the placements under which this rank would hold what it does, those with the fewest splits first."""
    kinds: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(whole.ndim))]
    if local.values.ndim != whole.ndim or len(kinds) ** mesh.ndim > MAX_CANDIDATES:
        return
    candidates = sorted(product(kinds, repeat=mesh.ndim), key=lambda one: sum(isinstance(p, Shard) for p in one))
    for placements in candidates:
        region = Layout.from_placements(mesh, tuple(whole.shape), placements).region(mesh.coord_of(rank))
        if region.shape == tuple(local.values.shape):
            ids = torch.from_numpy(region.flat_ids(tuple(whole.shape)))
            if _near(local.values, whole.flatten()[ids.to(whole.device)]):
                yield placements


def _near(one: torch.Tensor, other: torch.Tensor) -> bool:
    close = TOLERANCE.get(one.dtype, 1e-9)
    return bool(torch.allclose(one.double(), other.double(), rtol=close, atol=close))
