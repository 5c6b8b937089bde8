"""A reference's tensors by the model's names, and the ids of their elements."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import torch

from shardviz.checkpoint.maps.families import numbers_beside
from shardviz.checkpoint.maps.language import names_in, rules_of
from shardviz.checkpoint.maps.matching import MapResult, apply, named_tensors, turn_rules
from shardviz.dump.records.tensors import Stamp
from shardviz.errors import DumpError
from shardviz.live.capture.agreement import of_all_ranks, raise_together
from shardviz.reference.files import Entry, Reference, open_reference
from shardviz.reference.names import matched, refuse_strangers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from shardviz.dump.records.base import Role
    from shardviz.live.capture.locals import Local

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
    """

    stamps: Mapping[str, Stamp]
    entries: Mapping[str, Entry]
    not_checked: tuple[tuple[str, str], ...] = ()
    is_stamped: bool = False


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
        reference: What values are compared with.
        lookups: The model's tensors by name.
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
        else:
            stamps[name] = _stamp(name, tensor, stamps, first)
            entries[name] = stored
            first = max(first, stamps[name].last + 1)
    if lookups and not entries and not strangers and all("no tensor of" in why for _, why in unknown):
        refuse_strangers(list(known_as.values()), reference.entries, reference.path.name, matching.open)
    return Known(stamps, entries, tuple(unknown))


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
    return f"{path} has {list(stored.shape)}, the model {list(tensor.shape)}{_padding(tensor.shape, stored.shape)}"


def _padding(shape: tuple[int, ...], saved: tuple[int, ...]) -> str:
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
