"""A report: the findings of a check, and what could not be looked at."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from shardviz.explain.finding import MOST_NAMES
from shardviz.text import counted, fold, listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardviz.check.order.case import LaidOut
    from shardviz.dump.records.base import Moment, Role
    from shardviz.explain.finding import Finding
    from shardviz.text import Fold

About = Literal["order", "no-ids", "gathering", "values", "ties", "step", "run"]
"""What a check that could not run is about: where a tensor's elements are, and where they would be if its dtype
could hold ids; what torch gathers of it; whether copies are equal; ties; a step; the run as a whole."""


@dataclass(frozen=True, slots=True)
class NotChecked:
    """A check that could not run, and why: silence never means 'not looked at'.

    Attributes:
        tensor: The tensor's name; empty if it is about the whole dump.
        why: Why not, with what was not looked at.
        about: What was not looked at, for programs.
    """

    tensor: str
    why: str
    about: About


class Place(NamedTuple):
    """A tensor at one moment, as the files have it.

    Attributes:
        moment: When it was recorded.
        role: What it is.
        name: Its name.
    """

    moment: Moment
    role: Role
    name: str


@dataclass(frozen=True)
class Report:
    """What a check of a dump found.

    Attributes:
        num_ranks: Ranks of the run.
        num_tensors: Distinct tensor names.
        findings: Worst first.
        not_checked: What could not be looked at.
        compared: Which results of the step were compared with the unsharded model's, and whether each is that, so that
            another number would have been noticed.
        laid_out: The stamped tensors as the checks laid them out, for pictures and comparisons.
    """

    num_ranks: int
    num_tensors: int
    findings: tuple[Finding, ...] = ()
    not_checked: tuple[NotChecked, ...] = ()
    compared: Mapping[Place, bool] = field(default_factory=dict, compare=False, repr=False)
    laid_out: LaidOut | None = field(default=None, compare=False, repr=False)

    @cached_property
    def findings_of(self) -> Mapping[str, tuple[Finding, ...]]:
        """The findings of each tensor that has any, worst first, with its own numbers."""
        by_name: dict[str, list[Finding]] = {}
        for finding in self.findings:
            for member in finding.of_all:
                by_name.setdefault(member.tensor, []).append(member)
        return {name: tuple(findings) for name, findings in by_name.items()}

    @cached_property
    def named_ranks(self) -> frozenset[int]:
        """The ranks that findings name."""
        return named_ranks(self.findings, self.num_ranks)

    @cached_property
    def why_not_checked(self) -> Mapping[str, tuple[str, ...]]:
        """Why a check of a tensor could not be made, by the names of the tensors."""
        by_name: dict[str, list[str]] = {}
        for unchecked in self.not_checked:
            by_name.setdefault(unchecked.tensor, []).append(unchecked.why)
        return {name: tuple(reasons) for name, reasons in by_name.items()}

    @cached_property
    def reasons(self) -> list[str]:
        """Why something could not be looked at, each reason once, after the names of its tensors."""
        return reasons_of(self.not_checked)

    def to_json(self) -> dict[str, Any]:
        """Return the object that `shardviz check --format json` prints."""
        return {
            "schema": 1,
            "num_ranks": self.num_ranks,
            "num_tensors": self.num_tensors,
            "findings": [finding.to_json() for finding in self.findings],
            "not_checked": [asdict(unchecked) for unchecked in self.not_checked],
        }


def reasons_of(not_checked: Iterable[NotChecked]) -> list[str]:
    """Return each reason once, after the names of its tensors."""
    by_why: dict[tuple[str, bool], list[Fold]] = {}
    for folded, why in fold((unchecked.tensor, unchecked.why) for unchecked in not_checked):
        by_why.setdefault((why, bool(str(folded))), []).append(folded)
    return [f"{names_of(folds)}: {why}" if is_named else why for (why, is_named), folds in by_why.items()]


def names_of(folds: Sequence[Fold]) -> str:
    """Return the names of folds, with the number of tensors if there is no room for all of them."""
    names = listed(folds, MOST_NAMES)
    tensors = sum(1 for fold in folds for _ in fold.names())
    return f"{counted(tensors, 'tensor')} ({names})" if len(folds) > MOST_NAMES else names


def named_ranks(findings: Iterable[Finding], num_ranks: int) -> frozenset[int]:
    """Return the ranks that findings name; a finding of every rank points at none.

    Args:
        findings: The findings.
        num_ranks: The ranks of the run.
    """
    named = [frozenset(finding.ranks) for finding in findings if finding.ranks]
    some = [ranks for ranks in named if len(ranks) < num_ranks]
    return frozenset[int]().union(*(some or named))
