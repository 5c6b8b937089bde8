"""Judge whether the module that is named first is the faulty one, and the cause the right one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.bugs.running import prose

if TYPE_CHECKING:
    from shardviz.check.report import Report
    from shardviz.explain.finding import Finding
    from tests.bugs.places.fault import Fault

LOOK_AT = re.compile(r"look at ([\w.]+) first|\b([\w.]+) is the first (?:wrong )?module")


@dataclass(frozen=True)
class Verdict:
    """How the tool did on one fault.

    Attributes:
        place: The module that the first finding names; empty where there is none.
        is_found: Whether there is any finding.
        is_placed: Whether it is the faulty one.
        is_explained: Whether what is said of it names the cause, and nothing that is untrue.
        report: All that was said; a line where the run ended in an error.
    """

    place: str
    is_found: bool
    is_placed: bool
    is_explained: bool
    report: Report | str


def verdict_on(fault: Fault, report: Report | str) -> Verdict:
    """Judge what was said of a fault."""
    if isinstance(report, str) or not report.findings:
        return Verdict("", False, False, False, report)
    first = report.findings[0]
    place, said = place_of(first), prose(first).lower()
    never = any(word.lower() in prose(one).lower() for one in report.findings for word in fault.never)
    words = all(any(choice.lower() in said for choice in word.split("|")) for word in fault.words)
    return Verdict(place, True, place in fault.places, words and not never, report)


def place_of(finding: Finding) -> str:
    """Return the module that a finding names first: the one it says so of, else that of its tensor."""
    if getattr(finding, "module", ""):
        return finding.module
    told = LOOK_AT.search(prose(finding))
    if told is not None:
        return told[1] or told[2]
    name = finding.tensor
    return name.rpartition(".")[0] if name.rpartition(".")[2] in ("weight", "bias", "table") else name
