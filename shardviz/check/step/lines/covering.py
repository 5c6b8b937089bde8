"""What a line's fault says besides its cause: which weights it explains, too, and which module is right."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.step.lines.around import results_of
from shardviz.explain.finding import Finding
from shardviz.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardviz.check.report import NotChecked
    from shardviz.check.step.lines.calls import Lines
    from shardviz.check.step.lines.fault import Fault


def without_covered(results: Sequence[Finding | NotChecked], faults: Iterable[Fault]) -> list[Finding | NotChecked]:
    """Return results, with those about weights that a line's fault covers inside of the finding of that line."""
    for fault in (fault for fault in faults if fault.covers):
        of_line = [one for one in results if isinstance(one, Finding) and one.explanation == fault.cause]
        covered = [
            one for one in results if isinstance(one, Finding) and one not in of_line and _is_covered(one, fault)
        ]
        if of_line and covered:
            names = [one.tensor for one in covered]
            more = f", and {counted(len(names) - 1, 'other')}" if names[1:] else ""
            so = f"so is the gradient of {names[0]}{more}"
            whole = replace(of_line[0], details=(*of_line[0].details, so), others=(*of_line[0].others, *covered))
            results = [whole if one is of_line[0] else one for one in results if one not in covered]
    return list(results)


def _is_covered(finding: Finding, fault: Fault) -> bool:
    results = results_of(finding)
    are_gradients = bool(results) and all(result.role == "grad" for result in results)
    return are_gradients and {result.name for result in results} <= {*fault.covers}


def without_module(finding: Finding, lines: Lines, fault: Fault) -> Finding:
    """Return a finding that doesn't call a module of torch's own the first wrong one, if a line after it is first.

    What such a module returns may be a rank's own by intention, such as rows that the line after it masks.
    """
    begin = f"{lines.asked_module} is the first wrong module"
    calls = [call.order for call in lines.asked_calls]
    here = (call.order for call in lines.calls if (call.line, call.function) == (fault.line, fault.function))
    if not calls or min(here, default=-1) <= max(calls):
        return finding
    return replace(finding, details=tuple(detail for detail in finding.details if not detail.startswith(begin)))
