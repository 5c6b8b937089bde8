"""Buffers that ranks make again when the model is sharded, as slopes of their own heads, or statistics of a new module.

What is made of a count or a number has no ids of the filled model, or those of other tensors by chance. Which part a
rank has shows in its values: the one that the model had there before it was filled, by placements that fit all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from shardviz.layout.layout import placements_of
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.describe import ids_of
from shardviz.live.capture.stamp import is_readable
from shardviz.relate.tolerance import SINGLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardviz.dump.records.tensors import Stamp
    from shardviz.layout.mesh import Mesh
    from shardviz.layout.region import Region
    from shardviz.live.capture.stamp import Before
    from shardviz.live.claims.local import Local

NO_PART = (
    "the order of its elements: each rank makes it again when the model is sharded, in a different shape, and it is no "
    "part of what was built; a step compares what comes of it"
)
SAVED = (
    "the order of its elements: each rank makes it again when the model is sharded, as it was built; what a checkpoint "
    "had in it before would be lost"
)


class OwnBuffer(NamedTuple):
    """A buffer that was made again.

    Attributes:
        region: Which part of the buffer before this rank has; None if it is none.
        why: Why its place is not checked; empty if its values show it.
    """

    region: Region | None
    why: str


def own_buffers(
    before: Mapping[str, Before], locals_: Iterable[Local], stamps: Mapping[str, Stamp], mesh: Mesh, rank: int
) -> dict[str, OwnBuffer]:
    """Return the plain buffers of a filled model that were made again. Every rank calls this.

    They are the parts of the values before, or have another shape, numbers and no id of their own on all ranks. Zeros
    may be memory that nothing was written to.

    Args:
        before: The model's buffers before it was filled.
        stamps: Of those that were filled with ids.
    """
    here = {local.name: local.values.cpu() for local in locals_ if _is_plain_buffer(local, before)}
    fitting = {name: _fitting(before[name].values, values, mesh, rank) for name, values in here.items()}
    made = {name for name, values in here.items() if _has_no_id(values, before[name].values, stamps.get(name))}
    of_all = of_all_ranks({name: (set(regions), name in made) for name, regions in fitting.items()})
    own = {}
    for name, regions in fitting.items():
        of_ranks = [of_rank[name] for of_rank in of_all if name in of_rank]
        shared = set.intersection(*(placements for placements, _ in of_ranks))
        region = next((region for placements, region in regions.items() if placements in shared), None)
        if region is not None:
            own[name] = OwnBuffer(region, SAVED if before[name].is_saved else "")
        elif all(is_made for _, is_made in of_ranks):
            own[name] = OwnBuffer(None, NO_PART)
    return own


def _is_plain_buffer(local: Local, before: Mapping[str, Before]) -> bool:
    is_plain = local.role == "buffer" and local.claim is None and is_readable(local.values)
    return is_plain and local.name in before and local.values.ndim == before[local.name].values.ndim


def _fitting(whole: torch.Tensor, values: torch.Tensor, mesh: Mesh, rank: int) -> dict[tuple[str, ...], Region]:
    """Return the parts of a whole that a tensor has the values of, by the placements that give them to a rank."""
    shape = tuple(whole.shape)
    is_part: dict[Region, bool] = {}  # axes of one rank give the same part by several placements
    fitting = {}
    for placements, region in placements_of(shape, tuple(values.shape), mesh, rank):
        if region not in is_part:
            of_whole = whole
            for dim, ranges in enumerate(region.dims if values.shape != whole.shape else ()):
                of_whole = torch.cat([of_whole.narrow(dim, start, stop - start) for start, stop in ranges], dim)
            is_part[region] = _is_equal(of_whole, values)
        if is_part[region]:
            fitting[tuple(map(str, placements))] = region
    return fitting


def _is_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.is_floating_point() != second.is_floating_point() or first.is_complex() != second.is_complex():
        return False
    if not first.is_floating_point():
        return torch.equal(first.long(), second.long()) if not first.is_complex() else torch.equal(first, second)
    return torch.allclose(first.double(), second.double(), rtol=SINGLE, atol=0, equal_nan=True)


def _has_no_id(values: torch.Tensor, whole: torch.Tensor, stamp: Stamp | None) -> bool:
    """Whether a tensor has another shape than the whole, numbers, and no id of the whole's elements."""
    if stamp is None or values.shape == whole.shape or not bool(values.any()):
        return False
    ids = ids_of(values, stamp.last)
    return not np.any((ids >= stamp.first) & (ids <= stamp.last))
