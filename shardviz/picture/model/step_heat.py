"""What ranks have at the first wrong place, beside the unsharded model's, and the difference: three fields of numbers.

A field has the last dim across and all others down, and is made small by taking the largest of each block.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.check.step.compared import compared
from shardviz.check.step.evidence import Evidence
from shardviz.check.step.trace.causes import compared_at
from shardviz.layout.notation import write
from shardviz.picture.model.step_tree import StepTree, step_tree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.compared import Compared
    from shardviz.check.step.runs.departure import StepDifference
    from shardviz.dump.dump import Dump


ROWS, COLUMNS = 8, 16
"""A field has no more of them."""

MOST_RANKS = 4
"""So many sets of ranks that have the same are shown."""

MAX_LAYOUTS = 16
"""Layouts that fit the shapes and are looked at: that one is drawn under which ranks that share a part agree most."""


@dataclass(frozen=True)
class StepHeat:
    """What some ranks have, which is the same on all of them.

    Attributes:
        ranks: The ranks.
        layout: How ranks share the whole, in the notation; empty if that is not known.
        shape: The shape of what each of them has.
        has: The sizes of their numbers, in blocks.
        due: The sizes of the unsharded model's.
        off: How far apart the two are.
        allowed: How far an element may be off.
        is_wrong: Whether they are off.
    """

    ranks: tuple[int, ...]
    layout: str
    shape: tuple[int, ...]
    has: NDArray[np.float64]
    due: NDArray[np.float64]
    off: NDArray[np.float64]
    allowed: float
    is_wrong: bool

    @property
    def most(self) -> float:
        """The largest size in either."""
        return max(_largest(self.has), _largest(self.due))

    @property
    def farthest(self) -> float:
        """How far the element is off that is off farthest."""
        return _largest(self.off)

    def levels(self, field: str, count: int) -> list[list[int]]:
        """Return a field as whole numbers below a count: of sizes to the largest, of differences to the farthest.

        Differences that rounding allows are 0, and all others at least 1.
        """
        values: NDArray[np.float64] = getattr(self, field)
        top = self.farthest if field == "off" else self.most
        scaled = np.nan_to_num(values / (top or 1.0), nan=1.0, posinf=1.0)
        numbers = np.clip(np.rint(scaled * (count - 1)), 0, count - 1).astype(int)
        if field == "off":
            numbers = np.where(values <= self.allowed, 0, np.maximum(numbers, 1))
        rows: list[list[int]] = numbers.tolist()
        return rows

    def to_json(self) -> dict[str, Any]:
        """Return the object that `shardviz show --step --format json` prints."""
        fields = {name: _listed(getattr(self, name)) for name in ("has", "due", "off")}
        return {"ranks": list(self.ranks), "layout": self.layout, "shape": list(self.shape), **fields}


def _listed(field: NDArray[np.float64]) -> list[list[float | None]]:
    return [[float(value) if np.isfinite(value) else None for value in row] for row in field]


def _largest(field: NDArray[np.float64]) -> float:
    return float(np.max(field, initial=0.0, where=np.isfinite(field)))


def step_heats(dump: Dump) -> list[StepHeat]:
    """Return what ranks have at the first wrong place; nothing if there is none, or its values are not kept."""
    return heats_of(Evidence(dump, tuple(compared(dump))))


def heats_of(evidence: Evidence) -> list[StepHeat]:
    """Return what ranks have at the first wrong place that evidence shows."""
    first = evidence.divergence
    if first is None:
        return []
    # With two axes of one size several layouts fit the shapes; under a wrong one copies of a part would differ.
    fitting = [fit for fit in islice(compared_at(evidence, evidence.calls, first), MAX_LAYOUTS) if fit.values]
    one = min(fitting, key=lambda fit: len(fit.copies_differ_along), default=None)
    return _heats(one) if one is not None and not one.incomparable else []


def _heats(result: Compared) -> list[StepHeat]:
    groups: dict[tuple[object, bytes], list[int]] = {}
    for rank, values in result.reduced.items():
        groups.setdefault((result.regions[rank], (values + 0.0).tobytes()), []).append(rank)
    wrong_first = sorted(groups.values(), key=lambda ranks: (ranks[0] not in result.wrong, ranks[0]))
    return [_heat(result, tuple(ranks)) for ranks in wrong_first[:MOST_RANKS] if result.reduced[ranks[0]].size]


def _heat(result: Compared, ranks: tuple[int, ...]) -> StepHeat:
    got, due = result.reduced[ranks[0]], result.wanted_of(ranks[0])
    layout = write(result.claimed) if result.claimed is not None else ""
    has, whole, off = (_blocks(np.abs(values)) for values in (got, due, got - due))
    return StepHeat(ranks, layout, got.shape, has, whole, off, result.tolerance, ranks[0] in result.wrong)


def _blocks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the largest of each block of values."""
    field = values.reshape(-1, values.shape[-1] if values.ndim else 1)
    rows = np.array_split(np.arange(field.shape[0]), min(ROWS, field.shape[0]))
    columns = np.array_split(np.arange(field.shape[1]), min(COLUMNS, field.shape[1]))
    return np.array([[np.max(field[np.ix_(down, across)]) for across in columns] for down in rows])


def step_of(step: StepDifference) -> tuple[StepTree | None, Sequence[StepHeat]]:
    """Return the tree and the numbers; no tree if no two jobs' steps were laid side by side."""
    steps = step.beside
    if steps is None:
        return None, ()
    tree = step_tree(steps.evidence.dump, steps.findings, steps.reference)
    return tree, heats_of(steps.evidence) if tree.finding is not None else ()


def step_json(step: StepDifference) -> dict[str, Any]:
    """Return the calls and numbers of a step, as `shardviz diff --format json` prints them."""
    tree, heats = step_of(step)
    if tree is None:
        return {}
    return {"calls": [root.to_json() for root in tree.roots], "heat": [heat.to_json() for heat in heats]}
