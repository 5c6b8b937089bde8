"""Findings about what was received: never written, rounded, of another shape, or another tensor's, with the fix."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardviz.check.grouping import grouped
from shardviz.explain.conversion import NarrowedOnTheWay, PaddedParts
from shardviz.explain.transfers import (
    ChangedInTransfer,
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
from shardviz.testing.assertions.message import in_words
from shardviz.testing.trips.judging import with_parts
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from shardviz.checkpoint.comparing.outcome import Change
    from shardviz.dump.records.base import Role
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding, Kind
    from shardviz.testing.trips.judging import Part

MOST = 4
MOST_ROWS = 12
"""Tensors of one cause whose rows are listed one by one."""
MOST_IN_FULL = 8
"""Causes that are printed in full."""
WRONG = "wrong: "
"""What the clause with the ranks and rows of a finding begins with."""


@dataclass(frozen=True)
class Words:
    """How a trip is called in findings.

    Attributes:
        trip: What should have written the values: `load`, `sync`.
        sender: Where they come from: `what was saved`, `the source`.
        trips: Where it went, in words: `saved on (fsdp=2, tp=2), loaded on (fsdp=4)`.
    """

    trip: str
    sender: str
    trips: str = ""


@dataclass(frozen=True)
class Received:
    """What became of every tensor.

    Attributes:
        parts: Every rank's part of each, by name.
        roles: Their roles.
        each: Those of which each rank has one of its own.
        words: How the trip is called.
        padded: Those that a map pads.
    """

    parts: Mapping[str, Sequence[Part]]
    roles: Mapping[str, Role]
    each: Collection[str]
    words: Words
    padded: Collection[str] = ()

    def wrong(self, *fates: str) -> dict[str, list[Part]]:
        """Return the parts with one of some fates, of the tensors that have any."""
        found = {name: [one for one in parts if one.fate in fates] for name, parts in self.parts.items()}
        return {name: parts for name, parts in found.items() if parts}

    def owner(self, name: str) -> str:
        """Return the one tensor whose values every wrong part of a tensor has; empty if there is none."""
        owners = {part.why if part.fate == "swapped" else "" for part in self.parts[name] if part.fate != "right"}
        return owners.pop() if len(owners) == 1 else ""

    def is_padded(self, name: str) -> bool:
        """Whether ranks padded their own parts, where a map pads the whole: not the first rank alone."""
        wrong = [part.padded for part in self.parts[name] if part.fate != "right"]
        return all(wrong) and any(padded.first for padded in wrong if padded)

    def change(self, name: str) -> Change | None:
        """Return what was done to all values of every wrong part of a tensor; None if that is not one thing."""
        changes = {part.change for part in self.parts[name] if part.fate != "right"}
        return changes.pop() if len(changes) == 1 else None

    @property
    def unplaced(self) -> list[str]:
        """The tensors whose wrong values are neither the old ones nor rounded: they may be others'."""
        known = self.wrong("kept", "rounded", "dtype", "shape")
        wrong = self.wrong("other", "swapped")
        found = [name for name in wrong if name not in known and name not in self.each and not self.owner(name)]
        return [name for name in found if not self.is_padded(name) and not self.change(name)]


def message_of(findings: Iterable[Finding]) -> str:
    """Return the text for findings, one cause once, with the ranks and rows of each tensor; empty if none is."""
    return in_words(None, [_with_rows(one) for one in grouped(list(findings))], most=MOST_IN_FULL)


def _with_rows(finding: Finding) -> Finding:
    """Return the finding of several tensors with the rows of each of them."""
    rows = [(one.tensor, _wrong(one)) for one in finding.members]
    if len({text for _, text in rows}) < 2:
        return finding
    more = [f"{len(rows) - MOST_ROWS} more tensors"] if len(rows) > MOST_ROWS else []
    each = ", ".join([*(f"{name} {text}" for name, text in rows[:MOST_ROWS]), *more])
    others = (one for one in finding.details if not one.startswith(WRONG))
    return replace(finding, details=(f"{WRONG}{each}", *others))


def _wrong(finding: Finding) -> str:
    return next((one.removeprefix(WRONG) for one in finding.details if one.startswith(WRONG)), "")


def findings_of(received: Received, placed: Sequence[Finding]) -> Iterator[Finding]:
    """Yield what is wrong with what was received.

    Args:
        received: What became of every tensor.
        placed: Where the elements are that the unplaced tensors have.
    """
    padded = [name for name in received.parts if received.is_padded(name)]
    for name in padded:
        yield _padded(received, name)
    received = replace(received, parts={name: parts for name, parts in received.parts.items() if name not in padded})
    kept = received.wrong("kept")
    for name, parts in kept.items():
        yield _kept(received, name, parts)
    for name, parts in received.wrong("rounded").items():
        if name not in kept:
            yield _rounded(received, name, parts)
    for name, parts in received.wrong("dtype").items():
        yield _retyped(received, name, parts)
    for name, parts in received.wrong("shape").items():
        if name not in kept:
            yield _misshapen(received, name, parts)
    for name, parts in received.wrong("swapped").items():
        if whose := received.owner(name):
            yield _swapped(received, name, parts, whose)
    explained = {finding.tensor for finding in placed} | {name for name in received.parts if received.owner(name)}
    for finding in placed:
        yield with_parts(_advised(finding, received), received.parts[finding.tensor])
    for name, parts in received.wrong("other", "zeros", "swapped").items():
        if name not in explained and name not in kept and name not in received.wrong("rounded", "dtype", "shape"):
            yield _other(received, name, parts)


def _where(received: Received, name: str, parts: Sequence[Part]) -> str:
    return f"{len(parts):,} of {len(received.parts[name]):,} ranks"


def _finding(
    cause: Cause, received: Received, name: str, parts: Sequence[Part], text: str, kind: Kind | None = None
) -> Finding:
    """Return the finding with the rows of each rank, and with the kind that its cause has in a trip."""
    details = (
        f"{WRONG}{listed((part.text for part in parts), MOST)}",
        *([received.words.trips] if received.words.trips else []),
    )
    return cause.finding(name, tuple(part.rank for part in parts), text, kind=kind, details=details)


def _padded(received: Received, name: str) -> Finding:
    parts = [part for part in received.parts[name] if part.fate != "right"]
    one = next(part.padded for part in parts if part.padded is not None and part.padded.first)
    what = "rows" if one.dim == 0 else f"indices of dim {one.dim}"
    text = f"each rank's own {what} are padded, {one.size:,} and {one.more:,} more; the map pads the whole"
    return _finding(PaddedParts(), received, name, parts, f"{text}: on {_where(received, name, parts)}")


def _kept(received: Received, name: str, parts: Sequence[Part]) -> Finding:
    words = received.words
    count, size = sum(part.wrong for part in parts), sum(part.size for part in parts)
    much = "" if count == size else f"{count:,} of {size:,} elements of "
    text = f"the {words.trip} did not write {much}it on {_where(received, name, parts)}: what was there before is there"
    return _finding(_why_kept(received, name, parts), received, name, parts, text)


def _why_kept(received: Received, name: str, parts: Sequence[Part]) -> Cause:
    """Return the cause of old values: the whole trip, a rank, a kind of tensor or this one."""
    trip, kept, role = received.words.trip, received.wrong("kept"), received.roles[name]
    if any(part.wrong < part.size for part in parts):
        return PartialWrite(trip)
    if {part.rank for part in parts} < {part.rank for part in received.parts[name] if part.size}:
        return SkippedRanks(trip)
    if set(kept) >= set(received.parts):
        return WriteIntoCopies(trip)
    same = [other for other in received.parts if received.roles[other] == role]
    if len(same) > 1 and all(one in kept for one in same):
        return SkippedRole(trip, role)
    return SkippedKey()


def _rounded(received: Received, name: str, parts: Sequence[Part]) -> Finding:
    dtype = parts[0].why
    text = f"its values were rounded to {dtype} on the way on {_where(received, name, parts)}"
    return _finding(NarrowedOnTheWay(dtype, trip=received.words.trip), received, name, parts, text)


def _retyped(received: Received, name: str, parts: Sequence[Part]) -> Finding:
    text = (
        f"it is {parts[0].why} on {_where(received, name, parts)} after the {received.words.trip}, and was not before"
    )
    return _finding(ReplacedDtype(received.words.trip), received, name, parts, text)


def _misshapen(received: Received, name: str, parts: Sequence[Part]) -> Finding:
    text = f"its shape is {parts[0].why}, on {_where(received, name, parts)}"
    return _finding(PartTakenForWhole(received.words.trip), received, name, parts, text)


def _other(received: Received, name: str, parts: Sequence[Part]) -> Finding:
    words = received.words
    if (change := received.change(name)) and change.explanation:
        text = f"{change.why}, on {_where(received, name, parts)}"
        return _finding(change.explanation, received, name, parts, text)
    if all(part.fate == "zeros" for part in parts):
        number = next((part.why for part in parts if part.why), "")
        what = f"all of its values are {number}" if number else "it has zeros"
        text = f"{what} on {_where(received, name, parts)}; {words.sender} has different values"
        return _finding(WriteIntoCopies(words.trip, is_reset=True), received, name, parts, text, kind="foreign")
    count, size = sum(part.wrong for part in parts), sum(part.size for part in parts)
    text = f"{count:,} of {size:,} elements are not those of {words.sender} on {_where(received, name, parts)}"
    cause = FileOfAnotherRank() if name in received.each else ChangedInTransfer()
    return _finding(cause, received, name, parts, text)


def _advised(finding: Finding, received: Received) -> Finding:
    """Return a finding of places with the cause and the fix that fit a trip."""
    words = received.words
    details = (*finding.details, *([words.trips] if words.trips else []))
    if finding.kind not in ("foreign", "name-collision"):
        return replace(finding, details=details).because(MisplacedByTrip(finding.explanation, words.trip))
    text = f"{finding.sentence} {finding.held} "
    others = [name for name in received.parts if name != finding.tensor and f"{name} " in text]
    whose = max(others, key=len, default="")
    changed = ChangedInTransfer(is_padded=finding.tensor in received.padded)
    cause = _why_swapped(received, finding.tensor, whose) if whose else changed
    sentence = finding.sentence.replace("tensors of the unsharded model", "tensors")
    return replace(finding, sentence=sentence, details=details).because(cause)


def _swapped(received: Received, name: str, parts: Sequence[Part], whose: str) -> Finding:
    text = f"it has the values of {whose} on {_where(received, name, parts)}"
    return _finding(_why_swapped(received, name, whose), received, name, parts, text)


def _why_swapped(received: Received, name: str, whose: str) -> Cause:
    """Return the cause where one tensor has another's values."""
    mine, _, own_key = name.partition(" ")
    theirs, _, key = whose.partition(" ")
    if received.roles[name] != "optim" and own_key and mine == theirs:
        return FusedCutOtherwise()
    if received.roles[name] == "optim" and mine == theirs:
        return SwappedTensors(tuple(sorted((own_key, key))))
    if received.roles[name] == "optim" and own_key == key:
        return StateByNumber()
    return SwappedTensors()
