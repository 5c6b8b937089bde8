"""Findings that follow from others are hidden, as `KINDS` of `explain.kinds` says.

A check asks with `unhidden` what is left of its results, given those of the checks before it. So a kind may follow
from itself: the later check only found it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from shardviz.check.report import NotChecked
from shardviz.explain.finding import Finding
from shardviz.explain.kinds import KINDS, PLACES, SEQUENCES, UNCOMPARED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardviz.check.report import About
    from shardviz.explain.finding import Kind

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
