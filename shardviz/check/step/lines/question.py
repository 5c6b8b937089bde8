"""Inside of which module ranks should look, once their step is in the dump."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.run import check_dump
from shardviz.check.step.lines.naming import module_to_open

if TYPE_CHECKING:
    from pathlib import Path

QUESTION = f"{__name__}:module_of"
"""How a job names the function below."""


def module_of(folder: Path) -> str | None:
    """Return the first wrong module of a dump whose cause no rule names; None if there is none."""
    for finding in check_dump(folder).findings:
        module = module_to_open(finding)
        if module is not None:
            return module
    return None
