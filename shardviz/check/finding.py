"""A finding: one disagreement, with what is wrong in numbers, its most likely cause, and its fix."""

from __future__ import annotations

from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from shardviz.text import counted, fold, listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from shardviz.check.order.laid_out import LaidOut
    from shardviz.text import Fold

Kind = Literal[
    "misordered",
    "misordered-within-shard",
    "duplicated",
    "missing",
    "foreign",
    "wrong-shape",
    "wrong-placement",
    "unreplicated",
    "identical-shards",
    "unreduced-gradient",
    "unreduced-scalar",
    "unreduced-output",
    "wrong-scale",
    "wrong-value",
    "wrong-segment",
    "untied",
    "write-not-applied",
    "collective-mismatch",
    "name-collision",
    "sequence-order",
    "rank-order",
    "raised",
    "incomplete",
]
Severity = Literal["error", "warning"]

About = Literal["order", "no-ids", "gathering", "values", "ties", "step", "run"]
"""What a check that could not run is about: where a tensor's elements are, and where they would be if its element type
could hold ids; what torch gathers of it; whether copies are equal; ties; a step; the run as a whole."""

FOR_MACHINES = (
    *("kind", "severity", "tensor", "tensors", "ranks", "summary", "claimed", "held", "intended", "cause", "fix"),
    *("also", "refs", "module"),
)
"""What of a finding is printed as JSON, in this order."""

MOST_NAMES = 4
"""Names in a title, identical layers counted as one; the row `tensors` has all of them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One disagreement between two descriptions of a tensor, or of several tensors that have it of one cause.

    Attributes:
        kind: Which rule it breaks.
        severity: `error` where numbers are wrong, `warning` where something could not be seen whole.
        tensor: The tensor's name, or the first of several; empty where it is about the whole dump.
        ranks: The ranks that disagree, rising.
        sentence: What is wrong, in numbers.
        details: Clauses that follow the sentence: an example of it, what comes of it.
        claimed: Where the placements say each element is, in the notation.
        held: Where each element really is, in the notation where one fits, in words otherwise.
        intended: Where the author wants it, in the notation; empty where nothing was said.
        cause: The most likely cause, one sentence.
        fix: What to change, in torch's own words.
        also: What else the ranks may hold that looks the same, in the words of `held`.
        refs: Known upstream bugs of this kind: `pytorch#129229`.
        module: The first module of a step that goes wrong, where this is what comes of it.
        generic: Whether this is a generic mismatch, dropped when a finding names the cause (`check.hiding`).
        members: The findings of the single tensors, where several have it (`check.grouping`); numbers and layouts of
            the whole are those of the first.
    """

    kind: Kind
    severity: Severity
    tensor: str
    ranks: tuple[int, ...]
    sentence: str
    _: KW_ONLY
    details: tuple[str, ...] = ()
    claimed: str = ""
    held: str = ""
    intended: str = ""
    cause: str = ""
    fix: str = ""
    also: tuple[str, ...] = ()
    refs: tuple[str, ...] = ()
    module: str = ""
    generic: bool = False
    members: tuple[Finding, ...] = ()

    @property
    def each(self) -> tuple[Finding, ...]:
        """The finding of each tensor, with its own numbers."""
        return self.members or (self,)

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of all tensors that have it, the first one first; empty where it is about the whole dump."""
        return tuple(dict.fromkeys(one.tensor for one in self.each if one.tensor))

    @property
    def folds(self) -> list[Fold]:
        """The names of its tensors, with identical layers in one."""
        return [names for names, _ in fold((name, None) for name in self.tensors)]

    @property
    def title(self) -> str:
        """The names of its tensors, as far as there is room: `layers.[0-3].up.weight, head.weight`."""
        return listed(self.folds, MOST_NAMES)

    @property
    def summary(self) -> str:
        """The sentence with all that follows it, in a line."""
        return "; ".join((self.sentence, *self.details))

    @property
    def layouts(self) -> list[tuple[str, str]]:
        """Where the elements are claimed, held and intended to be, as titled rows, as far as it is known."""
        sides = (("claimed", self.claimed), ("held", self.held), ("intended", self.intended))
        others = [("tensors", ", ".join(map(str, self.folds)))] if len(self.folds) > MOST_NAMES else []
        return [*others, *((title, text) for title, text in sides if text), *self._other_layouts]

    @property
    def _other_layouts(self) -> list[tuple[str, str]]:
        """Where the elements of other tensors are, unless held as those of the first: identical ones in one row."""
        sides = [(one.tensor, (one.claimed, one.held)) for one in self.members]
        folded = [(names, (claimed, held)) for names, (claimed, held) in fold(sides) if held != self.held]
        rows = [
            f"{names}: {f'claimed {claimed}, ' if claimed else ''}held {held or 'in no order that has a name'}"
            for names, (claimed, held) in folded[:MOST_NAMES]
        ]
        more = [f"{len(folded) - MOST_NAMES} more"] if len(folded) > MOST_NAMES else []
        return [("and", text) for text in (*rows, *more)]

    @property
    def advice(self) -> list[tuple[str, str]]:
        """The cause, the fix, what else fits and the references, as titled rows."""
        others = [("or", text) for text in self.also]
        rows = [("cause", self.cause), ("fix", self.fix), *others, ("see", ", ".join(self.refs))]
        return [(title, text) for title, text in rows if text]

    def in_words(self, change: Callable[[str], str]) -> Finding:
        """Return the finding with all its prose changed in one way; layouts stay as they are."""
        return replace(
            self,
            sentence=change(self.sentence),
            details=tuple(map(change, self.details)),
            cause=change(self.cause),
            fix=change(self.fix),
            also=tuple(map(change, self.also)),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the object that stands for it where findings are printed as JSON."""
        return {name: getattr(self, name) for name in FOR_MACHINES}


@dataclass(frozen=True, slots=True)
class NotChecked:
    """A check that could not run, and why: silence never means 'not looked at'.

    Attributes:
        tensor: The tensor's name; empty where it is about the whole dump.
        why: Why not, with what was not looked at.
        about: What was not looked at, for programs.
    """

    tensor: str
    why: str
    about: About


@dataclass(frozen=True)
class Report:
    """What a check of a dump found.

    Attributes:
        num_ranks: Ranks of the run.
        num_tensors: Distinct tensor names.
        findings: Worst first.
        not_checked: What could not be looked at.
        laid_out: The stamped tensors as the checks laid them out, for pictures and comparisons.
    """

    num_ranks: int
    num_tensors: int
    findings: tuple[Finding, ...] = ()
    not_checked: tuple[NotChecked, ...] = ()
    laid_out: LaidOut | None = field(default=None, compare=False, repr=False)

    @cached_property
    def findings_of(self) -> Mapping[str, tuple[Finding, ...]]:
        """The findings of each tensor that has any, worst first, with its own numbers."""
        found: dict[str, list[Finding]] = {}
        for finding in self.findings:
            for one in finding.each:
                found.setdefault(one.tensor, []).append(one)
        return {name: tuple(findings) for name, findings in found.items()}

    @cached_property
    def named_ranks(self) -> frozenset[int]:
        """The ranks that findings name."""
        return named_ranks(self.findings, self.num_ranks)

    @cached_property
    def why_not_checked(self) -> Mapping[str, tuple[str, ...]]:
        """Why a check of a tensor could not be made, by the names of the tensors where one could not."""
        found: dict[str, list[str]] = {}
        for unchecked in self.not_checked:
            found.setdefault(unchecked.tensor, []).append(unchecked.why)
        return {name: tuple(reasons) for name, reasons in found.items()}

    @cached_property
    def reasons(self) -> list[str]:
        """Why something could not be looked at, each reason once, after the names of its tensors."""
        by_why: dict[tuple[str, bool], list[Fold]] = {}
        for folded, why in fold((unchecked.tensor, unchecked.why) for unchecked in self.not_checked):
            by_why.setdefault((why, bool(str(folded))), []).append(folded)
        return [f"{_names_of(folds)}: {why}" if is_named else why for (why, is_named), folds in by_why.items()]

    def to_json(self) -> dict[str, Any]:
        """Return the object that `shardviz check --format json` prints."""
        return {
            "schema": 1,
            "num_ranks": self.num_ranks,
            "num_tensors": self.num_tensors,
            "findings": [finding.to_json() for finding in self.findings],
            "not_checked": [asdict(unchecked) for unchecked in self.not_checked],
        }


def _names_of(folds: Sequence[Fold]) -> str:
    """Return the names of folds, with the number of tensors where there is no room for all of them."""
    names = listed(folds, MOST_NAMES)
    tensors = sum(1 for one in folds for _ in one.names())
    return f"{counted(tensors, 'tensor')} ({names})" if len(folds) > MOST_NAMES else names


def named_ranks(findings: Iterable[Finding], num_ranks: int) -> frozenset[int]:
    """Return the ranks that findings name, where any names some: one that names every rank points at none of them.

    Args:
        findings: The findings.
        num_ranks: The ranks of the run.
    """
    named = [frozenset(finding.ranks) for finding in findings if finding.ranks]
    some = [ranks for ranks in named if len(ranks) < num_ranks]
    return frozenset[int]().union(*(some or named))
