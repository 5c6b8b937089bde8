"""A report: findings, those of one cause as one, and what could not be looked at.

Findings belong together that have the same kind and the same cause with the same fields but the tensor, on the same
ranks, or each on all ranks that have its tensor, as on the stages of a pipeline; of a step's results the ranks may
differ. If no cause is known, what is wrong must be the same too. Layouts may differ: one rule permutes weights of
different shapes.

Findings that follow from others are hidden, as `KINDS` of `explain.kinds` says. A check asks with `unhidden` what is
left of its results, given those of the checks before it. So a kind may follow from itself: the later check only found
it again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from shardviz.explain.finding import MOST_NAMES, Finding, Kind
from shardviz.explain.kinds import KINDS, PLACES, SEQUENCES, UNCOMPARED
from shardviz.groups import in_groups
from shardviz.text import Fold, counted, fold, listed

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from shardviz.check.order.case import LaidOut
    from shardviz.dump.dump import Dump
    from shardviz.dump.records.base import Moment, Role


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
    """A tensor at one moment, as the files have it."""

    moment: Moment
    role: Role
    name: str


@dataclass(frozen=True)
class Report:
    """What a check of a dump found.

    Attributes:
        num_tensors: Distinct tensor names.
        findings: Worst first.
        not_checked: What could not be looked at.
        compared: Which results of the step were compared with the unsharded model's, and whether each is that, so that
            another number would have been noticed.
        laid_out: The stamped tensors as the checks laid them out, for pictures and comparisons.
        ties: Names that share their storage, each with all of these names.
    """

    num_ranks: int
    num_tensors: int
    findings: tuple[Finding, ...] = ()
    not_checked: tuple[NotChecked, ...] = ()
    compared: Mapping[Place, bool] = field(default_factory=dict, compare=False, repr=False)
    laid_out: LaidOut | None = field(default=None, compare=False, repr=False)
    ties: Mapping[str, Sequence[str]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def findings_of(self) -> Mapping[str, tuple[Finding, ...]]:
        """The findings of each tensor that has any, worst first, with its own numbers.

        A tied name without a finding of its own has those of the names that it is tied to.
        """
        by_name = in_groups((member.tensor, member) for finding in self.findings for member in finding.of_all)
        of_ties = {
            name: [finding for tied in names for finding in by_name.get(tied, ())] for name, names in self.ties.items()
        }
        return {name: tuple(findings) for name, findings in (of_ties | dict(by_name)).items() if findings}

    @cached_property
    def named_ranks(self) -> frozenset[int]:
        """The ranks that findings name."""
        return named_ranks(self.findings, self.num_ranks)

    @cached_property
    def why_not_checked(self) -> Mapping[str, tuple[str, ...]]:
        """Why a check of a tensor could not be made, by the names of the tensors."""
        by_name = in_groups((unchecked.tensor, unchecked.why) for unchecked in self.not_checked)
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
    by_why = in_groups(
        ((why, bool(str(folded))), folded)
        for folded, why in fold((unchecked.tensor, unchecked.why) for unchecked in not_checked)
    )
    return [f"{names_of(folds)}: {why}" if is_named else why for (why, is_named), folds in by_why.items()]


def names_of(folds: Sequence[Fold]) -> str:
    """Return the names of folds, with the number of tensors if there is no room for all of them."""
    names = listed(folds, MOST_NAMES)
    tensors = sum(1 for fold in folds for _ in fold.names())
    return f"{counted(tensors, 'tensor')} ({names})" if len(folds) > MOST_NAMES else names


def named_ranks(findings: Iterable[Finding], num_ranks: int) -> frozenset[int]:
    """Return the ranks that findings name; a finding of every rank points at none."""
    named = [frozenset(finding.ranks) for finding in findings if finding.ranks]
    some = [ranks for ranks in named if len(ranks) < num_ranks]
    return frozenset[int]().union(*(some or named))


ANY_RANKS = frozenset({"wrong-value", "write-not-applied"})
"""Kinds whose ranks do not tell causes apart: a bug of a step shows on the ranks whose numbers it happens to change."""


def grouped(findings: Sequence[Finding], ranks_of: Mapping[str, frozenset[int]] | None = None) -> list[Finding]:
    """Put findings of one cause together, each where the first of them stood.

    Args:
        findings: One finding for each tensor.
        ranks_of: The ranks that have each tensor; if it is not known, only the same ranks belong together.
    """
    groups: dict[Hashable, list[Finding]] = {}
    times: Counter[Hashable] = Counter()
    for finding in findings:
        key = _key(finding, ranks_of or {})
        # A tensor may have a finding twice, as weight and as state: the second ones are a group of their own.
        times[key, finding.tensor] += 1
        groups.setdefault((key, times[key, finding.tensor]), []).append(finding)
    return [_merge(members) for members in groups.values()]


def ranks_by_name(dump: Dump) -> dict[str, frozenset[int]]:
    """Return the ranks of the run that have each tensor, in whatever role."""
    by_name: dict[str, frozenset[int]] = {}
    for tensor in dump.tensors:
        # Rank 0 writes the unsharded model's tensors, whoever has them in the run.
        if tensor.moment not in ("reference", "updated"):
            ranks = frozenset(tensor.shards)
            by_name.update((name, by_name.get(name, frozenset()) | ranks) for name in tensor.names)
    return by_name


def _key(finding: Finding, ranks_of: Mapping[str, frozenset[int]]) -> Hashable:
    """Return what findings of one cause share."""
    if not finding.tensor:
        return finding
    is_everywhere = ranks_of.get(finding.tensor) == frozenset(finding.ranks)
    ranks = "all" if is_everywhere or finding.kind in ANY_RANKS else finding.ranks
    # A factor is the whole of what a wrong scale says: other factors have other causes.
    is_told_by_sentence = not finding.cause or finding.kind == "wrong-scale"
    numbers = (finding.sentence, finding.intended) if is_told_by_sentence else ()
    cause = finding.explanation.renamed(finding.tensor, "")
    return finding.kind, finding.severity, finding.generic, ranks, cause, finding.refs, numbers


def _merge(members: Sequence[Finding]) -> Finding:
    """Return the finding of all members, with the numbers of the first."""
    first = members[0]
    if len(members) == 1:
        return first
    ranks = tuple(sorted({rank for member in members for rank in member.ranks}))
    whole = replace(first, members=tuple(members), ranks=ranks)
    bare = first.explanation.renamed(first.tensor, "")
    are_alike = len({replace(member, tensor="", ranks=(), explanation=bare) for member in members}) == 1
    what = "tensors alike" if are_alike else f"tensors, such as {first.tensor}"
    sentence = f"{len(members)} {what}: {first.sentence}"
    return replace(whole, sentence=sentence, explanation=first.explanation.renamed(first.tensor, whole.title))


def findings_in(results: Iterable[object]) -> list[Finding]:
    """Return the results that are findings."""
    return [result for result in results if isinstance(result, Finding)]


def ungrouped(findings: Iterable[Finding]) -> list[Finding]:
    """Return one finding for each tensor again, each with its own numbers."""
    return [single for finding in findings for single in finding.each]


Result = TypeVar("Result", bound=Finding | NotChecked)

NEEDLESS: Mapping[About, frozenset[Kind]] = {"values": UNCOMPARED, "order": SEQUENCES}
"""The kinds that say more than a check that could not run, by what the check is about."""


def unhidden(
    results: Iterable[Result], causes: Iterable[Finding | NotChecked], *, anywhere: bool = False
) -> list[Result]:
    """Return the results that follow from none of the causes.

    Args:
        causes: What may explain it; checks that could not run explain nothing.
        anywhere: Whether results follow from findings of other tensors too.
    """
    cause_kinds: dict[str, set[Kind]] = {}
    for cause in causes:
        if isinstance(cause, Finding):
            cause_kinds.setdefault("" if anywhere else cause.tensor, set()).add(cause.kind)
    return [
        result
        for result in results
        if not follows_from(result) & cause_kinds.get("" if anywhere else result.tensor, set())
    ]


def follows_from(outcome: Finding | NotChecked) -> frozenset[Kind]:
    """Return the kinds of which a result is a consequence."""
    if isinstance(outcome, NotChecked):
        return NEEDLESS.get(outcome.about, frozenset())
    page = KINDS[outcome.kind]
    return page.follows_from | page.unexplained_from if outcome.generic else page.follows_from


def is_of_places(finding: Finding) -> bool:
    """Whether a finding says that shards do not hold the elements they claim."""
    return finding.kind in PLACES
