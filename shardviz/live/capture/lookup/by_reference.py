"""Ids of weights that nobody stamped: the values themselves, looked up in a reference. No weight is touched.

Each rank reads the slice that it claims and compares bits; only where they differ is the content looked for, in the
tensor of that name first and then in those of its shape.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from shardviz.checkpoint.maps.inverse import towards
from shardviz.checkpoint.maps.language import names_in, rules_of
from shardviz.checkpoint.maps.matching import apply, named
from shardviz.checkpoint.maps.settings import numbers_beside
from shardviz.dump.ids import ID_NONE
from shardviz.dump.records import Stamp
from shardviz.errors import DumpError
from shardviz.layout.layout import Layout
from shardviz.layout.placements import Replicate
from shardviz.layout.region import Region
from shardviz.live.capture.agreement import in_a_line, of_all_ranks, raise_together
from shardviz.live.capture.meshes import without_axes
from shardviz.live.capture.stamp import bits_of_tensor, dtype_name, from_bits
from shardviz.reference.files import open_reference
from shardviz.reference.lookup import has_windows_of, is_alike, locate, read_region
from shardviz.reference.names import matched, refuse_strangers
from shardviz.reference.singly import singly
from shardviz.reference.windows import UNPLACED
from shardviz.stamping.fill import Fill, looks_filled

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from shardviz.checkpoint.maps.matching import Mapped
    from shardviz.dump.records import Role
    from shardviz.layout.mesh import Mesh
    from shardviz.live.capture.capture import Capture
    from shardviz.live.capture.locals import Local
    from shardviz.reference.files import Entry, Reference
    from shardviz.reference.names import Matching

ALIKE = "where its elements are: all of its values are alike"
"""Why the order of a constant tensor is not checked, unless every rank has all of it."""

Sift: TypeAlias = "Callable[[Mapping[str, NDArray[np.int64] | None]], Mapping[str, str]]"
"""Given this rank's tensors by name, without empty shards, each with its ids or None where all is as claimed, says
which are not to be checked, and why. Every rank calls it."""


@dataclass(frozen=True)
class Known:
    """The tensors of a model that a reference has.

    Attributes:
        stamps: The ids that stand for their elements, by the model's names.
        entries: What the reference has of them; a fill where the model was stamped.
        not_checked: Names that it does not have, or in another shape, and why.
        is_stamped: Whether all of its values are of fills.
    """

    stamps: Mapping[str, Stamp]
    entries: Mapping[str, Entry]
    not_checked: tuple[tuple[str, str], ...] = ()
    is_stamped: bool = False

    def without_notes_on(self, names: Collection[str]) -> Known:
        """Return it with nothing to say of some tensors: of buffers that every rank computes, copies are compared."""
        return replace(self, not_checked=tuple(pair for pair in self.not_checked if pair[0] not in names))


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


def opened(path: str | Path) -> Reference:
    """Open a reference on every rank. Every rank calls this.

    Raises:
        ShardvizError: A rank cannot open it; every rank raises it.
    """
    reference, error = None, None
    try:
        reference = open_reference(path)
    except DumpError as refused:
        error = refused
    raise_together(error)
    assert reference is not None, "where this rank has none, it has raised"
    return reference


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


def known_in(
    reference: Reference, wanted: Mapping[str, Wanted], names: Mapping[str, str], *, strangers: bool = False
) -> Known:
    """Return what a reference knows of a model's tensors. One that it lacks is looked up as one that it is tied to.

    Args:
        reference: What values are compared with.
        wanted: The model's tensors by name.
        names: A map, where the reference has other names, or tensors that the model's are made of: `name: expression`.
        strangers: Whether it may have none of them.

    Raises:
        ShardvizError: It has none of them and should, or a pattern fits none.
    """
    mapped = _mapped(reference, wanted, names)
    known_as = {name: mapped.known_as.get(name, name) for name in wanted}
    matching = matched([known for name, known in known_as.items() if name not in mapped.made], reference.entries)
    entry_of = {other: reference.entries[known] for other, known in matching.names.items()}
    _say_where(matching, reference.path.name)
    stamps: dict[str, Stamp] = {}
    entries: dict[str, Entry] = {}
    unknown: list[tuple[str, str]] = []
    first, path = 1, reference.path.name
    for name, one in wanted.items():
        found = {
            other: mapped.made.get(other) or entry_of.get(known_as.get(other, other)) for other in (name, *one.tied)
        }
        entry = next((entry for entry in found.values() if entry is not None), None)
        same = next((stamps[other] for other in one.tied if other in stamps and stamps[other].shape == one.shape), None)
        if entry is None:
            called = f"{known_as[name]}, as reference_names has it" if known_as[name] != name else "this name"
            why = mapped.lacking.get(name) or reference.why.get(name, f"{path} has no tensor of {called}")
            unknown.append((name, f"where its elements are: {why}"))
        elif entry.shape != one.shape:
            what = f"{path} has {list(entry.shape)}, the model {list(one.shape)}"
            unknown.append((name, f"where its elements are: {what}"))
        else:
            role: Role = "buffer" if one.role == "buffer" else "param"
            stamps[name] = Stamp(name, same.first if same else first, one.shape, role, same.name if same else "")
            entries[name] = entry
            first += 0 if same else math.prod(one.shape)
    if wanted and not entries and not strangers and all("no tensor of" in why for _, why in unknown):
        refuse_strangers(list(known_as.values()), reference.entries, path, matching.open)
    return Known(stamps, entries, tuple(unknown))


def _mapped(reference: Reference, wanted: Mapping[str, Wanted], names: Mapping[str, str]) -> Mapped:
    """Return what a map says of a model's tensors, whichever side of it has their names."""
    rules = rules_of(names, "reference_names")
    patterns = [name for rule in rules for name in (rule.left, *names_in(rule.right))]
    right = named(str(reference.path), reference.entries, patterns)
    own = towards(rules, wanted, right.tensors)
    folder = reference.path if reference.path.is_dir() else reference.path.parent
    return apply(own, named("the model", wanted, patterns), right, numbers_beside([folder]), strict=False)


def _say_where(matching: Matching, path: str) -> None:
    """Print, once in a job, under which beginning of its names a reference has the model."""
    if matching.before and torch.distributed.get_rank() == 0:
        print(f"shardviz: the model's tensors are {matching.before}* in {path}", file=sys.stderr)


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
        sift: Says which tensors it does not cover after all.
    """
    seen.not_checked += known.not_checked
    places: dict[str, tuple[NDArray[np.int64] | None, Region | None]] = {}
    for local in locals_:
        if local.name in known.entries and not local.values.is_meta:
            try:
                places[local.name] = place_of(local, known)
            except Exception as error:  # raised, it would leave the other ranks waiting for this one
                why = error.message if isinstance(error, DumpError) else in_a_line(error)
                seen.not_checked.append((local.name, f"where its elements are: {why}"))
    held = {local.name for local in locals_ if local.values.numel()}  # an empty shard is right, whatever it is of
    not_known = sift({name: ids for name, (ids, _) in places.items() if name in held}) if sift else {}
    for local in locals_:
        ids, claimed = places.get(local.name, (None, None))
        if local.name in not_known:
            seen.not_checked.append((local.name, not_known[local.name]))
        elif ids is not None:
            seen.add_ids(local, ids)
        elif claimed is not None:
            seen.add_region(local, claimed)
        elif local.name in places:
            seen.not_checked.append((local.name, ALIKE))


def is_as_claimed(local: Local, entry: Entry) -> bool:
    """Whether a shard has the values of the part of a tensor that it claims."""
    try:
        own = claimed_slice(local, entry)
    except (DumpError, OSError):  # not readable here: the look-up of the tensor says so
        return False
    return own is not None and np.array_equal(own, bits_of_tensor(local.values))


def claimed_slice(local: Local, entry: Entry) -> NDArray[np.generic] | None:
    """Return the bits that a tensor has where a shard claims to be; None where their shapes do not agree.

    Raises:
        DumpError: They cannot be read.
    """
    shape = (math.prod(local.shape),) if local.flat else local.shape
    claimed = claimed_region(local, shape) if entry.shape == local.shape else None
    if claimed is None or claimed.shape != tuple(local.values.shape):
        return None
    return _slice_of(local, entry, claimed, shape)


def place_of(local: Local, known: Known) -> tuple[NDArray[np.int64] | None, Region | None]:
    """Return a shard's ids, or the region that it claims where it is that; neither where all values are alike."""
    entry, bits = known.entries[local.name], bits_of_tensor(local.values)
    shape = (math.prod(local.shape),) if local.flat else local.shape
    claimed = claimed_region(local, shape)
    if claimed is None or not _is_slice(local, bits, entry, claimed, shape):
        return _ids(local, bits, entry, known, claimed), None
    if bits.shape != shape and bits.size and is_alike(bits) and is_alike(entry.bits):
        return None, None
    return None, claimed


def _is_slice(local: Local, bits: NDArray[np.generic], entry: Entry, claimed: Region, shape: tuple[int, ...]) -> bool:
    """Whether a shard is what it claims to be: the usual case, which reads the rank's own slice only."""
    return claimed.shape == bits.shape and np.array_equal(_slice_of(local, entry, claimed, shape), bits)


def _slice_of(local: Local, entry: Entry, claimed: Region, shape: tuple[int, ...]) -> NDArray[np.generic]:
    """Return a part of a tensor as bits of the shard's element type."""
    entry = replace(entry, shape=shape) if isinstance(entry, Fill) else entry
    own = entry.read(claimed) if entry.shape == shape else read_region(entry.bits.reshape(shape), claimed)
    return cast_bits(own, entry.dtype, local.values.dtype)


def _ids(
    local: Local, bits: NDArray[np.generic], entry: Entry, known: Known, claimed: Region | None
) -> NDArray[np.int64]:
    """Return the ids of a shard's elements, other tensors' where they are theirs."""
    shape = (math.prod(local.shape),) if local.flat else local.shape
    first, dtype = known.stamps[local.name].first, local.values.dtype
    whole = cast_bits(entry.bits.reshape(shape), entry.dtype, dtype)
    places = singly(bits, whole, locate(bits, whole, claimed))
    ids = np.where(places == UNPLACED, ID_NONE, places + first - 1)
    lost = bits[ids == ID_NONE]
    may_be_others = lost.size and (not known.is_stamped or looks_filled(lost, dtype_name(dtype)))
    for name, other in known.entries.items() if may_be_others else ():
        if name != local.name and other.shape == entry.shape:
            of_other = cast_bits(other.bits.reshape(shape), other.dtype, dtype)
            if has_windows_of(bits, of_other):
                places = locate(bits, of_other, singly=False)
                found = (ids == ID_NONE) & (places != UNPLACED)
                ids = np.where(found, places + known.stamps[name].first - 1, ids)
    if known.is_stamped and (ids == ID_NONE).all():
        return ids  # never loaded, be they zeros as those of a fresh bias or not
    return np.where((ids == ID_NONE) & (bits == 0), 0, ids)


def claimed_region(local: Local, shape: tuple[int, ...]) -> Region | None:
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


def cast_bits(bits: NDArray[Any], dtype: str, to: torch.dtype) -> NDArray[np.generic]:
    """Return a reference's bits in another element type, as `Tensor.to` rounds them."""
    own = getattr(torch, dtype, None)
    if own == to or own is None:
        return bits
    return bits_of_tensor(from_bits(bits, own).to(to))
