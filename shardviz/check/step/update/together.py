"""What is found of weights, states and buffers after the optimizer's step, each cause once.

Findings of one cause become the first of them with the names of the others. What no rule explains is left out beside
what one does: a wrong state makes a wrong weight.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.finding import Finding, NotChecked
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

MAX_LISTED = 4


def together(results: Iterable[Finding | NotChecked]) -> Iterator[Finding | NotChecked]:
    """Yield every cause once, and the checks that could not be made as they are."""
    results = list(results)
    yield from (result for result in results if isinstance(result, NotChecked))
    by_cause: dict[tuple[object, ...], list[Finding]] = {}
    for result in results:
        if isinstance(result, Finding):
            key = (result.kind, result.severity, result.cause, result.fix, result.generic)
            by_cause.setdefault(key, []).append(result)
    explained = any(not findings[0].generic for findings in by_cause.values())
    left_out = [one.tensor for found in by_cause.values() if found[0].generic and explained for one in found]
    if left_out:
        why = f"{listed(left_out, MAX_LISTED)} after the optimizer's step: other than the unsharded model's, perhaps"
        yield NotChecked("", f"{why} because of what is found of others", "step")
    yield from (_joined(findings) for findings in by_cause.values() if not (findings[0].generic and explained))


def _joined(findings: Sequence[Finding]) -> Finding:
    first, others = findings[0], [finding.tensor for finding in findings[1:]]
    if not others:
        return first
    alike = f"likewise {listed(others, MAX_LISTED)} ({len(findings)} tensors in all)"
    ranks = tuple(sorted({rank for finding in findings for rank in finding.ranks}))
    return replace(first, ranks=ranks, details=(*first.details, alike))
