"""Ids of weights that nobody stamped: the values themselves, looked up in a reference. No weight is touched.

Each rank reads the slice that it claims and compares bits; only where they differ is the content looked for, in the
tensor of that name first and then in those of its shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from shardviz.dump.dump import ID_NONE
from shardviz.dump.records import Stamp
from shardviz.layout.layout import Layout
from shardviz.layout.region import Region
from shardviz.reference.lookup import UNPLACED, bits_of, is_alike, locate, read_region

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.live.capture.capture import Capture
    from shardviz.live.capture.locals import Local
    from shardviz.reference.files import Entry, Reference

ALIKE = "where its elements are: all of its values are alike"
"""Why the order of a constant tensor is not checked, unless every rank has all of it."""

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


def known_in(reference: Reference, tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> Known:
    """Return what a reference knows of a model's tensors.

    Args:
        reference: What values are compared with.
        tensors: Name, role and global shape of each.
    """
    stamps: dict[str, Stamp] = {}
    entries: dict[str, Entry] = {}
    unknown: list[tuple[str, str]] = []
    first = 1
    for name, role, shape in tensors:
        entry = reference.find(name)
        if entry is None:
            unknown.append((name, f"where its elements are: {reference.path.name} has no tensor of this name"))
        elif entry.shape != shape:
            unknown.append(
                (
                    name,
                    f"where its elements are: {reference.path.name} has {list(entry.shape)}, the model {list(shape)}",
                )
            )
        else:
            stamps[name] = Stamp(name, first, shape, "buffer" if role == "buffer" else "param")
            entries[name] = entry
            first += math.prod(shape)
    return Known(stamps, entries, tuple(unknown))


def add_by_reference(seen: Capture, locals_: Sequence[Local], known: Known) -> None:
    """Write down where the elements of this rank's tensors belong.

    Args:
        seen: What this rank has to say.
        locals_: What it holds.
        known: What the reference knows of them.
    """
    seen.not_checked += known.not_checked
    for local in locals_:
        entry = known.entries.get(local.name)
        if entry is None or local.values.is_meta:
            continue
        bits = _local_bits(local.values)
        if is_alike(bits) and bits.size and bits.shape != local.claimed_shape:
            seen.not_checked.append((local.name, ALIKE))
            continue
        seen.add_ids(local, _ids(local, bits, entry, known))


def _ids(local: Local, bits: NDArray[np.generic], entry: Entry, known: Known) -> NDArray[np.int64]:
    """Return the ids of a shard's elements, other tensors' where they are theirs."""
    shape = (math.prod(local.shape),) if local.flat else local.shape
    first = known.stamps[local.name].first
    claimed = _claimed(local, shape)
    dtype = local.values.dtype
    if claimed is not None and claimed.shape == bits.shape:
        # The usual case reads the rank's own slice only.
        own = _cast(read_region(entry.bits.reshape(shape), claimed), entry.dtype, dtype)
        if np.array_equal(own, bits):
            return claimed.flat_ids(shape) + first
    places = locate(bits, _cast(entry.bits.reshape(shape), entry.dtype, dtype), claimed)
    ids = np.where(places == UNPLACED, ID_NONE, places + first - 1)
    for name, other in known.entries.items():
        if not (ids == ID_NONE).any():
            break
        if name != local.name and other.shape == entry.shape:
            places = locate(bits, _cast(other.bits.reshape(shape), other.dtype, dtype))
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
    flat = local.flat[0] if local.flat else None
    layout = Layout.from_placements(mesh, local.claimed_shape, placements)
    return None if flat else layout.region(mesh.coord_of(rank))


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
