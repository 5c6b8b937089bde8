"""Findings about weights that a line's fault explains, too: the line's finding has them inside."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.step.lines.around import results_of
from shardviz.explain.finding import Finding
from shardviz.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardviz.check.report import NotChecked
    from shardviz.check.step.lines.fault import Fault


def without_covered(results: Sequence[Finding | NotChecked], faults: Iterable[Fault]) -> list[Finding | NotChecked]:
    """Return results, with those about weights that a line's fault covers inside of the finding of that line."""
    for fault in (fault for fault in faults if fault.covers):
        of_line = [one for one in results if isinstance(one, Finding) and one.explanation == fault.cause]
        covered = [
            one for one in results if isinstance(one, Finding) and one not in of_line and _is_covered(one, fault)
        ]
        if len(of_line) == 1 and covered:
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
