"""Findings that no check made: with any words as their cause and fix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardviz.explain.cause import Cause

if TYPE_CHECKING:
    from shardviz.explain.finding import Finding, Kind, Severity


@dataclass(frozen=True)
class Words(Cause, abstract=True):
    """A cause that is not in the catalogue; `{tensor}` in its words is the tensor's name."""

    tensor: str = ""
    why: str = ""  # type: ignore[misc]
    how: str = ""  # type: ignore[misc]
    references: tuple[str, ...] = ()  # type: ignore[misc]


def make_finding(
    kind: Kind,
    severity: Severity,
    tensor: str,
    ranks: tuple[int, ...],
    sentence: str,
    *,
    cause: str = "",
    fix: str = "",
    refs: tuple[str, ...] = (),
    **more: Any,
) -> Finding:
    """Return a finding with these words; `more` are its other attributes."""
    words = Words(tensor=tensor, why=cause, how=fix, references=refs)
    return words.finding(tensor, ranks, sentence, kind=kind, severity=severity, **more)
