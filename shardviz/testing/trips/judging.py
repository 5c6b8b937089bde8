"""Received tensors compared with the expected ones, and findings with their fix.

A rank has its own part, old values, rounded ones, zeros, another shape, another tensor's part, or something else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import distributed

from shardviz.check.report import grouped
from shardviz.checkpoint.comparing.equality import narrower
from shardviz.checkpoint.comparing.one_tensor.changes import values_changed
from shardviz.checkpoint.comparing.outcome import Outcome
from shardviz.checkpoint.records import MemoryTensor
from shardviz.explain.checkpoints.conversion import ForgottenFactor, NarrowedOnTheWay, PaddedParts
from shardviz.explain.testing.transfers import (
    ChangedInTransfer,
    EndNotWritten,
    FileOfAnotherRank,
    FusedCutOtherwise,
    MisplacedByTrip,
    PartialWrite,
    PartTakenForWhole,
    ReplacedDtype,
    SkippedKey,
    SkippedRanks,
    SkippedRole,
    StateByNumber,
    SwappedTensors,
    WriteIntoCopies,
)
from shardviz.groups import in_groups, the_only
from shardviz.layout.region import indices
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.lookup.by_reference import claimed_slice, stored_slice
from shardviz.live.capture.stamp import bits_of_tensor, dtype_name
from shardviz.reference.lookup import FEW_EQUAL
from shardviz.relate.tolerance import EPSILON, near_ratio
from shardviz.relate.values import is_alike, part_of
from shardviz.testing.assertions.message import in_words
from shardviz.testing.trips.contents import region_of
from shardviz.text import join_numbers, listed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from typing import Literal

    from numpy.typing import NDArray

    from shardviz.dump.records.base import Role
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding, Kind
    from shardviz.layout.region import Region
    from shardviz.live.claims.local import Local
    from shardviz.reference.files import Entry
    from shardviz.testing.trips.pieces import PaddedPart

    Fate = Literal["right", "kept", "rounded", "dtype", "zeros", "shape", "swapped", "other"]

NARROWER = {
    "float64": ("float32", "bfloat16", "float16"),
    "float32": ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"),
    "bfloat16": ("float8_e4m3fn", "float8_e5m2"),
    "float16": ("bfloat16", "float8_e4m3fn", "float8_e5m2"),
}
"""The dtypes through which values may have gone on their way, by the type that they have."""
MOST = 4
MOST_ROWS = 12
"""Tensors of one cause whose rows are listed one by one."""

MOST_IN_FULL = 8
"""Causes that are printed in full."""

WRONG = "wrong: "
"""What the clause with the ranks and rows of a finding begins with."""


@dataclass(frozen=True)
class TargetTensor:
    """The values that a tensor should have after a trip.

    Attributes:
        old: Returns what this rank had before; None if that is not known.
        dtype: The dtype that it must have; empty if it may have another, as an engine may.
        also: What it may have as well: that of a tensor which it shares its storage with here and did not there.
        padding: Which of its elements a map says are padding; None if it says so of none.
        padded: Returns how this rank's own part was padded, if a map pads the whole.
    """

    entry: Entry
    old: Callable[[], NDArray[Any] | None] | None = None
    dtype: str = ""
    also: tuple[Entry, ...] = ()
    padding: Callable[[], NDArray[np.bool_]] | None = None
    padded: Callable[[], PaddedPart | None] | None = None


@dataclass(frozen=True)
class PartOutcome:
    """What happened to one rank's part of a tensor.

    Attributes:
        fate: What became of it.
        rows: The rows that are wrong, counted in the whole tensor, as text; empty if all of the part is.
        why: The dtype that values went through, the shape that it has instead, the tensor whose part it has, or
            the number that all values equal; 0 if there is none.
        wrong: How many elements are wrong.
        size: How many it has.
        padded: How its own part was padded, if a map pads the whole; None if it was not.
        change: What was done to all of its values, and why; None if that is not one thing.
        dtype: The narrower dtype of the two sides that the change was seen in.
    """

    rank: int
    fate: Fate
    rows: str = ""
    why: str = ""
    wrong: int = 0
    size: int = 0
    padded: PaddedPart | None = None
    change: Outcome | None = None
    dtype: str = ""

    @property
    def text(self) -> str:
        """The rank and its wrong rows: `rank 3 rows 4-7`."""
        return f"rank {self.rank} {self.rows}".rstrip()


def part_received(local: Local, target: TargetTensor, rank: int) -> PartOutcome:
    """Return what became of this rank's part of a tensor."""
    if tuple(target.entry.shape) != local.shape:
        return PartOutcome(rank, "shape", why=f"{list(local.shape)}, not {list(target.entry.shape)}")
    dtype = dtype_name(local.values.dtype)
    if target.dtype and dtype != target.dtype:
        return PartOutcome(rank, "dtype", why=dtype, wrong=local.values.numel(), size=local.values.numel())
    got = bits_of_tensor(local.values)
    parts = [claimed_slice(local, entry) for entry in (target.entry, *target.also)]
    expected = parts[0]
    if expected is None:
        return PartOutcome(rank, "shape", why=f"{list(got.shape)} on this rank, which its placements do not give it")
    if any(one is not None and np.array_equal(one, got) for one in parts):
        return PartOutcome(rank, "right", size=got.size)
    wrong = expected != got
    region = region_of(local)
    if target.padding is not None and region is not None:
        wrong &= ~part_of(target.padding(), region)
    rows = rows_text(wrong, region) if region is not None and not local.flat else ""
    padded = target.padded() if target.padded is not None else None
    fate, why = _fate(local, target, got, wrong)
    expected_here, change = stored_slice(local, target.entry), None
    if fate in ("zeros", "other") and expected_here is not None:
        sides = MemoryTensor(local.name, target.entry.dtype, expected_here), MemoryTensor(local.name, dtype, got)
        outcome, through = Outcome(local.name, "", "other"), NARROWER.get(dtype, ())
        change = values_changed(outcome, *sides, ("what was sent", "it"), through)
    if change is not None and isinstance(cause := change.explanation, NarrowedOnTheWay):
        fate, why = "rounded", cause.narrow
    elif change is not None:
        fate, why = "other", ""
    narrow = narrower(dtype, target.entry.dtype) if change is not None else ""
    return PartOutcome(rank, fate, rows, why, int(wrong.sum()), got.size, padded, change, narrow)


def _fate(local: Local, target: TargetTensor, got: NDArray[Any], wrong: NDArray[np.bool_]) -> tuple[Fate, str]:
    old = target.old() if target.old is not None else None
    if local.values.dtype == torch.bool and not wrong.all():
        return "other", ""  # of two values one is the old one
    most = max(1.0, (1 - FEW_EQUAL) * int(wrong.sum()))  # of narrow values some are equal by chance
    if old is not None and old.shape == got.shape and int((old[wrong] == got[wrong]).sum()) >= most:
        return "kept", ""
    if not got[wrong].any():
        return "zeros", ""
    if got.size > 1 and is_alike(got) and wrong.all():
        return "zeros", f"{local.values.reshape(-1)[0].item():g}"
    return "other", ""


def rows_text(wrong: NDArray[np.bool_], region: Region) -> str:
    """Return a part's wrong rows in global indices, with columns if only some are wrong.

    Example:
        >>> from shardviz.layout.region import Region
        >>> rows_text(np.array([[False, True], [False, True]]), Region((((4, 6),), ((0, 2),))))
        'rows 4-5, columns 1'
    """
    if not wrong.ndim:
        return ""
    words = ("rows", "columns") if wrong.ndim == 2 else tuple(f"dim {dim} at" for dim in range(wrong.ndim))
    words = ("rows",) if wrong.ndim == 1 else words
    texts = []
    for dim, word in enumerate(words):
        others = tuple(other for other in range(wrong.ndim) if other != dim)
        hit = wrong.any(axis=others) if others else wrong
        if dim == 0 or not hit.all():
            texts.append(f"{word} {join_numbers(indices(region.dims[dim])[hit].tolist())}")
    return ", ".join(texts)


def parts_of_all(locals_: Mapping[str, Local], targets: Mapping[str, TargetTensor]) -> dict[str, list[PartOutcome]]:
    """Return the fate of every rank's part of every tensor. Every rank calls this."""
    rank = distributed.get_rank()
    own_parts = {name: part_received(local, targets[name], rank) for name, local in locals_.items() if name in targets}
    for name, rank_part in own_parts.items():
        if rank_part.fate == "other" and (whose := _owner(locals_[name], targets)):
            own_parts[name] = replace(rank_part, fate="swapped", why=whose)
    return in_groups((name, rank_part) for of_rank in of_all_ranks(own_parts) for name, rank_part in of_rank.items())


def _owner(local: Local, targets: Mapping[str, TargetTensor]) -> str:
    """Return the tensor whose part a rank has instead of its own; empty if there isn't one."""
    got = bits_of_tensor(local.values)
    for name, target in targets.items():
        if name != local.name and tuple(target.entry.shape) == local.shape:
            expected = claimed_slice(local, target.entry)
            if expected is not None and np.array_equal(expected, got):
                return name
    return ""


def with_parts(finding: Finding, parts: Sequence[PartOutcome]) -> Finding:
    """Return a finding of exactly the ranks whose parts are wrong, with the rows of each."""
    wrong = [part for part in parts if part.fate != "right"]
    where = listed((part.text for part in wrong), 4)
    return replace(finding, ranks=tuple(part.rank for part in wrong), details=(*finding.details, f"wrong: {where}"))


@dataclass(frozen=True)
class TransferOutcome:
    """What happened to every tensor.

    Attributes:
        parts: Every rank's part of each, by name.
        roles: Their roles.
        each: Those of which each rank has one of its own.
        trip: What should have written the values: `load`, `sync`.
        sender: Where they come from: `what was saved`, `the source`.
        trips: Where it went, in words: `saved on (fsdp=2, tp=2), loaded on (fsdp=4)`.
        padded: Those that a map pads.
    """

    parts: Mapping[str, Sequence[PartOutcome]]
    roles: Mapping[str, Role]
    each: Collection[str]
    trip: str
    sender: str
    trips: str = ""
    padded: Collection[str] = ()

    def wrong(self, *fates: str) -> dict[str, list[PartOutcome]]:
        """Return the parts with one of some fates, of the tensors that have any."""
        by_name = {name: [one for one in parts if one.fate in fates] for name, parts in self.parts.items()}
        return {name: parts for name, parts in by_name.items() if parts}

    def owner(self, name: str) -> str:
        """Return the tensor whose values all wrong parts have; empty if they share none."""
        wrong = [part for part in self.parts[name] if part.fate != "right"]
        return the_only({part.why if part.fate == "swapped" else "" for part in wrong}) or ""

    def is_padded(self, name: str) -> bool:
        """Whether ranks padded their own parts although a map pads the whole."""
        wrong = [part.padded for part in self.parts[name] if part.fate != "right"]
        return all(wrong) and any(padded.first for padded in wrong if padded)

    def change(self, name: str) -> Outcome | None:
        """Return the one change of all wrong parts' values, up to rounding; None if they changed differently."""
        wrong = [part for part in self.parts[name] if part.fate != "right"]
        are_alike = bool(wrong) and all(_are_changed_alike(wrong[0], part) for part in wrong)
        return wrong[0].change if are_alike else None

    @property
    def unplaced(self) -> list[str]:
        """The tensors whose wrong values are neither the old ones nor rounded: they may be others'."""
        explained = self.wrong("kept", "rounded", "dtype", "shape")
        wrong = self.wrong("other", "swapped")
        names = [name for name in wrong if name not in explained and name not in self.each and not self.owner(name)]
        return [name for name in names if not self.is_padded(name) and not self.change(name)]


def _are_changed_alike(part: PartOutcome, other: PartOutcome) -> bool:
    """Whether two parts' values were changed in one way: times one number, up to rounding, or by the same cause."""
    first, second = (side.change.explanation if side.change is not None else None for side in (part, other))
    if isinstance(first, ForgottenFactor) and isinstance(second, ForgottenFactor):
        near = 2 * near_ratio(EPSILON.get(part.dtype, 0.0))  # either number was measured
        return math.isclose(first.factor, second.factor, rel_tol=near)
    return first == second


def message_of(findings: Iterable[Finding]) -> str:
    """Return the text of findings, each cause once, with ranks and rows; empty without any."""
    return in_words(None, [_with_rows(one) for one in grouped(list(findings))], most=MOST_IN_FULL)


def _with_rows(finding: Finding) -> Finding:
    """Return the finding of several tensors with the rows of each of them."""
    wrong_of = {one.tensor: [text for text in one.details if text.startswith(WRONG)] for one in finding.members}
    rows = [(name, some[0].removeprefix(WRONG) if some else "") for name, some in wrong_of.items()]
    if len({text for _, text in rows}) < 2:
        return finding
    more = [f"{len(rows) - MOST_ROWS} more tensors"] if len(rows) > MOST_ROWS else []
    each = ", ".join([*(f"{name} {text}" for name, text in rows[:MOST_ROWS]), *more])
    others = (one for one in finding.details if not one.startswith(WRONG))
    return replace(finding, details=(f"{WRONG}{each}", *others))


def findings_of(received: TransferOutcome, placed: Sequence[Finding]) -> Iterator[Finding]:
    """Yield findings of received tensors.

    Args:
        placed: Where the elements are that the unplaced tensors have.
    """
    padded = [name for name in received.parts if received.is_padded(name)]
    for name in padded:
        yield _padded(received, name)
    received = replace(received, parts={name: parts for name, parts in received.parts.items() if name not in padded})
    old_parts, trip = received.wrong("kept"), received.trip
    for name, parts in old_parts.items():
        yield _finding_unwritten(received, name, parts)
    for name, parts in received.wrong("rounded").items():
        if name not in old_parts:
            text = f"its values were rounded to {parts[0].why} on the way on {_ranks_text(received, name, parts)}"
            yield _finding(NarrowedOnTheWay(parts[0].why, trip=trip), received, name, parts, text)
    for name, parts in received.wrong("dtype").items():
        text = f"its dtype changed to {parts[0].why} on {_ranks_text(received, name, parts)} in the {trip}"
        yield _finding(ReplacedDtype(trip), received, name, parts, text)
    for name, parts in received.wrong("shape").items():
        if name not in old_parts:
            text = f"its shape is {parts[0].why}, on {_ranks_text(received, name, parts)}"
            yield _finding(PartTakenForWhole(trip), received, name, parts, text)
    for name, parts in received.wrong("swapped").items():
        if whose := received.owner(name):
            text = f"it has the values of {whose} on {_ranks_text(received, name, parts)}"
            yield _finding(_why_swapped(received, name, whose), received, name, parts, text)
    explained = {finding.tensor for finding in placed} | {name for name in received.parts if received.owner(name)}
    for finding in placed:
        yield with_parts(_with_advice(finding, received), received.parts[finding.tensor])
    for name, parts in received.wrong("other", "zeros", "swapped").items():
        if name not in explained and name not in old_parts and name not in received.wrong("rounded", "dtype", "shape"):
            yield _finding_changed(received, name, parts)


def _ranks_text(received: TransferOutcome, name: str, parts: Sequence[PartOutcome]) -> str:
    return f"{len(parts):,} of {len(received.parts[name]):,} ranks"


def _finding(
    cause: Cause,
    received: TransferOutcome,
    name: str,
    parts: Sequence[PartOutcome],
    text: str,
    kind: Kind | None = None,
) -> Finding:
    """Return a finding with each rank's rows, and the kind that its cause has in a trip."""
    details = (f"{WRONG}{listed((part.text for part in parts), MOST)}", *([received.trips] if received.trips else []))
    return cause.finding(name, tuple(part.rank for part in parts), text, kind=kind, details=details)


def _padded(received: TransferOutcome, name: str) -> Finding:
    parts = [part for part in received.parts[name] if part.fate != "right"]
    padding = next(part.padded for part in parts if part.padded is not None and part.padded.first)
    what = "rows" if padding.dim == 0 else f"indices of dim {padding.dim}"
    text = f"each rank's own {what} are padded, {padding.size:,} and {padding.more:,} more; the map pads the whole"
    return _finding(PaddedParts(), received, name, parts, f"{text}: on {_ranks_text(received, name, parts)}")


def _finding_unwritten(received: TransferOutcome, name: str, parts: Sequence[PartOutcome]) -> Finding:
    count, size = sum(part.wrong for part in parts), sum(part.size for part in parts)
    much = "" if count == size else f"{count:,} of {size:,} elements of "
    where = _ranks_text(received, name, parts)
    text = f"the {received.trip} did not write {much}it on {where}: the old values are still there"
    return _finding(_why_kept(received, name, parts), received, name, parts, text)


def _why_kept(received: TransferOutcome, name: str, parts: Sequence[PartOutcome]) -> Cause:
    """Return the cause of old values: the whole trip, a rank, a kind of tensor or this one."""
    trip, old_parts, role = received.trip, received.wrong("kept"), received.roles[name]
    if any(part.wrong < part.size for part in parts):
        return PartialWrite(trip)
    if {part.rank for part in parts} < {part.rank for part in received.parts[name] if part.size}:
        return SkippedRanks(trip)
    if set(old_parts) >= set(received.parts):
        return WriteIntoCopies(trip)
    same = [other for other in received.parts if received.roles[other] == role]
    if len(same) > 1 and all(one in old_parts for one in same):
        return SkippedRole(trip, role)
    end = same[-sum(other in old_parts for other in same) :]
    modules = {other.rpartition(".")[0] for other in end if other in old_parts}
    if trip == "sync" and set(end) <= old_parts.keys() and len(modules) > 1:
        return EndNotWritten(end[0])  # no name is what these have in common
    return SkippedKey()


def _finding_changed(received: TransferOutcome, name: str, parts: Sequence[PartOutcome]) -> Finding:
    if (change := received.change(name)) and change.explanation:
        text = f"{change.why}, on {_ranks_text(received, name, parts)}"
        return _finding(change.explanation, received, name, parts, text)
    if all(part.fate == "zeros" for part in parts):
        number = next((part.why for part in parts if part.why), "")
        what = f"all of its values are {number}" if number else "it has zeros"
        text = f"{what} on {_ranks_text(received, name, parts)}; {received.sender} has different values"
        return _finding(WriteIntoCopies(received.trip, is_reset=True), received, name, parts, text, kind="foreign")
    count, size = sum(part.wrong for part in parts), sum(part.size for part in parts)
    text = f"{count:,} of {size:,} elements are not those of {received.sender} on {_ranks_text(received, name, parts)}"
    cause = FileOfAnotherRank() if name in received.each else ChangedInTransfer()
    return _finding(cause, received, name, parts, text)


def _with_advice(finding: Finding, received: TransferOutcome) -> Finding:
    """Return a finding of places with the cause and the fix that fit a trip."""
    details = (*finding.details, *([received.trips] if received.trips else []))
    if finding.kind not in ("foreign", "name-collision"):
        return replace(finding, details=details).because(MisplacedByTrip(finding.explanation, received.trip))
    text = f"{finding.sentence} {finding.held} "
    others = [name for name in received.parts if name != finding.tensor and f"{name} " in text]
    whose = max(others, key=len, default="")
    changed = ChangedInTransfer(is_padded=finding.tensor in received.padded)
    cause = _why_swapped(received, finding.tensor, whose) if whose else changed
    sentence = finding.sentence.replace("tensors of the unsharded model", "tensors")
    return replace(finding, sentence=sentence, details=details).because(cause)


def _why_swapped(received: TransferOutcome, name: str, whose: str) -> Cause:
    """Return the cause if one tensor has another's values."""
    owner, _, own_key = name.partition(" ")
    source_owner, _, key = whose.partition(" ")
    if received.roles[name] != "optim" and own_key and owner == source_owner:
        return FusedCutOtherwise()
    if received.roles[name] == "optim" and owner == source_owner:
        return SwappedTensors(tuple(sorted((own_key, key))))
    if received.roles[name] == "optim" and own_key == key:
        return StateByNumber()
    return SwappedTensors()
