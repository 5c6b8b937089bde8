"""A job's step beside another job's, as a tree of its modules with the numbers of the first wrong one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardviz.picture.model.step_heat import StepHeat, heats_of
from shardviz.picture.model.step_tree import StepTree, step_tree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.check.step.runs.departure import StepDifference


def step_of(step: StepDifference) -> tuple[StepTree | None, Sequence[StepHeat]]:
    """Return the tree and the numbers; no tree where no two jobs' steps were laid side by side."""
    beside = step.beside
    if beside is None:
        return None, ()
    tree = step_tree(beside.evidence.dump, beside.findings, beside.reference)
    return tree, heats_of(beside.evidence) if tree.finding is not None else ()


def step_json(step: StepDifference) -> dict[str, Any]:
    """Return the calls and numbers of a step, as `shardviz diff --format json` prints them."""
    tree, heats = step_of(step)
    if tree is None:
        return {}
    return {"calls": [root.to_json() for root in tree.roots], "heat": [heat.to_json() for heat in heats]}
