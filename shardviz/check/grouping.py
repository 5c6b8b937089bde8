"""One cause on many tensors is one finding: findings that differ only in their tensor are put together.

Findings belong together that have the same kind, cause and fix once the tensor's own name is taken out of the words,
on the same ranks, or each on all ranks that have its tensor, as on the stages of a pipeline; of a step's results the
ranks may differ. Where no cause is known, what is wrong must be the same too. Layouts may differ: one rule permutes
weights of different shapes.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from shardviz.check.finding import Finding
    from shardviz.dump.dump import Dump

NAME = "\0"
"""Stands for the tensor's name while findings that differ in nothing else are put together."""

ANY_RANKS = frozenset({"wrong-value", "write-not-applied"})
"""Kinds whose ranks do not tell causes apart: a bug of a step shows on the ranks whose numbers it happens to change."""


def grouped(findings: Sequence[Finding], ranks_of: Mapping[str, frozenset[int]] | None = None) -> list[Finding]:
    """Put findings of one cause together, each where the first of them stood.

    Args:
        findings: One finding for each tensor.
        ranks_of: The ranks that have each tensor; where it is not known, only the same ranks belong together.
    """
    groups: dict[Hashable, list[Finding]] = {}
    seen: dict[Hashable, int] = {}
    for finding in findings:
        key = _key(finding, ranks_of or {})
        # A tensor may have a finding twice, as weight and as state: the second ones are a group of their own.
        count = seen[key, finding.tensor] = seen.get((key, finding.tensor), 0) + 1
        groups.setdefault((key, count), []).append(finding)
    return [_as_one(members) for members in groups.values()]


def ranks_by_name(dump: Dump) -> dict[str, frozenset[int]]:
    """Return the ranks of the run that have each tensor, in whatever role."""
    found: dict[str, frozenset[int]] = {}
    for tensor in dump.tensors:
        # Rank 0 writes the unsharded model's tensors, whoever has them in the run.
        if tensor.moment not in ("reference", "updated"):
            ranks = frozenset(tensor.shards)
            found.update((name, found.get(name, frozenset()) | ranks) for name in tensor.names)
    return found


def _key(finding: Finding, ranks_of: Mapping[str, frozenset[int]]) -> Hashable:
    if not finding.tensor:
        return finding.kind, "", finding
    nameless = _nameless(finding)
    is_everywhere = ranks_of.get(finding.tensor) == frozenset(finding.ranks)
    ranks = "all" if is_everywhere or finding.kind in ANY_RANKS else finding.ranks
    # A factor is the whole of what a wrong scale says: other factors have other causes.
    is_said = not finding.cause or finding.kind == "wrong-scale"
    said = (nameless.sentence, finding.intended) if is_said else ()
    return finding.kind, finding.severity, finding.generic, ranks, nameless.cause, nameless.fix, finding.refs, said


def _as_one(members: Sequence[Finding]) -> Finding:
    """Return the finding of all members, in words for all of them, with the numbers of the first."""
    first = members[0]
    if len(members) == 1:
        return first
    whole = replace(first, members=tuple(members), ranks=tuple(sorted({rank for one in members for rank in one.ranks})))
    nameless = _nameless(first)
    worded = nameless.in_words(partial(_named, whole.title))
    if len({replace(_nameless(one), ranks=()) for one in members}) == 1:
        sentence, details = f"{len(members)} tensors alike: {worded.sentence}", worded.details
    else:
        sentence, details = f"{len(members)} tensors, such as {first.tensor}: {first.sentence}", first.details
    return replace(whole, sentence=sentence, details=details, cause=worded.cause, fix=worded.fix)


def _named(name: str, text: str) -> str:
    return text.replace(NAME, name)


def _nameless(finding: Finding) -> Finding:
    """Return the finding without its tensor's name, in any of its prose."""
    name = re.compile(rf"(?<![\w.]){re.escape(finding.tensor)}(?!\.?\w)")
    return replace(finding.in_words(partial(name.sub, NAME)), tensor="")


def ungrouped(findings: Iterable[Finding]) -> list[Finding]:
    """Return one finding for each tensor again, each with its own numbers."""
    return [one for finding in findings for one in finding.each]
