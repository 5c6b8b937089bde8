"""`wrong-value` of gradients in which some micro-batches count more often than others, or not at all.

The unsharded model's gradient is known of every micro-batch. Where a gradient is a sum of these with other weights than
the right ones, which least squares finds, the weights say what went wrong: only the last one counts where gradients are
zeroed between them, the earlier ones count more often where each reduction sums what was reduced before.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from shardviz.dump.records.step import of_micro_batch
from shardviz.explain.gradients import (
    LostMicroBatches,
    MicroBatchesReducedAgain,
    RepeatedMicroBatch,
    UnclearedGradients,
    UnequalMicroBatches,
)
from shardviz.explain.templates import number
from shardviz.relate.tolerance import TELLING
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.compared import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding

    Found = tuple[Compared, Finding]
    Weights = tuple[float, ...]

DIGITS = 3
"""Weights are rounded to this many digits after the point."""

MAX_LISTED = 8


def of_micro_batches(evidence: Evidence, pairs: Sequence[Found]) -> tuple[list[Found], list[Finding]]:
    """Return the findings left of a step, and one for micro-batches that count wrongly."""
    unexplained = [result for result, finding in pairs if result.role == "grad" and finding.generic]
    weights = {result.name: of for result in unexplained if (of := _weights(evidence, result))}
    distinct = set(weights.values())
    has_output = any(result.role == "output" for result, _ in pairs)
    if len(distinct) != 1 or (has_output and not _repeated(min(distinct))):
        return list(pairs), []
    covered = [result for result in unexplained if result.name in weights or not _tells(evidence, result)]
    left = [(result, finding) for result, finding in pairs if result not in covered]
    if has_output:  # what was run is another batch, and its outputs and loss are right for that one
        left = [(result, finding) for result, finding in left if result.role == "grad" or not finding.generic]
    weighted = [result for result in unexplained if result.name in weights]
    ranks = {rank for result in weighted for rank in result.wrong}
    return left, [_finding(evidence, list(weights), min(distinct), tuple(sorted(ranks))).seen_in(*weighted)]


def _repeated(weights: Weights) -> tuple[int, ...]:
    """Return the micro-batches that were run in place of others, which do not count; as many runs as there are."""
    whole = all(weight == round(weight) >= 0 for weight in weights)
    if not whole or sum(weights) != len(weights) or 0 not in weights:
        return ()
    return tuple(index for index, weight in enumerate(weights) if weight > 1)


def _parts(evidence: Evidence, result: Compared) -> list[NDArray[np.float64]]:
    """Return the unsharded model's gradient of each micro-batch."""
    gradients: list[NDArray[np.float64]] = []
    while part := evidence.dump.find("reference", "activation", of_micro_batch(result.name, len(gradients))):
        gradients.append(evidence.dump.values(part.first, of_micro_batch(result.name, len(gradients))))
    return gradients


def _tells(evidence: Evidence, result: Compared) -> bool:
    parts = _parts(evidence, result)
    sizes = [float(np.max(np.abs(part), initial=0.0)) for part in parts]
    return bool(parts) and min(sizes) > TELLING * result.tolerance and result.wanted.size >= 2 * len(parts)


def _weights(evidence: Evidence, result: Compared) -> Weights:
    """Return how often each micro-batch counts, the same on all ranks; empty if that does not explain a gradient."""
    if not _tells(evidence, result) or len(result.wrong) < len(result.reduced):
        return ()
    parts = [part.reshape(result.wanted.shape) / len(_parts(evidence, result)) for part in _parts(evidence, result)]
    if not result.near(sum(parts, np.zeros(result.wanted.shape)), result.wanted):
        return ()
    weights = {_fitted(result, rank, parts) for rank in result.reduced}
    return weights.pop() if len(weights) == 1 else ()


def _fitted(result: Compared, rank: int, parts: Sequence[NDArray[np.float64]]) -> Weights:
    at = result.regions[rank].flat_ids(result.wanted.shape).ravel()
    columns = np.stack([part.ravel()[at] for part in parts], axis=1)
    got = result.reduced[rank].ravel()
    if len(at) < 2 * len(parts) or not np.all(np.isfinite(got)):
        return ()
    solved, _, num_ranks, _ = np.linalg.lstsq(columns, got, rcond=1e-9)
    weights = tuple(round(float(weight), DIGITS) + 0.0 for weight in solved)
    fits = result.near(columns @ np.array(weights), got, scale=max(map(abs, weights)))
    return weights if fits and num_ranks == len(parts) and len(set(weights)) > 1 else ()


def _finding(evidence: Evidence, names: list[str], weights: Weights, ranks: tuple[int, ...]) -> Finding:
    times = listed(map(number, weights), MAX_LISTED)
    what = "the gradient has" if len(names) == 1 else f"{len(names)} gradients have"
    return _cause(evidence, names, weights).finding(
        names[0] if len(names) == 1 else "",
        ranks,
        f"{what} the {len(weights)} micro-batches {times} times, respectively, and each should count once",
        details=(f"these are {listed(names, MAX_LISTED)}",) if len(names) > 1 else (),
    )


def _cause(evidence: Evidence, names: list[str], weights: Weights) -> Cause:
    """Return why micro-batches count with these weights."""
    counted = [index for index, weight in enumerate(weights) if weight]
    if again := _repeated(weights):
        return RepeatedMicroBatch(again)
    if counted == [len(weights) - 1]:
        return LostMicroBatches()
    if len(counted) < len(weights):
        return LostMicroBatches(tuple(index for index in range(len(weights)) if index not in counted))
    axes = _summed_again(evidence, names, weights)
    if weights == tuple(range(len(weights), 0, -1)):
        return UnclearedGradients(axes)
    if axes:
        return MicroBatchesReducedAgain(axes, weights[0] / weights[1])
    return UnequalMicroBatches()


def _summed_again(evidence: Evidence, names: list[str], weights: Weights) -> str:
    """Name the axes whose size is the ratio of each weight to the next; empty if there is none."""
    ratios = {round(one / other, DIGITS) for one, other in pairwise(weights)}
    mesh = evidence.gradients[names[0]].mesh
    fitting = [axis for axis in mesh.axes if mesh.axis_size(axis) > 1 and {mesh.axis_size(axis)} == ratios]
    return " or ".join(fitting) or ("all ranks" if ratios == {mesh.size} else "")
