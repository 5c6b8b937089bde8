"""Ids of unstamped weights: their values, found in a reference. No weight is touched.

Each rank reads the slice that it claims and compares bits; only if they differ is the content looked for, in the
tensor of that name first and then in those of its shape.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shardviz.checkpoint.maps.mapped_tensors import MappedTensor, has_padding, padding_of
from shardviz.dump.arrays import ID_NONE
from shardviz.errors import DumpError
from shardviz.layout.layout import Layout
from shardviz.layout.placements import Replicate
from shardviz.layout.region import Region
from shardviz.live.capture.agreement import in_a_line
from shardviz.live.capture.meshes import without_axes
from shardviz.live.capture.stamp import bits_of_tensor, dtype_name, from_bits
from shardviz.reference.lookup import UNPLACED, has_windows_of, locate, place_single_values
from shardviz.relate.values import is_alike, part_of
from shardviz.stamping.fill import Fill, looks_filled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardviz.layout.mesh import Mesh
    from shardviz.live.capture.capture import Capture
    from shardviz.live.capture.locals import Local
    from shardviz.live.capture.lookup.reference_tensors import Known, Sift
    from shardviz.reference.files import Entry

ALIKE = "all of its values are equal, as in a new LayerNorm, so any order of its elements looks right"
"""Why the order of a constant tensor is not checked, unless every rank has all of it."""


def as_copies(locals_: Sequence[Local], mesh: Mesh, stage_axes: Sequence[str]) -> list[Local]:
    """Label plain tensors as replicas along all axes of the mesh but those of pipeline stages.

    Beside a reference a plain tensor of the whole shape has only one right content on every rank.

    Args:
        locals_: What this rank holds, each of the shape that it has in the reference.
        mesh: The job's mesh.
        stage_axes: The axes along which ranks have different layers.
    """
    copies = mesh, (Replicate(),) * mesh.ndim
    claim = without_axes(copies, stage_axes, torch.distributed.get_rank())
    return [local if local.claim or local.flat else replace(local, claim=claim) for local in locals_]


def add_by_reference(capture: Capture, locals_: Sequence[Local], sources: Known, sift: Sift | None = None) -> None:
    """Write down where the elements of this rank's tensors belong. Every rank calls this.

    Args:
        capture: What this rank has to say.
        locals_: What it holds.
        sources: What the reference knows of them.
        sift: Says which tensors it does not cover after all.
    """
    capture.not_checked += sources.not_checked
    places: dict[str, tuple[NDArray[np.int64] | None, Region | None]] = {}
    for local in locals_:
        if local.name in sources.entries and not local.values.is_meta:
            try:
                places[local.name] = place_of(local, sources)
            except Exception as error:  # raised, it would leave the other ranks waiting for this one
                why = error.message if isinstance(error, DumpError) else in_a_line(error)
                capture.not_checked.append((local.name, f"where its elements are: {why}"))
    held = {local.name for local in locals_ if local.values.numel()}  # an empty shard is right, whatever it is of
    not_known = sift({name: ids for name, (ids, _) in places.items() if name in held}) if sift else {}
    for local in locals_:
        ids, claimed = places.get(local.name, (None, None))
        if local.name in not_known:
            capture.not_checked.append((local.name, not_known[local.name]))
        elif ids is not None:
            capture.add_ids(local, ids)
        elif claimed is not None:
            capture.add_region(local, claimed)
        elif local.name in places:
            capture.not_checked.append((local.name, ALIKE))


def is_as_claimed(local: Local, whole: Entry) -> bool:
    """Whether a shard has the values of the part of a tensor that it claims."""
    try:
        claimed = claimed_slice(local, whole)
    except (DumpError, OSError):  # not readable here: the look-up of the tensor says so
        return False
    return claimed is not None and np.array_equal(claimed, bits_of_tensor(local.values))


def claimed_slice(local: Local, whole: Entry) -> NDArray[np.generic] | None:
    """Return a tensor's bits at the place a shard claims; None if their shapes do not agree.

    Raises:
        DumpError: They cannot be read.
    """
    stored = stored_slice(local, whole)
    return None if stored is None else cast_bits(stored, whole.dtype, local.values.dtype)


def stored_slice(local: Local, whole: Entry) -> NDArray[np.generic] | None:
    """Return the same bits in the dtype that the tensor has."""
    shape = (math.prod(local.shape),) if local.flat else local.shape
    claimed = claimed_region(local, shape) if whole.shape == local.shape else None
    if claimed is None or claimed.shape != tuple(local.values.shape):
        return None
    return _part_of_entry(whole, claimed, shape)


def place_of(local: Local, sources: Known) -> tuple[NDArray[np.int64] | None, Region | None]:
    """Return a shard's ids, or its claimed region if it holds that; neither if all are equal."""
    whole, bits = sources.entries[local.name], bits_of_tensor(local.values)
    shape = (math.prod(local.shape),) if local.flat else local.shape
    claimed = claimed_region(local, shape)
    padding = _padding(local, whole, claimed)
    if claimed is None or not _is_slice(local, bits, whole, claimed, shape, padding):
        ids = _ids(local, bits, whole, sources, claimed)
        if claimed is not None and padding is not None:
            own_ids = claimed.flat_ids(shape) + sources.stamps[local.name].first
            ids = np.where(padding & (ids == ID_NONE), own_ids, ids)
        return ids, None
    if bits.shape != shape and bits.size and is_alike(bits) and is_alike(whole.bits):
        return None, None
    return None, claimed


def _padding(local: Local, whole: Entry, claimed: Region | None) -> NDArray[np.bool_] | None:
    """Return the elements of a shard that a map calls padding; None if there are none."""
    if not isinstance(whole, MappedTensor) or local.flat or not has_padding(whole.node):
        return None
    fits = claimed is not None and claimed.shape == tuple(local.values.shape)
    return padding_of(whole.node, claimed) if claimed is not None and fits else None


def _is_slice(
    local: Local,
    bits: NDArray[np.generic],
    whole: Entry,
    claimed: Region,
    shape: tuple[int, ...],
    padding: NDArray[np.bool_] | None,
) -> bool:
    """Whether a shard equals its claimed slice, which alone is read."""
    if claimed.shape != bits.shape:
        return False
    same = cast_bits(_part_of_entry(whole, claimed, shape), whole.dtype, local.values.dtype) == bits
    return bool((same if padding is None else same | padding).all())


def _part_of_entry(entry: Entry, claimed: Region, shape: tuple[int, ...]) -> NDArray[np.generic]:
    entry = replace(entry, shape=shape) if isinstance(entry, Fill) else entry
    return entry.read(claimed) if entry.shape == shape else part_of(entry.bits.reshape(shape), claimed)


def _ids(
    local: Local, bits: NDArray[np.generic], own_entry: Entry, sources: Known, claimed: Region | None
) -> NDArray[np.int64]:
    """Return the ids of a shard's elements, other tensors' where they are theirs."""
    shape = (math.prod(local.shape),) if local.flat else local.shape
    first, dtype = sources.stamps[local.name].first, local.values.dtype
    whole = cast_bits(own_entry.bits.reshape(shape), own_entry.dtype, dtype)
    places = place_single_values(bits, whole, locate(bits, whole, claimed))
    ids = np.where(places == UNPLACED, ID_NONE, places + first - 1)
    lost = bits[ids == ID_NONE]
    may_be_others = lost.size and (not sources.is_stamped or looks_filled(lost, dtype_name(dtype)))
    for name, stored in sources.entries.items() if may_be_others else ():
        if name != local.name and stored.shape == own_entry.shape:
            of_other = cast_bits(stored.bits.reshape(shape), stored.dtype, dtype)
            if has_windows_of(bits, of_other):
                places = locate(bits, of_other, singly=False)
                is_there = (ids == ID_NONE) & (places != UNPLACED)
                ids = np.where(is_there, places + sources.stamps[name].first - 1, ids)
    if sources.is_stamped and (ids == ID_NONE).all():
        return ids  # never loaded, be they zeros as those of a fresh bias or not
    return np.where((ids == ID_NONE) & (bits == 0), 0, ids)


def claimed_region(local: Local, shape: tuple[int, ...]) -> Region | None:
    """Return the part that this rank claims; all of it for a plain tensor of the whole shape."""
    if local.claim is None:
        return Region.whole(shape) if tuple(local.values.shape) == shape else None
    mesh, placements = local.claim
    rank = torch.distributed.get_rank()
    if rank not in mesh or any(type(placement).__name__ == "Partial" for placement in placements):
        return None
    region = Layout.from_placements(mesh, local.claimed_shape, placements).region_of_rank(rank)
    return _part_in_concatenation(region, local.flat[0].offset, shape[0]) if local.flat else region


def _part_in_concatenation(region: Region, offset: int, size: int) -> Region:
    """Return a parameter's own part of what a rank claims of FSDP1's concatenation."""
    cut = ((max(start - offset, 0), min(stop - offset, size)) for start, stop in region.dims[0])
    return Region((tuple((start, stop) for start, stop in cut if start < stop),))


def cast_bits(bits: NDArray[Any], dtype: str, to: torch.dtype) -> NDArray[np.generic]:
    """Return a reference's bits in another dtype, as `Tensor.to` rounds them."""
    reference_dtype = getattr(torch, dtype, None)
    if reference_dtype == to or reference_dtype is None:
        return bits
    return bits_of_tensor(from_bits(bits, reference_dtype).to(to))
