"""Buffers that ranks make again when the model is sharded, as slopes of their own heads, or statistics of a new module.

What is made of a count or a number has no ids of the filled model, or those of other tensors by chance. Which part a
rank has shows in the model's own values: the one that the built model has there, by placements that fit all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shardviz.layout.layout import placements_of
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.relate.tolerance import SINGLE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from shardviz.layout.mesh import Mesh
    from shardviz.layout.region import Region
    from shardviz.live.claims.local import Local

MAX_ELEMENTS = 1 << 24
"""Of a larger buffer no copy is kept, and no part is looked for."""

NO_PART = (
    "the order of its elements: each rank makes it again when the model is sharded, in a different shape, and it is no "
    "part of what was built; a step compares what comes of it"
)

SAVED = (
    "the order of its elements: each rank makes it again when the model is sharded, as it was built; what a checkpoint "
    "had in it before would be lost"
)


@dataclass(frozen=True)
class OwnBuffer:
    """What this rank made.

    Attributes:
        values: Its numbers, which do not depend on what the model was filled with.
        region: Which part of the built buffer that is; None if it is none.
        is_saved: Whether checkpoints have it.
    """

    values: torch.Tensor
    region: Region | None
    is_saved: bool

    @property
    def why_unplaced(self) -> str:
        """Why no place of it is checked; empty if its values show the place."""
        return NO_PART if self.region is None else SAVED if self.is_saved else ""

    def is_in(self, local: Local) -> bool:
        """Whether a tensor of the filled model has these numbers."""
        return self.values.shape == local.values.shape and _is_equal(self.values, local.values.cpu())


def buffers_of(locals_: Iterable[Local]) -> dict[str, torch.Tensor]:
    """Return copies of a built model's buffers by name, without those of formats of eight bits or fewer."""
    buffers = (local for local in locals_ if local.role == "buffer" and _is_readable(local.values))
    return {local.name: local.values.cpu().clone() for local in buffers if 0 < local.values.numel() <= MAX_ELEMENTS}


def _is_readable(values: torch.Tensor) -> bool:
    is_narrow = values.is_floating_point() and values.dtype.itemsize == 1
    return values.layout == torch.strided and not (values.is_meta or values.is_quantized or is_narrow)


def own_buffers(
    built: Mapping[str, torch.Tensor], locals_: Iterable[Local], mesh: Mesh, rank: int, not_saved: Collection[str]
) -> dict[str, OwnBuffer]:
    """Return the plain buffers that are a part of what was built, or in a different shape. Every rank calls this.

    Memory of zeros that are no such part may never have been written, and is left out.

    Args:
        built: The built model's buffers by name.
        locals_: The sharded model's tensors.
        mesh: The run's mesh.
        rank: This rank.
        not_saved: The buffers that no checkpoint has.
    """
    here = {local.name: local.values.cpu() for local in locals_ if _is_own(local, built)}
    fitting: dict[str, dict[tuple[str, ...], Region]] = {}
    for name, values in here.items():
        shape = tuple(built[name].shape)
        fitting[name] = {
            tuple(map(str, placements)): region
            for placements, region in placements_of(shape, tuple(values.shape), mesh, rank)
            if _is_equal(built[name].flatten()[torch.from_numpy(region.flat_ids(shape))], values)
        }
    of_all = of_all_ranks({name: (set(regions), bool(here[name].any())) for name, regions in fitting.items()})
    own = {}
    for name, values in here.items():
        of_ranks = [of_rank[name] for of_rank in of_all if name in of_rank]
        shared = set.intersection(*(placements for placements, _ in of_ranks))
        region = next((region for placements, region in fitting[name].items() if placements in shared), None)
        is_written = values.shape != built[name].shape and all(has_numbers for _, has_numbers in of_ranks)
        if region is not None or is_written:
            own[name] = OwnBuffer(values.clone(), region, name not in not_saved)
    return own


def _is_own(local: Local, built: Mapping[str, torch.Tensor]) -> bool:
    is_plain = local.role == "buffer" and local.claim is None and _is_readable(local.values)
    return is_plain and local.name in built and local.values.ndim == built[local.name].ndim


def _is_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    if not first.is_floating_point():
        return torch.equal(first.reshape(second.shape), second)
    return torch.allclose(first.double().reshape(second.shape), second.double(), rtol=SINGLE, atol=0, equal_nan=True)
