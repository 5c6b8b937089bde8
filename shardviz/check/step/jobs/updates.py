"""What the optimizers of two jobs make of equal gradients: how a step moves weights, in sentences.

Where a gradient is nearly zero, rounding decides what an optimizer makes of it: Adam divides by its size. If steps were
made before, what the optimizer keeps of an element may be nearly zero, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.report import NotChecked
from shardviz.check.step.comparison import Compared, compared, whole_of
from shardviz.check.step.evidence import Evidence
from shardviz.check.step.jobs.assembly import Assembling, Weights, add_gradients, add_weight, are_whole
from shardviz.check.step.jobs.starts import by_name
from shardviz.check.step.update.compare import finding_of
from shardviz.relate.tolerance import NOISE, OPPOSITE, UPDATE_OF_JOB
from shardviz.relate.values import farthest, magnitude
from shardviz.text import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from shardviz.check.step.jobs.earlier import History
    from shardviz.check.step.jobs.whole_job import WholeJob
    from shardviz.check.step.trace.traces import Weight
    from shardviz.explain.finding import Finding


@dataclass(frozen=True, slots=True)
class Updates:
    """What became of a step's updates.

    Attributes:
        results: What differs, or was not compared.
        num_right: How many weights have the same values after the step.
    """

    results: tuple[Finding | NotChecked, ...] = ()
    num_right: int = 0


def updates_of(job: WholeJob, weights: Weights) -> Updates:
    """Compare the weights that ranks have after the step with the other job's."""
    parts = by_name(job.job.ranks, "param", "updated")
    names = [name for name in weights.updated if name in parts]
    whole = [name for name in names if are_whole(weights.params[name], weights.updated[name], *parts[name].values())]
    if not whole:
        return Updates()
    assembling = Assembling(job.job, job.mesh)
    add_gradients(assembling, weights)
    first = min(job.job.ranks)
    for name in whole:
        add_weight(assembling, first, name, ("reference", "param"), weights.params[name])
        add_weight(assembling, first, name, ("updated", "param"), weights.updated[name])
        for rank, weight in parts[name].items():
            add_weight(assembling, rank, name, ("step", "param"), weight, weights.belongings.get(name))
    dump = assembling.dump()
    evidence = Evidence(dump, tuple(compared(dump)))
    before = by_name(job.job.ranks, "param")
    results = [
        _result(evidence, weight, before[weight.name], weights.histories.get(weight.name))
        for weight in compared(dump, ("param",), reference="updated")
    ]
    others = [result for result in results if result is not None]
    if len(whole) < len(names):
        why = f"{counted(len(names) - len(whole), 'weight')} after the optimizer's step: only a sample of each was kept"
        others.append(NotChecked("", why, "step"))
    return Updates(tuple(others), results.count(None))


def _result(
    evidence: Evidence, weight: Compared, before: Mapping[int, Weight], history: History | None
) -> Finding | NotChecked | None:
    """Return what differs in a weight after the step; None if it is the other job's."""
    if weight.incomparable:
        return NotChecked(weight.name, f"the weight after the optimizer's step: {weight.incomparable}", "step")
    whole = whole_of(evidence.dump, "param", weight.name)
    assert whole is not None, "it was added with the weight"
    start = whole.reshape(weight.wanted.shape)
    moves = {rank: _moves(weight, rank, start, before.get(rank)) for rank in weight.reduced}
    moved = max(magnitude(move) for both in moves.values() for move in both)
    offs = {rank: held - wanted for rank, (held, wanted) in moves.items()}
    if history is not None and history.allow(offs.values(), moved):
        return None
    far = {rank: _farthest(evidence, weight, rank, off, moved) for rank, off in offs.items()}
    wrong = {rank: element for rank, element in far.items() if element is not None}
    if wrong and weight.name not in evidence.gradients and moved:
        why = "the weight after the optimizer's step: it differs, and its gradient was not compared"
        return NotChecked(weight.name, why, "step")
    return finding_of(evidence, weight, wrong).seen_in(weight) if wrong else None


def _moves(
    weight: Compared, rank: int, whole: NDArray[np.float64], before: Weight | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return how far the step moves each element of a rank's weight, and of the other job's.

    Args:
        whole: The other job's weight before the step.
        before: The rank's; if it is not known, the other job's is taken for it.
    """
    held, wanted, start = weight.reduced[rank], weight.wanted_of(rank), weight.part(whole, rank)
    own = before.values.values if before is not None and before.values is not None else start
    return held - (own if own.shape == held.shape else start), wanted - start


def _farthest(
    evidence: Evidence, weight: Compared, rank: int, off: NDArray[np.float64], moved: float
) -> tuple[float, float] | None:
    """Return the element of a rank's weight that is farthest off, and what it should be; None if all are right.

    Args:
        off: How far apart the step moves each element in the two jobs.
        moved: How far it moves one at most, in either.
    """
    held, expected = weight.reduced[rank], weight.wanted_of(rank)
    rounded = weight.rounding.epsilon * magnitude(weight.wanted)
    allowed = moved * np.minimum(UPDATE_OF_JOB + NOISE * _errors(evidence, weight, rank), OPPOSITE) + rounded
    off = np.where(np.abs(off) <= allowed, -1.0, np.nan_to_num(np.abs(off), nan=np.inf))
    if not (off > 0).any():
        return None
    at = np.unravel_index(np.argmax(off), off.shape)
    return float(held[at]), float(expected[at])


def _errors(evidence: Evidence, weight: Compared, rank: int) -> NDArray[np.float64]:
    """Return how far each element's gradient is off, relative to itself, as far as the largest error of any shows."""
    gradient = evidence.gradients.get(weight.name)
    if gradient is None or gradient.incomparable or gradient.wanted.size != weight.wanted.size:
        return np.zeros(weight.reduced[rank].shape)
    error = max(farthest(held, gradient.wanted_of(other)) for other, held in gradient.reduced.items())
    sizes = np.abs(weight.part(gradient.wanted, rank))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(sizes > 0, error / sizes, np.inf if error else 0.0)
