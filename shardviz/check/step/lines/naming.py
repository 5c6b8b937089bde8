"""Which findings have no named cause."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.explain.modules import UnexplainedBetweenModules, UnexplainedModule, UnexplainedModuleBackward, UngatheredInput

if TYPE_CHECKING:
    from shardviz.explain.finding import Finding

OPEN = (UnexplainedModule, UnexplainedModuleBackward, UngatheredInput)


def module_to_open(finding: Finding) -> str | None:
    """Return the module whose lines may hold a finding's cause; None if the finding names no module."""
    if isinstance(finding.explanation, UnexplainedBetweenModules):
        return finding.module.rpartition(".")[0]
    return finding.module if finding.module or isinstance(finding.explanation, OPEN) else None
