"""What a comparison lists: the tensors of two dumps, or of a job and a checkpoint, those that differ first."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from shardviz.checkpoint.comparing.outcome import DIFFERENT
from shardviz.picture.model.differences import first_difference
from shardviz.picture.model.drawing import drawn_dims
from shardviz.picture.model.holders import Plane
from shardviz.picture.model.subjects.beside import beside
from shardviz.picture.model.subjects.stored import numbered
from shardviz.text import Fold, fold, printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardviz.check.diff import Change, Difference
    from shardviz.checkpoint.beside.job import Job
    from shardviz.checkpoint.comparing.outcome import Comparison, Outcome
    from shardviz.checkpoint.records import Checkpoint
    from shardviz.picture.model.subjects.beside import Beside, Marked

    from .document import Document


How = tuple[tuple[str, str, str], ...]
"""The differences between two tensors of one name: the aspect, before, after."""

Relation = Literal["different", "only here", "only there", "same", "not compared"]

SIGNS: dict[Relation, str] = {"different": "≠", "only here": "<", "only there": ">", "same": "=", "not compared": "?"}
"""One sign per relation, in the order in which they are listed."""


@dataclass(frozen=True)
class Pair:
    """One tensor in two dumps.

    Attributes:
        title: Its name.
        here: Its entry in the first dump; None if it has none.
        there: Its entry in the second dump; None if it has none.
        relation: How they compare.
        what: The difference in words; empty where there is none.
    """

    title: str
    here: int | None
    there: int | None
    relation: Relation
    what: str = ""


def pairs(here: Document, there: Document, difference: Difference) -> list[Pair]:
    """Pair the tensors of two dumps by name and role, in the first one's order, different ones first.

    Layers that are one entry in one dump may be several in the other: they are one pair where both dumps agree.
    """
    from shardviz.check.diff import KEPT

    compared = {role for _, role in KEPT}
    changes: dict[str, list[Change]] = {}
    for change in (*difference.changes, *difference.relaid):
        changes.setdefault(change.tensor, []).append(change)
    ours, theirs = _entries(here), _entries(there)
    named = []
    for key in dict.fromkeys([*ours, *theirs]):
        name, role = key
        changed = tuple(changes.get(name, ()))
        how = tuple((change.aspect, change.before, change.after) for change in changed)
        named.append((name, (ours.get(key), theirs.get(key), role in compared, how)))
    folded = [_pair(printable(str(names)), *both) for names, both in fold(named)]
    return sorted(folded, key=lambda pair: list(SIGNS).index(pair.relation))


def _entries(document: Document) -> dict[tuple[str, str], int]:
    """Return the index of each tensor's entry, by its name and role."""
    return {(name, entry.tensor.role): at for at, entry in enumerate(document.entries) for name in entry.tensor.names}


def _pair(title: str, here: int | None, there: int | None, is_compared: bool, how: How) -> Pair:
    if here is None or there is None:
        return Pair(title, here, there, "only there" if here is None else "only here")
    if not is_compared:
        return Pair(title, here, there, "not compared")
    return Pair(title, here, there, "different" if how else "same", _words(how))


def _words(how: How) -> str:
    """Write the first aspect that changed, and the names of the others."""
    if not how:
        return ""
    (aspect, before, after), *others = how
    more = [other for other in dict.fromkeys(other for other, _, _ in others) if other != aspect]
    also = f", and {', '.join(more)}" if more else ""
    return f"{aspect} {printable(before)} → {printable(after)}{also}"


@dataclass(frozen=True)
class Line:
    """Tensors that share one statement.

    Attributes:
        names: Their names.
        outcome: What became of the first of them.
        entry: The job's entry that has it; None where only the checkpoint has it.
    """

    names: Fold
    outcome: Outcome
    entry: int | None

    @property
    def sign(self) -> str:
        """One character for what became of them."""
        if self.outcome.verdict in DIFFERENT:
            return {"missing": "<", "added": ">"}.get(self.outcome.verdict, "≠")
        return "=" if self.outcome.verdict == "equal" else "?"


@dataclass(frozen=True)
class Compared:
    """A job beside a checkpoint.

    Attributes:
        document: The job's dump.
        job: What is compared of it.
        checkpoint: The checkpoint.
        comparison: What became of every tensor.
    """

    document: Document
    job: Job
    checkpoint: Checkpoint
    comparison: Comparison
    _drawn: dict[str, tuple[Beside, Marked | None]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """The number of each file."""
        return numbered(self.checkpoint)

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """The tensors, different ones first, those that one side lacks behind them."""
        outcomes = {outcome.name: outcome for outcome in self.comparison.outcomes}
        known = {name: at for at, entry in reversed([*enumerate(self.document.entries)]) for name in entry.names}
        named = (
            (
                outcome.name,
                (replace(outcome, name="", other=""), at if (at := self._entry(outcome, known)) is not None else -1),
            )
            for outcome in outcomes.values()
        )
        lines = [Line(names, outcomes[names.names()[0]], at if at >= 0 else None) for names, (_, at) in fold(named)]
        return tuple(sorted(lines, key=lambda line: "≠<>?=".index(line.sign)))

    def _entry(self, outcome: Outcome, known: Mapping[str, int]) -> int | None:
        name = outcome.name if outcome.name in self.job.tensors else outcome.other
        return known.get(name) if name in self.job.tensors and outcome.verdict != "added" else None

    def drawn(self, line: Line) -> tuple[Beside, Marked | None]:
        """Return the picture of a line's first tensor, and the same with the checkpoint as the first side.

        Raises:
            ShardvizError: It cannot be drawn.
        """
        name = line.outcome.name
        if name not in self._drawn:
            picture = beside(line.outcome, self.job, self.checkpoint, self.numbers)
            self._drawn[name] = picture, picture.sides.turned() if picture.sides is not None else None
        return self._drawn[name]


def plane_of(sides: Marked, shape: tuple[int, ...]) -> Plane | None:
    """Return the plane that a tensor opens on, at the first element that differs; None without elements."""
    whole = sides.holders.shape
    if not all(whole):
        return None
    cuts = [len(sides.holders.edges(dim)) - 1 for dim in range(len(whole))]
    plane = Plane(*((1, 0) if len(shape) < 2 else drawn_dims(cuts)), (0,) * len(whole))
    place = first_difference(sides, plane)
    return replace(plane, at=place) if place else plane
