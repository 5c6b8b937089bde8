"""One cause on many tensors is one finding: findings that differ only in their tensor merge.

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
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from shardviz.check.report import NotChecked
from shardviz.explain.finding import Finding
from shardviz.explain.kinds import KINDS, PLACES, SEQUENCES, UNCOMPARED

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from shardviz.check.report import About
    from shardviz.dump.dump import Dump
    from shardviz.explain.finding import Kind


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
        results: What a check found.
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
