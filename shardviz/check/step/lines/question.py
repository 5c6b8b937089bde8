"""Inside of which module ranks should look, once their step is in the dump."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.run import check_dump
from shardviz.check.step.lines.naming import module_to_open
from shardviz.dump.records.lines import STEP
from shardviz.errors import ShardvizError

if TYPE_CHECKING:
    from pathlib import Path


def modules_of(folder: Path) -> list[str]:
    """Return the first wrong module of a dump, the model itself only without another, or the step around the model."""
    try:
        findings = check_dump(folder).findings
    except ShardvizError:  # the command that reads the dump says so
        return []
    modules = [module for module in map(module_to_open, findings) if module is not None]
    inside = [module for module in modules if module != STEP]
    return [next(filter(None, inside), "")] if inside else modules[:1]
