"""What became of the tensors of two checkpoints, as data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from shardviz.checkpoint.records import DamagedFileError
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardviz.checkpoint.comparing.pairs import Pair
    from shardviz.errors import DumpError
    from shardviz.explain.cause import Cause
    from shardviz.layout.region import Region

    Outcomes = list[tuple["Outcome", Pair]]

SIDES = ("first", "second")
"""What the two checkpoints are called."""

Verdict = Literal[
    "equal",
    "tied",
    "cast",
    "permuted",
    "padded",
    "moved",
    "renamed",
    "stale",
    "missing",
    "added",
    "other",
    "unreadable",
    "not-compared",
]
"""What became of a tensor.

`moved` has the values of a tensor of another name, `renamed` is equal, under another name where most names are equal,
`tied` is saved once in one of them, `padded` has more at the end of a dim, `stale` is of another step, `unreadable` is
in a file that is missing, cut short or damaged.
"""

CHANGED: tuple[Verdict, ...] = ("cast", "permuted", "padded", "moved", "renamed", "stale")
DIFFERENT: tuple[Verdict, ...] = (*CHANGED, "missing", "added", "other", "unreadable")

KEPT: tuple[Verdict, ...] = ("equal", "cast")
"""Verdicts on tensors that are where they were."""

NOT_COMPARED: tuple[Verdict, ...] = ("missing", "added", "unreadable", "not-compared")

UNRELATED = 0.2
"""The correlation of unrelated tensors is below: that of 64 random pairs in 9 of 10 cases."""

MOST_EQUAL = 0.1
"""Of unrelated tensors a smaller part of the elements is equal by chance."""


@dataclass(frozen=True, slots=True)
class Distance:
    """How far two tensors are apart.

    Attributes:
        norm: The norm of their difference over that of the first.
        correlation: Between their values; None if either is one number everywhere.
        equal: Which part of their elements is equal, and not zero.
    """

    norm: float
    correlation: float | None
    equal: float = 0.0

    @property
    def is_unrelated(self) -> bool:
        """Whether neither tensor can be guessed from the other."""
        is_apart = self.correlation is not None and abs(self.correlation) < UNRELATED
        return is_apart and self.equal < MOST_EQUAL


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of comparing one tensor.

    Attributes:
        name: Its name in the first checkpoint, or in the second where only that has it, or has it in one piece.
        other: Its name in the other, or how a map makes it; empty if that has nothing in its place.
        verdict: What became of it.
        why: That in words, with the numbers.
        cause: What was done; empty if that is not known.
        fix: What to do about it.
        ranks: The ranks of a job that have it otherwise; empty between two checkpoints.
        parts: Which part of the checkpoint's tensor each of these ranks holds, where that was found.
        is_made: Whether it is compared with what a map makes.
        explanation: The cause in the catalogue; None if none is known.
        distance: How far its values are apart; None if that was not worked out.
    """

    name: str
    other: str
    verdict: Verdict
    why: str = ""
    cause: str = ""
    fix: str = ""
    ranks: tuple[int, ...] = ()
    parts: tuple[tuple[int, Region], ...] = ()
    is_made: bool = False
    explanation: Cause | None = None
    distance: Distance | None = None

    def became(
        self,
        verdict: Verdict,
        why: str,
        explanation: Cause | None = None,
        *,
        other: str | None = None,
        ranks: tuple[int, ...] = (),
    ) -> Outcome:
        """Return it with another verdict, for another cause."""
        cause, fix = ("", "") if explanation is None else (explanation.cause, explanation.fix)
        named = self.other if other is None else other
        return replace(
            self, verdict=verdict, why=why, cause=cause, fix=fix, other=named, ranks=ranks, explanation=explanation
        )

    def failed(self, error: DumpError) -> Outcome:
        """Return it as not compared, for an error of one side; as unreadable if a file is damaged."""
        if isinstance(error, DamagedFileError):
            return self.became("unreadable", error.file_text, error.cause)
        return self.became("not-compared", error.message)

    @property
    def is_open(self) -> bool:
        """Whether its values differ, and nothing explains it."""
        return self.verdict == "other" and self.explanation is None

    @property
    def cause_id(self) -> str:
        """Name of its cause in the catalogue: `shardviz explain CAUSE` prints its page."""
        return self.explanation.name if self.explanation is not None else ""

    def to_json(self) -> dict[str, Any]:
        """Return its fields; each part in words, and the cause by its name too."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "explanation"}
        values |= {"distance": None, "correlation": None}
        if self.distance is not None:
            norm, correlation = self.distance.norm, self.distance.correlation
            values |= {"distance": _rounded(norm), "correlation": correlation and _rounded(correlation)}
        parts = {str(rank): str(region) for rank, region in self.parts}
        return {**values, "parts": parts, "cause_id": self.cause_id}


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing every tensor of two checkpoints.

    Attributes:
        outcomes: One for each tensor, in the first checkpoint's order.
        notes: What the names were taken for, and what was left out.
        map: The lines of a map that was found by content; empty if names or a given map say what is which.
        guessed: Functions and numbers of the map that the values alone suggest. A conversion that joins in the wrong
            order suggests the wrong map, and its values are then equal under that map.
    """

    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...]
    map: tuple[str, ...] = ()
    guessed: tuple[str, ...] = ()

    @property
    def counts(self) -> Counter[str]:
        """How many tensors have each verdict."""
        return Counter(one.verdict for one in self.outcomes)

    @property
    def differs(self) -> bool:
        """Whether anything is different."""
        return any(one.verdict in DIFFERENT for one in self.outcomes)

    @property
    def compared(self) -> int:
        """How many tensors were looked at in both."""
        return sum(one.verdict not in NOT_COMPARED for one in self.outcomes)

    def to_json(self) -> dict[str, Any]:
        """Return the object that `shardviz diff --format json` prints."""
        document = {"schema": 1, "tensors": [one.to_json() for one in self.outcomes], "notes": list(self.notes)}
        return document | {key: list(lines) for key in ("map", "guessed") if (lines := getattr(self, key))}


def with_replaced(outcomes: Outcomes, replaced: Mapping[int, Outcome]) -> Outcomes:
    """Return outcomes, those of some pairs replaced: `replaced` has them by the id of their pair."""
    return [(replaced.get(id(pair), outcome), pair) for outcome, pair in outcomes]


def counts_text(comparison: Comparison) -> str:
    """Return how many tensors have each verdict, in words."""
    counts = comparison.counts
    verdicts = ("equal", "tied", *DIFFERENT, "not-compared")
    return listed((f"{counts[one]:,} {one}" for one in verdicts if counts[one]), len(verdicts))
