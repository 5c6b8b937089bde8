"""Findings in given words, for tests of what is done with findings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardviz.explain.cause import Cause

if TYPE_CHECKING:
    from shardviz.explain.finding import Finding, Kind, Severity


class Told(Cause, listed=False):
    """A cause in given words, of no catalogue; `{tensor}` in them is the tensor's name."""

    name = "told"
    text: str = ""
    remedy: str = ""
    tensor: str = ""

    @property
    def ways(self) -> tuple[tuple[str, str], ...]:
        """The words of the cause and of the fix."""
        return ((self.text.replace("{tensor}", self.tensor), self.remedy.replace("{tensor}", self.tensor)),)


def finding_of(
    kind: Kind,
    severity: Severity,
    tensor: str,
    ranks: tuple[int, ...],
    sentence: str,
    *,
    cause: str = "",
    fix: str = "",
    refs: tuple[str, ...] = (),
    **attributes: Any,
) -> Finding:
    """Return a finding with a cause and a fix in given words."""
    found = Told(cause, fix, tensor).finding(tensor, ranks, sentence, kind=kind, severity=severity, **attributes)
    return replace(found, refs=refs)
