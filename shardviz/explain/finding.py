"""A finding: one disagreement in numbers, its most likely cause, and its fix."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from shardviz.text import Fold, fold, listed

if TYPE_CHECKING:
    from shardviz.explain.cause import Cause
    from shardviz.relate.relations import RankPair

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

FOR_MACHINES = (
    *("kind", "severity", "tensor", "tensors", "ranks", "summary", "claimed", "held", "intended", "cause", "fix"),
    *("also", "refs", "module", "line", "cause_id", "causes"),
)
"""What of a finding is printed as JSON, in this order."""

MOST_NAMES = 4
"""Names in a title, identical layers counted as one; the row `tensors` has all of them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One disagreement about a tensor, or about several tensors with the same cause.

    Attributes:
        kind: Which rule it breaks.
        severity: `error` if numbers are wrong, `warning` if something could not be seen whole.
        tensor: The tensor's name, or the first of several; empty if it is about the whole dump.
        ranks: The ranks that disagree, rising.
        sentence: What is wrong, in numbers.
        details: Clauses that follow the sentence: an example of it, what comes of it.
        claimed: Where the placements say each element is, in the notation.
        held: Where each element really is, in the notation if one fits, in words otherwise.
        intended: Where the author wants it, in the notation; empty if nothing is intended.
        also: What else the ranks may hold that looks the same, in the words of `held`.
        refs: Known upstream bugs of this kind: `pytorch#129229`.
        module: The first module of a step that goes wrong, if this is what comes of it.
        line: The first line in that module that goes wrong: `moe.py:83`.
        explanation: The cause in the catalogue, with its fields.
        generic: Whether this is a generic mismatch, dropped when a finding names the cause (`check.report`).
        pairs: What was compared, with what was recognized of it, as far as the judge has it: one pair for a tensor,
            several for a finding about the whole dump. They take no part in comparisons of findings.
        members: The findings of the single tensors, if several have it (`check.report`); numbers and layouts of
            the whole are those of the first.
        others: What was found of tensors that it counts and does not name: they are off for the same reason.
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
    also: tuple[str, ...] = ()
    refs: tuple[str, ...] = ()
    module: str = ""
    line: str = ""
    generic: bool = False
    explanation: Cause
    pairs: tuple[RankPair, ...] = field(default=(), compare=False, repr=False)
    members: tuple[Finding, ...] = ()
    others: tuple[Finding, ...] = field(default=(), compare=False, repr=False)

    @property
    def cause_id(self) -> str:
        """Name of its cause in the catalogue: `shardviz explain CAUSE` prints its page."""
        return self.explanation.id

    @property
    def page_command(self) -> str:
        """The command that prints the page of its cause."""
        return self.explanation.page_command

    @property
    def cause(self) -> str:
        """Every cause that fits, the likeliest first, in a line."""
        return self.explanation.cause

    @property
    def fix(self) -> str:
        """What to change, in torch's own words, in a line."""
        return self.explanation.fix

    @property
    def causes(self) -> list[dict[str, str]]:
        """Every cause that fits with its fix, the likeliest first."""
        return [{"cause": cause, "fix": fix} for cause, fix in self.explanation.ways]

    def because(self, cause: Cause) -> Finding:
        """Return the finding with another cause, and with that one's fix and references."""
        return replace(self, explanation=cause, refs=cause.refs)

    def seen_in(self, *pairs: RankPair) -> Finding:
        """Return the finding with what it was judged from."""
        return replace(self, pairs=pairs)

    @property
    def each(self) -> tuple[Finding, ...]:
        """The finding of each tensor, with its own numbers."""
        return self.members or (self,)

    @property
    def of_all(self) -> tuple[Finding, ...]:
        """The finding of each tensor, also of those that it only counts."""
        counted = (replace(self, tensor=one.tensor, ranks=one.ranks, pairs=one.pairs, others=()) for one in self.others)
        return (*self.each, *counted)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all tensors that have it; empty if it is about the whole dump."""
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
        """Claimed, held and intended layouts as titled rows; none repeats the summary."""
        held = self.held if "[" in self.held.partition(" ")[0] or self.held not in self.summary else ""
        claimed = "read as" if self.kind == "wrong-segment" else "claimed"
        sides = ((claimed, self.claimed), ("held", held), ("intended", self.intended))
        others = [("tensors", ", ".join(map(str, self.folds)))] if len(self.folds) > MOST_NAMES else []
        return [*others, *((title, text) for title, text in sides if text), *self._other_layouts]

    @property
    def _other_layouts(self) -> list[tuple[str, str]]:
        """Layouts of other tensors if unlike the first's, identical ones in one row."""
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
        """Cause and fix, or what is likely and alternatives; other layouts that fit, the page, references: as rows."""
        ways = self.explanation.ways
        first = "cause" if len(ways) == 1 else "likely"
        rows = [row for at, (cause, fix) in enumerate(ways) for row in (("or" if at else first, cause), ("fix", fix))]
        also = [("or", held) for held in self.also if not any(held in cause for cause, _ in ways)]
        rows = [*rows, *also, ("see", "; ".join(filter(None, (", ".join(self.refs), self.page_command))))]
        return [(title, text) for title, text in rows if text]

    def to_json(self) -> dict[str, Any]:
        """Return the object that stands for it if findings are printed as JSON."""
        return {name: getattr(self, name) for name in FOR_MACHINES}
