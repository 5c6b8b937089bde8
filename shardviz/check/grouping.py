"""One cause on many tensors is one finding: findings that differ only in their tensor merge.

Findings belong together that have the same kind and the same cause with the same fields but the tensor, on the same
ranks, or each on all ranks that have its tensor, as on the stages of a pipeline; of a step's results the ranks may
differ. If no cause is known, what is wrong must be the same too. Layouts may differ: one rule permutes weights of
different shapes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from shardviz.dump.dump import Dump
    from shardviz.explain.finding import Finding

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
