"""Ids of weights that nobody stamped: the values themselves, looked up in a reference. No weight is touched.

Each rank reads the slice that it claims and compares bits; only where they differ is the content looked for, in the
tensor of that name first and then in those of its shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from shardviz.dump.dump import ID_NONE
from shardviz.dump.records import Stamp
from shardviz.layout.layout import Layout
from shardviz.layout.placements import Replicate
from shardviz.layout.region import Region
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.meshes import without_axes
from shardviz.reference.lookup import UNPLACED, bits_of, has_windows_of, is_alike, locate, read_region
from shardviz.reference.names import refuse_strangers, renamed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.dump.records import Role
    from shardviz.layout.mesh import Mesh
    from shardviz.live.capture.capture import Capture
    from shardviz.live.capture.locals import Local
    from shardviz.reference.files import Entry, Reference

ALIKE = "where its elements are: all of its values are alike"
"""Why the order of a constant tensor is not checked, unless every rank has all of it."""

Sift: TypeAlias = "Callable[[Mapping[str, NDArray[np.int64] | None]], Mapping[str, str]]"
"""Given this rank's tensors by name, each with its ids or None where all is as claimed, says which are not to be
checked, and why. Every rank calls it."""

_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(frozen=True)
class Known:
    """The tensors of a model that a reference has.

    Attributes:
        stamps: The ids that stand for their elements, by the model's names.
        entries: What the reference has of them.
        not_checked: Names that it does not have, or in another shape, and why.
    """

    stamps: Mapping[str, Stamp]
    entries: Mapping[str, Entry]
    not_checked: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Wanted:
    """A tensor of the model that is looked up.

    Attributes:
        role: Its role.
        shape: Its global shape.
        tied: The other names that share its storage.
    """

    role: Role
    shape: tuple[int, ...]
    tied: tuple[str, ...] = ()


def wanted_of(locals_: Iterable[Local], tied: Iterable[tuple[str, ...]]) -> dict[str, Wanted]:
    """Return what is to be looked up, of all ranks together. Every rank calls this.

    Args:
        locals_: This rank's tensors.
        tied: The groups of names that share storage on this rank.
    """
    groups = {name: group for group in tied for name in group}
    mine = {
        local.name: Wanted(
            local.role, local.shape, tuple(one for one in groups.get(local.name, ()) if one != local.name)
        )
        for local in locals_
    }
    return {name: wanted for of_rank in of_all_ranks(mine) for name, wanted in of_rank.items()}


def known_in(reference: Reference, wanted: Mapping[str, Wanted], names: Mapping[str, str]) -> Known:
    """Return what a reference knows of a model's tensors. One that it lacks is looked up as one that it is tied to.

    Args:
        reference: What values are compared with.
        wanted: The model's tensors by name.
        names: The reference's names where they differ, by pattern over the model's.

    Raises:
        ShardvizError: It has none of them, or a pattern fits none.
    """
    known_as = renamed(wanted, names)
    stamps: dict[str, Stamp] = {}
    entries: dict[str, Entry] = {}
    unknown: list[tuple[str, str]] = []
    first, path = 1, reference.path.name
    for name, one in wanted.items():
        found = {other: reference.find(known_as.get(other, other)) for other in (name, *one.tied)}
        entry = next((entry for entry in found.values() if entry is not None), None)
        same = next((stamps[other] for other in one.tied if other in stamps and stamps[other].shape == one.shape), None)
        if entry is None:
            called = f"{known_as[name]}, as reference_names has it" if known_as[name] != name else "this name"
            why = reference.why.get(name, f"{path} has no tensor of {called}")
            unknown.append((name, f"where its elements are: {why}"))
        elif entry.shape != one.shape:
            what = f"{path} has {list(entry.shape)}, the model {list(one.shape)}"
            unknown.append((name, f"where its elements are: {what}"))
        else:
            role: Role = "buffer" if one.role == "buffer" else "param"
            stamps[name] = Stamp(name, same.first if same else first, one.shape, role, same.name if same else "")
            entries[name] = entry
            first += 0 if same else math.prod(one.shape)
    if wanted and not entries and all("no tensor of" in why for _, why in unknown):
        refuse_strangers(list(known_as.values()), reference.entries, path)
    return Known(stamps, entries, tuple(unknown))


def as_copies(locals_: Sequence[Local], mesh: Mesh, stage_axes: Sequence[str]) -> list[Local]:
    """Return the tensors, plain ones labelled as copies along all axes of the mesh but those of pipeline stages.

    Beside a reference a plain tensor of the whole shape has only one right content on every rank.

    Args:
        locals_: What this rank holds, each of the shape that it has in the reference.
        mesh: The job's mesh.
        stage_axes: The axes along which ranks have different layers.
    """
    copies = mesh, (Replicate(),) * mesh.ndim
    claim = without_axes(copies, stage_axes, torch.distributed.get_rank())
    return [local if local.claim or local.flat else replace(local, claim=claim) for local in locals_]


def add_by_reference(seen: Capture, locals_: Sequence[Local], known: Known, sift: Sift | None = None) -> None:
    """Write down where the elements of this rank's tensors belong. Every rank calls this.

    Args:
        seen: What this rank has to say.
        locals_: What it holds.
        known: What the reference knows of them.
        sift: Says of which tensors it knows nothing after all.
    """
    seen.not_checked += known.not_checked
    compared = [local for local in locals_ if local.name in known.entries and not local.values.is_meta]
    places = {local.name: _place(local, known) for local in compared}
    not_known = sift({name: ids for name, (ids, _) in places.items()}) if sift else {}
    for local in compared:
        ids, claimed = places[local.name]
        if local.name in not_known:
            seen.not_checked.append((local.name, not_known[local.name]))
        elif ids is not None:
            seen.add_ids(local, ids)
        elif claimed is None:
            seen.not_checked.append((local.name, ALIKE))
        else:
            seen.add_region(local, claimed)


def _place(local: Local, known: Known) -> tuple[NDArray[np.int64] | None, Region | None]:
    """Return a shard's ids, or the region that it claims where it is that; neither where all values are alike."""
    entry, bits = known.entries[local.name], _local_bits(local.values)
    shape = (math.prod(local.shape),) if local.flat else local.shape
    claimed = _claimed(local, shape)
    if claimed is None or claimed.shape != bits.shape or not _is_slice(local, bits, entry, claimed, shape):
        return _ids(local, bits, entry, known, claimed), None
    if bits.shape != shape and bits.size and is_alike(bits) and is_alike(entry.bits):
        return None, None
    return None, claimed


def _is_slice(local: Local, bits: NDArray[np.generic], entry: Entry, claimed: Region, shape: tuple[int, ...]) -> bool:
    """Whether a shard is what it claims to be: the usual case, which reads the rank's own slice only."""
    own = _cast(read_region(entry.bits.reshape(shape), claimed), entry.dtype, local.values.dtype)
    return np.array_equal(own, bits)


def _ids(
    local: Local, bits: NDArray[np.generic], entry: Entry, known: Known, claimed: Region | None
) -> NDArray[np.int64]:
    """Return the ids of a shard's elements, other tensors' where they are theirs."""
    shape = (math.prod(local.shape),) if local.flat else local.shape
    first, dtype = known.stamps[local.name].first, local.values.dtype
    places = locate(bits, _cast(entry.bits.reshape(shape), entry.dtype, dtype), claimed)
    ids = np.where(places == UNPLACED, ID_NONE, places + first - 1)
    for name, other in known.entries.items() if (ids == ID_NONE).any() else ():
        if name != local.name and other.shape == entry.shape:
            of_other = _cast(other.bits.reshape(shape), other.dtype, dtype)
            if has_windows_of(bits, of_other):
                places = locate(bits, of_other, singly=False)
                found = (ids == ID_NONE) & (places != UNPLACED)
                ids = np.where(found, places + known.stamps[name].first - 1, ids)
    return np.where((ids == ID_NONE) & (bits == 0), 0, ids)


def _claimed(local: Local, shape: tuple[int, ...]) -> Region | None:
    """Return the part that this rank claims; all of it for a plain tensor of the whole shape."""
    if local.claim is None:
        return Region.whole(shape) if tuple(local.values.shape) == shape else None
    mesh, placements = local.claim
    rank = torch.distributed.get_rank()
    if rank not in mesh or any(type(one).__name__ == "Partial" for one in placements):
        return None
    region = Layout.from_placements(mesh, local.claimed_shape, placements).region(mesh.coord_of(rank))
    return _own_stretch(region, local.flat[0].offset, shape[0]) if local.flat else region


def _own_stretch(region: Region, offset: int, size: int) -> Region:
    """Return a parameter's own part of what a rank claims of FSDP1's concatenation."""
    cut = ((max(start - offset, 0), min(stop - offset, size)) for start, stop in region.dims[0])
    return Region((tuple((start, stop) for start, stop in cut if start < stop),))


def _local_bits(values: torch.Tensor) -> NDArray[np.generic]:
    flat = values.detach().cpu().contiguous()
    if flat.ndim == 0:
        return bits_of(flat.view(1).view(_int_type(flat.element_size())).numpy()).reshape(())
    return bits_of(flat.view(_int_type(flat.element_size())).numpy()).reshape(flat.shape)


def _cast(bits: NDArray[np.generic], dtype: str, to: torch.dtype) -> NDArray[np.generic]:
    """Return a reference's bits in another element type, as `Tensor.to` rounds them."""
    own = getattr(torch, dtype, None)
    if own == to or own is None:
        return bits
    signed = np.array(bits, order="C").view(_SIGNED[bits.itemsize])  # torch warns of what it may not write to
    values = torch.from_numpy(signed.reshape(-1)).view(own).to(to)
    return bits_of(values.view(_int_type(values.element_size())).numpy()).reshape(bits.shape)


def _int_type(size: int) -> torch.dtype:
    return {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
