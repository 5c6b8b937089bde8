"""A finding: one disagreement, with what is wrong in numbers, its most likely cause, and its fix."""

from __future__ import annotations

from dataclasses import KW_ONLY, asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

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
    *("kind", "severity", "tensor", "ranks", "summary", "claimed", "held", "intended", "cause", "fix"),
    *("also", "refs"),
)
"""What of a finding is printed as JSON, in this order."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One disagreement between two descriptions of a tensor.

    Attributes:
        kind: Which rule it breaks.
        severity: `error` where numbers are wrong, `warning` where something could not be seen whole.
        tensor: The tensor's name; empty where it is about the whole dump.
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
        gives_way: Whether it says no more than that numbers are others than they should be: a finding that says why, of
            this tensor or of what it was computed from, is told in its stead.
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
    gives_way: bool = False

    @property
    def summary(self) -> str:
        """The sentence with all that follows it, in a line."""
        return "; ".join((self.sentence, *self.details))

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


@dataclass(frozen=True, slots=True)
class Report:
    """What a check of a dump found.

    Attributes:
        num_ranks: Ranks of the run.
        num_tensors: Distinct tensor names.
        findings: Worst first.
        not_checked: What could not be looked at.
    """

    num_ranks: int
    num_tensors: int
    findings: tuple[Finding, ...] = ()
    not_checked: tuple[NotChecked, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the object that `shardviz check --format json` prints."""
        return {
            "schema": 1,
            "num_ranks": self.num_ranks,
            "num_tensors": self.num_tensors,
            "findings": [finding.to_json() for finding in self.findings],
            "not_checked": [asdict(unchecked) for unchecked in self.not_checked],
        }
