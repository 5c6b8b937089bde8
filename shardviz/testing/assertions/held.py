"""The layouts that ranks really hold, for findings about a model that was stamped and still has its ids."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.order.case import cases_of
from shardviz.errors import ShardvizError
from shardviz.layout.notation import write

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardviz.check.finding import Finding
    from shardviz.check.order.case import Case
    from shardviz.dump.dump import Dump


def with_held(dump: Dump, findings: Iterable[Finding]) -> list[Finding]:
    """Return findings with the layout that their ranks hold, read from the ids in a stamped model."""
    return [finding if finding.held else replace(finding, held=_held(dump, finding)) for finding in findings]


def _held(dump: Dump, finding: Finding) -> str:
    """Return the layout in which a tensor is held; empty if its values are not ids, or no longer."""
    try:
        case = next(case for case in _cases(dump, finding.tensor) if {*finding.ranks} & {*case.mesh.ranks})
        if not case.held:
            return "a layout that the notation cannot express" if _has_ids(case) else ""
    except (StopIteration, ShardvizError):
        return ""
    return write(case.held, case.tensor.dtype)


def _cases(dump: Dump, name: str) -> Iterator[Case]:
    for tensor in dump.at("stamped"):
        if name in tensor.names:
            yield from cases_of(dump, tensor, name)


def _has_ids(case: Case) -> bool:
    """Whether every value held is an id of this tensor."""
    return bool(case.regions or case.ids) and all((ids > 0).all() for ids in case.ids.values())
