"""The layouts that ranks really hold, for findings about a model that was stamped and still has its ids."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.errors import ShardvizError
from shardviz.layout.notation import write

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardviz.check.order.case import Case
    from shardviz.check.order.laid_out import LaidOut
    from shardviz.explain.finding import Finding


def with_held(laid_out: LaidOut, findings: Iterable[Finding]) -> list[Finding]:
    """Return findings with the layout that their ranks hold, read from the ids in a stamped model."""
    return [finding if finding.held else replace(finding, held=_held(laid_out, finding)) for finding in findings]


def _held(laid_out: LaidOut, finding: Finding) -> str:
    """Return the layout in which a tensor is held; empty if its values are not ids, or no longer."""
    try:
        cases = laid_out.cases(laid_out.dump.stamped[finding.tensor], finding.tensor)
        case = next(case for case in cases if {*finding.ranks} & {*case.mesh.ranks})
    except (KeyError, StopIteration, ShardvizError):
        return ""
    if not case.held:
        return "a layout that the notation cannot express" if _has_ids(case) else ""
    return write(case.held, case.tensor.dtype)


def _has_ids(case: Case) -> bool:
    """Whether every value held is an id of this tensor."""
    return bool(case.regions or case.ids) and all((ids > 0).all() for ids in case.ids.values())
