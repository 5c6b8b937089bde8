"""Ids of unstamped weights: their values, found in a reference. No weight is touched.

A reference's tensors are known by the model's names. Each rank reads the slice that it claims and compares bits; only
if they differ is the content looked for, in the tensor of that name first and then in those of its shape.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from shardviz.checkpoint.maps.families import numbers_beside
from shardviz.checkpoint.maps.language import names_in, rules_of
from shardviz.checkpoint.maps.mapped_tensors import MappedTensor, has_padding, padding_of
from shardviz.checkpoint.maps.matching import MapResult, apply, named_tensors, turn_rules
from shardviz.dump.arrays import ID_NONE
from shardviz.dump.records.tensors import Stamp
from shardviz.errors import DumpError
from shardviz.layout.layout import Layout
from shardviz.layout.placements import Replicate
from shardviz.layout.region import Region
from shardviz.live.capture.agreement import in_a_line, of_all_ranks, raise_together
from shardviz.live.capture.meshes import without_axes
from shardviz.live.capture.stamp import bits_of_tensor, dtype_name, from_bits
from shardviz.reference.files import Entry, Reference, open_reference
from shardviz.reference.lookup import UNPLACED, has_windows_of, locate, place_single_values
from shardviz.reference.names import matched, refuse_strangers
from shardviz.relate.values import is_alike, part_of
from shardviz.stamping.fill import Fill, looks_filled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from shardviz.dump.records.base import Role
    from shardviz.layout.mesh import Mesh
    from shardviz.live.capture.capture import Capture
    from shardviz.live.claims.local import Local

Sift: TypeAlias = "Callable[[Mapping[str, NDArray[np.int64] | None]], Mapping[str, str]]"
"""Given this rank's tensors by name, without empty shards, each with its ids or None if all is as claimed, says
which are not to be checked, and why. Every rank calls it."""


@dataclass(frozen=True)
class ComparedWith:
    """What a model's values are compared with.

    Attributes:
        reference: The checkpoint.
        names: Its names by pattern over the model's.
        sift: Says which tensors it does not cover after all.
        notes: What is not known, each with its tensor; none if it is about the run as a whole.
        tied: Names that shared storage before the model was sharded.
        unwritten: Parameters whose memory nothing has written to since it was allocated.
        replaced: Parameters of which an optimizer has the tensor from before sharding, and none has the model's own.
        skipped: Parameters that a load with strict=False left as they were, with the key that had their values; with
            their own name if the load was into copies that are gone.
        moments: The states of this rank's optimizer that are compared, too.
    """

    reference: Reference
    names: Mapping[str, str]
    sift: Sift | None = None
    notes: tuple[tuple[str, str], ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    unwritten: frozenset[str] = frozenset()
    replaced: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    moments: tuple[Local, ...] = ()


@dataclass(frozen=True)
class Known:
    """The tensors of a model that a reference has.

    Attributes:
        stamps: The ids that stand for their elements, by the model's names.
        entries: What the reference has of them; a fill if the model was stamped.
        not_checked: Names that it does not have, or in another shape, and why.
        is_stamped: Whether all of its values are of fills.
        shapes: The shapes that it has of tensors whose own are others.
    """

    stamps: Mapping[str, Stamp]
    entries: Mapping[str, Entry]
    not_checked: tuple[tuple[str, str], ...] = ()
    is_stamped: bool = False
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Wanted:
    """A tensor of the model that is looked up.

    Attributes:
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
        tied: The groups of names that share storage on this rank.
    """
    groups = {name: group for group in tied for name in group}
    local_tensors_here = {
        local.name: Wanted(
            local.role,
            local.shape,
            tuple(tied_name for tied_name in groups.get(local.name, ()) if tied_name != local.name),
        )
        for local in locals_
    }
    return {name: wanted for of_rank in of_all_ranks(local_tensors_here) for name, wanted in of_rank.items()}


def known_in(
    reference: Reference, lookups: Mapping[str, Wanted], names: Mapping[str, str], *, strangers: bool = False
) -> Known:
    """Look up a model's tensors in a reference; a missing one is looked up by its tied names.

    Args:
        names: A map, if the reference has other names, or tensors that the model's are made of: `name: expression`.
        strangers: Whether it may have none of them.

    Raises:
        ShardvizError: It has none of them and should, or a pattern fits none.
    """
    mapped = _map_names(reference, lookups, names)
    known_as = {name: mapped.known_as.get(name, name) for name in lookups}
    matching = matched([known for name, known in known_as.items() if name not in mapped.made], reference.entries)
    entry_of = {stored_name: reference.entries[known] for stored_name, known in matching.names.items()}
    if matching.before and torch.distributed.get_rank() == 0:
        print(f"shardviz: the model's tensors are {matching.before}* in {reference.path.name}", file=sys.stderr)
    stamps: dict[str, Stamp] = {}
    entries: dict[str, Entry] = {}
    unknown: list[tuple[str, str]] = []
    shapes: dict[str, tuple[int, ...]] = {}
    first = 1
    for name, tensor in lookups.items():
        candidates = (
            mapped.made.get(candidate) or entry_of.get(known_as.get(candidate, candidate))
            for candidate in (name, *tensor.tied)
        )
        stored = next((entry for entry in candidates if entry is not None), None)
        why = _why_not(name, tensor, stored, known_as[name], reference, mapped.lacking.get(name))
        if stored is None or why:
            unknown.append((name, f"where its elements are: {why}"))
            shapes |= {name: stored.shape} if stored is not None else {}
        else:
            stamps[name] = _stamp(name, tensor, stamps, first)
            entries[name] = stored
            first = max(first, stamps[name].last + 1)
    if lookups and not entries and not strangers and all("no tensor of" in why for _, why in unknown):
        refuse_strangers(list(known_as.values()), reference.entries, reference.path.name, matching.open)
    return Known(stamps, entries, tuple(unknown), shapes=shapes)


def _why_not(
    name: str, tensor: Wanted, stored: Entry | None, known_as: str, reference: Reference, lacking: str | None
) -> str:
    """Return why a tensor cannot be looked up; empty if it can."""
    path = reference.path.name
    if stored is None:
        called = f"{known_as}, as the map has it" if known_as != name else "this name"
        return lacking or reference.why.get(name, f"{path} has no tensor of {called}")
    if stored.shape == tensor.shape:
        return ""
    sides = f"{list(stored.shape)} in {path}, {list(tensor.shape)} in the model"
    return f"its shape is {sides}{_padding_hint(tensor.shape, stored.shape)}"


def _padding_hint(shape: tuple[int, ...], saved: tuple[int, ...]) -> str:
    """Return what to do if shapes differ as by padding; empty if they differ otherwise."""
    odd = [dim for dim, (size, saved_size) in enumerate(zip(shape, saved, strict=False)) if size != saved_size]
    if len(shape) != len(saved) or len(odd) != 1:
        return ""
    short, long = sorted((shape[odd[0]], saved[odd[0]]))
    if long >= 2 * short:  # rather parts that were joined, or a rank's part
        return ""
    dim = f", {odd[0]}" if odd[0] else ""
    line = f"x = pad(x, {long}{dim})" if shape[odd[0]] == long else f"x = slice(x, 0, {short}{dim})"
    beyond = f"what is beyond the first {short:,} indices of dim {odd[0]}"
    return f"; if {beyond} is padding, a map's line for it, `{line}`, has the rest checked"


def _stamp(name: str, tensor: Wanted, stamps: Mapping[str, Stamp], first: int) -> Stamp:
    """Return a tensor's ids: those of one that it is tied to, or new ones."""
    role: Role = tensor.role if tensor.role in ("buffer", "optim") else "param"
    same = next(
        (
            stamps[tied_name]
            for tied_name in tensor.tied
            if tied_name in stamps and stamps[tied_name].shape == tensor.shape
        ),
        None,
    )
    return Stamp(name, same.first if same else first, tensor.shape, role, same.name if same else "")


def _map_names(reference: Reference, lookups: Mapping[str, Wanted], names: Mapping[str, str]) -> MapResult:
    """Return what a map says of a model's tensors, whichever side of it has their names."""
    rules = rules_of(names, "the map")
    patterns = [name for rule in rules for name in (rule.left, *names_in(rule.right))]
    right = named_tensors(str(reference.path), reference.entries, patterns)
    model_side = turn_rules(rules, lookups, right.tensors)
    folder = reference.path if reference.path.is_dir() else reference.path.parent
    return apply(
        model_side, named_tensors("the model", lookups, patterns), right, numbers_beside([folder]), strict=False
    )


ALIKE = "all of its values are equal, as in a new LayerNorm, so any order of its elements looks right"
"""Why the order of a constant tensor is not checked, unless every rank has all of it."""


def as_copies(locals_: Sequence[Local], mesh: Mesh, stage_axes: Sequence[str]) -> list[Local]:
    """Label plain tensors as replicas along all axes of the mesh but those of pipeline stages.

    Beside a reference a plain tensor of the whole shape has only one right content on every rank.

    Args:
        locals_: What this rank holds, each of the shape that it has in the reference.
        stage_axes: The axes along which ranks have different layers.
    """
    copies = mesh, (Replicate(),) * mesh.ndim
    claim = without_axes(copies, stage_axes, torch.distributed.get_rank())
    return [local if local.claim or local.flat else replace(local, claim=claim) for local in locals_]


def add_by_reference(capture: Capture, locals_: Sequence[Local], sources: Known, sift: Sift | None = None) -> None:
    """Write down where the elements of this rank's tensors belong. Every rank calls this.

    Args:
        sift: Says which tensors it does not cover after all.
    """
    capture.not_checked += sources.not_checked
    locals_ = [_as_known(local, sources) for local in locals_]
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


def _as_known(local: Local, sources: Known) -> Local:
    """Return a plain tensor with the shape of the whole that it may be a part of."""
    stamp = sources.stamps.get(local.name)
    return local if stamp is None or local.claim or local.flat else replace(local, shape=stamp.shape)


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
