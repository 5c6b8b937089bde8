"""Whether a step's loss, gradients or weights may differ from the unsharded model's: only then are lines looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from shardviz.layout.layout import Layout
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.compat import quiet_redistribution

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.live.capture.locals import Local


def differ(
    held: Sequence[Local], wanted: Sequence[Local], losses: tuple[torch.Tensor, torch.Tensor], rank: int, near: float
) -> bool:
    """Return whether anything may differ on any rank. Every rank calls this.

    What cannot be laid out here, such as a flat parameter, is taken to be equal, and what was cut by hand may be any
    part: this asks whether to look, and the judge decides.

    Args:
        held: This rank's gradients, states and weights.
        wanted: The unsharded model's.
        losses: This rank's loss, and the unsharded model's.
        rank: This rank.
        near: By how much of the largest number anything may be off.
    """
    by_name = {(local.role, local.name): local for local in wanted}
    pairs = [(local, by_name.get((local.role, local.name))) for local in held]
    is_here = any(whole is not None and _differs(local, whole, rank, near) for local, whole in pairs)
    with quiet_redistribution():
        own = losses[0].full_tensor() if isinstance(losses[0], DTensor) else losses[0]
    of_all = of_all_ranks((is_here, float(own)))
    mean, loss = sum(number for _, number in of_all) / len(of_all), float(losses[1])
    return any(here for here, _ in of_all) or not abs(mean - loss) <= near * max(abs(loss), 1e-30)


def _differs(local: Local, whole: Local, rank: int, near: float) -> bool:
    if local.flat or local.values.is_meta or not local.values.is_floating_point() or not local.values.numel():
        return False
    expected, held = whole.values.detach(), local.values.detach()
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    if local.claim is not None:
        mesh, placements = local.claim
        layout = Layout.from_placements(mesh, local.claimed_shape, placements)
        if layout.partial or layout.shape != tuple(expected.shape):
            return False
        for dim, ranges in enumerate(layout.region(mesh.coord_of(rank)).dims):
            expected = torch.cat([expected.narrow(dim, begin, end - begin) for begin, end in ranges], dim)
    held = held.to(expected.device)
    parts = [expected] if expected.shape == held.shape else _parts(expected, held.shape)
    return bool(parts) and not any(float((held - part).abs().max()) <= near * largest for part in parts)


def _parts(whole: torch.Tensor, shape: torch.Size) -> Sequence[torch.Tensor]:
    """Return the equal parts of a tensor that have some shape, if one dim alone was cut by hand; else none."""
    dims = [dim for dim in range(whole.ndim) if whole.shape[dim] != shape[dim]] if whole.ndim == len(shape) else []
    if len(dims) != 1 or not shape[dims[0]] or whole.shape[dims[0]] % shape[dims[0]]:
        return ()
    return torch.split(whole, shape[dims[0]], dims[0])
