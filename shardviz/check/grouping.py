"""One cause on many tensors is one finding: findings that differ only in their tensor are put together.

Findings belong together that have the same kind, cause and fix, as they are or once the tensor's own name is taken out
of the words (a name may be a word that the cause has anyway, as `weight`), on the same ranks, or each on all ranks that
have its tensor, as on the stages of a pipeline; of a step's results the ranks may differ. Where no cause is known, what
is wrong must be the same too. Layouts may differ: one rule permutes weights of different shapes.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from shardviz.dump.dump import Dump
    from shardviz.explain.finding import Finding

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
    groups: list[list[Finding]] = []
    by_key: dict[Hashable, list[list[Finding]]] = {}
    listed: set[tuple[Hashable, int]] = set()
    # A tensor may have a finding twice, as weight and as state: the second ones are a group of their own. How many of
    # a key's groups, from the first, have the tensor only grows, so they are counted on instead of searched again.
    num_taken: Counter[tuple[Hashable, str]] = Counter()
    members: set[tuple[int, str]] = set()
    for finding in findings:
        tensor = finding.tensor
        keys = [_key(finding, worded, ranks_of or {}) for worded in (finding, _nameless(finding))]
        group = None
        for key in keys:
            known = by_key.setdefault(key, [])
            while (taken := num_taken[key, tensor]) < len(known) and (id(known[taken]), tensor) in members:
                num_taken[key, tensor] += 1
            if group is None and taken < len(known):
                group = known[taken]
        if group is None:
            group = []
            groups.append(group)
        group.append(finding)
        members.add((id(group), tensor))
        for key in keys:
            if (key, id(group)) not in listed:
                listed.add((key, id(group)))
                by_key[key].append(group)
    return [_as_one(group) for group in groups]


def ranks_by_name(dump: Dump) -> dict[str, frozenset[int]]:
    """Return the ranks of the run that have each tensor, in whatever role."""
    found: dict[str, frozenset[int]] = {}
    for tensor in dump.tensors:
        # Rank 0 writes the unsharded model's tensors, whoever has them in the run.
        if tensor.moment not in ("reference", "updated"):
            ranks = frozenset(tensor.shards)
            found.update((name, found.get(name, frozenset()) | ranks) for name in tensor.names)
    return found


def _key(finding: Finding, worded: Finding, ranks_of: Mapping[str, frozenset[int]]) -> Hashable:
    """Return what findings of one cause share, in the words of a finding as it is or without its tensor's name."""
    if not finding.tensor:
        return finding.kind, "", finding
    is_everywhere = ranks_of.get(finding.tensor) == frozenset(finding.ranks)
    ranks = "all" if is_everywhere or finding.kind in ANY_RANKS else finding.ranks
    # A factor is the whole of what a wrong scale says: other factors have other causes.
    is_said = not finding.cause or finding.kind == "wrong-scale"
    said = (worded.sentence, finding.intended) if is_said else ()
    return finding.kind, finding.severity, finding.generic, ranks, worded.cause, worded.fix, finding.refs, said


def _as_one(members: Sequence[Finding]) -> Finding:
    """Return the finding of all members, in words for all of them, with the numbers of the first."""
    first = members[0]
    if len(members) == 1:
        return first
    whole = replace(first, members=tuple(members), ranks=tuple(sorted({rank for one in members for rank in one.ranks})))
    cause, fix = (_for_all([getattr(one, part) for one in members], members, whole.title) for part in ("cause", "fix"))
    if not _are_alike(members):
        sentence = f"{len(members)} tensors, such as {first.tensor}: {first.sentence}"
        return replace(whole, sentence=sentence, cause=cause, fix=fix)
    details = tuple(
        _for_all(texts, members, whole.title) for texts in zip(*(one.details for one in members), strict=True)
    )
    sentence = _for_all([one.sentence for one in members], members, whole.title)
    return replace(whole, sentence=f"{len(members)} tensors alike: {sentence}", details=details, cause=cause, fix=fix)


def _are_alike(members: Sequence[Finding]) -> bool:
    """Whether all findings say the same, as they are or but for their tensors' names."""
    # The explanation has the tensor's name too, in its fields; what it says is in the words.
    bare = [replace(one, ranks=(), explanation=None) for one in members]
    return len({replace(one, tensor="") for one in bare}) == 1 or len({_nameless(one) for one in bare}) == 1


def _for_all(texts: Sequence[str], members: Sequence[Finding], title: str) -> str:
    """Return one text for all members: as it is where all have it, else with all their names in the place of one."""
    if len(set(texts)) == 1:
        return texts[0]
    return _name_in(members[0]).sub(lambda _: title, texts[0])


def _name_in(finding: Finding) -> re.Pattern[str]:
    """Return what finds a finding's tensor in prose; a name may be a word, too, as `weight` is."""
    return re.compile(rf"(?<![\w.]){re.escape(finding.tensor)}(?!\.?\w)")


def _nameless(finding: Finding) -> Finding:
    """Return the finding without its tensor's name, in any of its prose."""
    return replace(finding.in_words(partial(_name_in(finding).sub, NAME)), tensor="")


def ungrouped(findings: Iterable[Finding]) -> list[Finding]:
    """Return one finding for each tensor again, each with its own numbers."""
    return [one for finding in findings for one in finding.each]
