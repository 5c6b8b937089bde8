"""A finding: one disagreement, with what is wrong in numbers, its most likely cause, and its fix."""

from __future__ import annotations

from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any, Literal

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
    "incomplete",
]
Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """One disagreement between two descriptions of a tensor.

    Attributes:
        kind: Which rule it breaks.
        severity: `error` where numbers are wrong, `warning` where something could not be seen whole.
        tensor: The tensor's name; empty where it is about the whole dump.
        ranks: The ranks that disagree, rising.
        summary: One sentence that says what is wrong, in numbers.
        claimed: Where the placements say each element is, in the notation.
        held: Where each element really is, in the notation where one fits, in words otherwise.
        intended: Where the author wants it, in the notation; empty where nothing was said.
        cause: The most likely cause, one sentence.
        fix: What to change, in torch's own words.
        refs: Known upstream bugs of this kind: `pytorch#129229`.
    """

    kind: Kind
    severity: Severity
    tensor: str
    ranks: tuple[int, ...]
    summary: str
    _: KW_ONLY
    claimed: str = ""
    held: str = ""
    intended: str = ""
    cause: str = ""
    fix: str = ""
    refs: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotChecked:
    """A check that could not run, and why: silence never means 'not looked at'."""

    tensor: str
    why: str


@dataclass(frozen=True)
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
    not_checked: tuple[NotChecked, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Return the object that `shardviz check --format json` prints."""
        return {"schema": 1, **asdict(self)}
