"""Inside of which module ranks should look, once their step is in the dump."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.run import check_dump
from shardviz.check.step.lines.naming import module_to_open
from shardviz.errors import ShardvizError

if TYPE_CHECKING:
    from pathlib import Path


def module_of(folder: Path) -> str | None:
    """Return the first wrong module of a dump, the model itself only without another; None if there is none."""
    try:
        findings = check_dump(folder).findings
    except ShardvizError:  # the command that reads the dump says so
        return None
    modules = [module for module in map(module_to_open, findings) if module is not None]
    return next(filter(None, modules), modules[0] if modules else None)
