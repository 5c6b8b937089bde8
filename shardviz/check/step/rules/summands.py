"""Gradients that count micro-batches, or terms of the loss, unequally.

The unsharded model's gradient is known of every micro-batch and of every term. If wrong gradients are a sum of these
with other weights than the right ones, which least squares finds, the weights say what went wrong: only the last
micro-batch counts if gradients are zeroed between them, the earlier ones count more often if each reduction sums what
was reduced before. If there are no such weights, and all gradients are right that other terms alone reach, the one term
that reaches all wrong ones is computed otherwise.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.comparison import Compared, whole_of
from shardviz.check.step.rules.factors import Unreduced, unreduced_finding
from shardviz.dump.records.step import of_loss_term, of_micro_batch
from shardviz.explain.step.gradients import (
    LostMicroBatches,
    MicroBatchesReducedAgain,
    RepeatedMicroBatch,
    UnclearedGradients,
    UnequalMicroBatches,
)
from shardviz.explain.step.losses import MiscountedTerm, TermOfPart
from shardviz.explain.step.sums import GradientNotReduced
from shardviz.explain.templates import number, times_text
from shardviz.groups import the_only
from shardviz.layout.dtypes import itemsize
from shardviz.relate.factors import ratio_near
from shardviz.relate.measures import Reduction, columns_of, reduced_over, weights_between
from shardviz.relate.tolerance import FITTED, MANY, TELLING, near_ratio
from shardviz.relate.values import magnitude
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.comparison import Found
    from shardviz.check.step.evidence import Evidence
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding

    Parts = Sequence[NDArray[np.float64]]
    Weights = tuple[float, ...]

DIGITS = 3
"""Weights of micro-batches are rounded to this many digits after the point."""

SUMS = ("all_reduce", "reduce_scatter", "reduce")
ONCE = 1.5
"""Gradients of which ranks sum fewer times their bytes are summed once."""

MAX_LISTED = 8
MAX_TERMS = 4


def _parts_of(evidence: Evidence, name: str, named: Callable[[str, int], str]) -> list[NDArray[np.float64]]:
    """Return the unsharded model's gradient of each micro-batch, or of each term of the loss."""
    parts: list[NDArray[np.float64]] = []
    while (part := whole_of(evidence.dump, "activation", named(name, len(parts)))) is not None:
        parts.append(part)
    return parts


def of_micro_batches(evidence: Evidence, pairs: Sequence[Found]) -> tuple[list[Found], list[Finding]]:
    """Return the findings left of a step, and one for micro-batches that count wrongly."""
    unexplained = [result for result, finding in pairs if result.role == "grad" and finding.generic]
    weights = {result.name: of for result in unexplained if (of := _weights(evidence, result))}
    distinct = set(weights.values())
    has_output = any(result.role == "output" for result, _ in pairs)
    if len(distinct) != 1 or (has_output and not _repeated(min(distinct))):
        return list(pairs), []
    covered = [
        comparison
        for comparison in unexplained
        if comparison.name in weights or not _tells(comparison, _parts_of(evidence, comparison.name, of_micro_batch))
    ]
    remaining = [(result, finding) for result, finding in pairs if result not in covered]
    if has_output:  # what was run is another batch, and its outputs and loss are right for that one
        remaining = [(result, finding) for result, finding in remaining if result.role == "grad" or not finding.generic]
    weighted = [result for result in unexplained if result.name in weights]
    ranks = {rank for result in weighted for rank in result.wrong}
    others = [result.name for result in covered if result.name not in weights]
    finding = _of_weights(evidence, list(weights), min(distinct), tuple(sorted(ranks)), others)
    return remaining, [finding.seen_in(*weighted)]


def _repeated(weights: Weights) -> tuple[int, ...]:
    """Return the micro-batches that were run instead of others, which do not count."""
    whole = all(weight == round(weight) >= 0 for weight in weights)
    if not whole or sum(weights) != len(weights) or 0 not in weights:
        return ()
    return tuple(index for index, weight in enumerate(weights) if weight > 1)


def _tells(comparison: Compared, parts: Parts) -> bool:
    """Whether a part that counts wrongly would show in a gradient."""
    size = comparison.wanted.size
    times = FITTED if size >= MANY * len(parts) else TELLING
    return bool(parts) and min(map(magnitude, parts)) > times * comparison.tolerance and size >= 2 * len(parts)


def _weights(evidence: Evidence, comparison: Compared) -> Weights:
    """Return how often each micro-batch counts, the same on all ranks; empty if that does not explain a gradient."""
    parts = _parts_of(evidence, comparison.name, of_micro_batch)
    if not _tells(comparison, parts) or len(comparison.wrong) < len(comparison.reduced):
        return ()
    parts = [part.reshape(comparison.wanted.shape) / len(parts) for part in parts]
    if not comparison.near(sum(parts, np.zeros(comparison.wanted.shape)), comparison.wanted):
        return ()
    return the_only({_fitted(comparison, rank, parts) for rank in comparison.reduced}) or ()


def _fitted(comparison: Compared, rank: int, parts: Parts) -> Weights:
    columns, held = columns_of(comparison, parts, rank), comparison.reduced[rank].ravel()
    solved = weights_between(columns, held) if len(held) >= 2 * len(parts) else None
    if solved is None:
        return ()
    is_sure = min(map(magnitude, columns.T)) > TELLING * comparison.tolerance
    weights = tuple(round(float(weight), DIGITS if is_sure else 1) + 0.0 for weight in solved)
    fits = comparison.near(columns @ np.array(weights), held, scale=max(map(abs, weights)))
    return weights if fits and len(set(weights)) > 1 else ()


def _of_weights(
    evidence: Evidence, names: list[str], weights: Weights, ranks: tuple[int, ...], others: list[str]
) -> Finding:
    """Return the finding of gradients that have micro-batches so often, with those in which they can't be counted."""
    wrong = f"the gradient{'s' if len(others) > 1 else ''} of {listed(others, MAX_TERMS)}"
    verb = "are" if len(others) > 1 else "is"
    also = (
        (f"{wrong} {verb} wrong too, and too small to count micro-batches in, or of no linear layer",) if others else ()
    )
    times = listed(map(number, weights), MAX_LISTED)
    what = "the gradient has" if len(names) == 1 else f"{len(names)} gradients have"
    return _cause(evidence, names, weights).finding(
        names[0] if len(names) == 1 else "",
        ranks,
        f"{what} the {len(weights)} micro-batches {times} times instead of once each",
        details=((f"these are {listed(names, MAX_LISTED)}",) if len(names) > 1 else ()) + also,
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
    times = _times_reduced(evidence, names)
    if weights == tuple(range(len(weights), 0, -1)) and (not axes or times < len(weights)):
        return UnclearedGradients("" if 0 < times <= ONCE else axes)
    if axes:
        return MicroBatchesReducedAgain(axes, weights[0] / weights[1], weights[-1] > 1)
    return UnequalMicroBatches()


def _times_reduced(evidence: Evidence, names: list[str]) -> float:
    """Return how often a rank sums over others as many bytes as its gradients have."""
    gradients = evidence.dump.by_name("step", "grad")
    bodies = [gradients[name].first.body for name in names if name in gradients]
    size = sum(math.prod(body.local_shape) * itemsize(body.dtype) for body in bodies)
    collectives = next(iter(evidence.dump.files.ranks.values())).collectives
    reduced = sum(record.bytes for record in collectives if record.op in SUMS and record.axes)
    return reduced / max(size, 1)


def _summed_again(evidence: Evidence, names: list[str], weights: Weights) -> str:
    """Name the axes whose size is the ratio of each weight to the next; empty if there is none."""
    ratios = {round(weight / following, DIGITS) for weight, following in pairwise(weights)}
    mesh = evidence.gradients[names[0]].mesh
    fitting = [axis for axis in mesh.long_axes if {mesh.axis_size(axis)} == ratios]
    return " or ".join(fitting) or ("all ranks" if ratios == {mesh.size} else "")


def of_loss_terms(evidence: Evidence, pairs: Sequence[Found]) -> tuple[list[Found], list[Finding]]:
    """Return the findings left of a step, and one for a term of the loss that counts wrongly."""
    terms = {name: _terms(evidence, result) for name, result in evidence.gradients.items()}
    count = max(map(len, terms.values()), default=0)
    is_output = any(result.role == "output" for result, _ in pairs)
    open_ = [(result, finding) for result, finding in pairs if finding.generic or result.role == "grad"]
    wrong = [result for result, _ in open_ if result.role == "grad"]
    is_split = count > 1 and all(len(gradients) == count for gradients in terms.values())
    if is_output or not wrong or not is_split or len(open_) != len(pairs):
        return list(pairs), []
    ranks = tuple(sorted({rank for result in wrong for rank in result.wrong}))
    weights = _weights_of_terms(evidence, wrong, terms, count)
    if weights:
        return [], [_miscounted(evidence, weights, [result.name for result in wrong], ranks)]
    odd = _odd_term(evidence, wrong, terms, count) if not evidence.loss_is_right else None
    if odd is None:
        return list(pairs), []
    names = listed([result.name for result in wrong], MAX_TERMS)
    which = f"{_named(evidence, odd)} in the unsharded model"
    sentence = f"{which}, is wrong: only gradients that the term reaches are wrong, {names}"
    return [], [TermOfPart(odd + 1, count).finding("loss", ranks, sentence)]


def _terms(evidence: Evidence, comparison: Compared) -> Parts:
    """Return the unsharded model's gradient of each term of the loss."""
    parts = [part.reshape(comparison.wanted.shape) for part in _parts_of(evidence, comparison.name, of_loss_term)]
    return parts if parts and comparison.near(sum(parts, np.zeros(comparison.wanted.shape)), comparison.wanted) else []


def _weights_of_terms(
    evidence: Evidence, wrong: Sequence[Compared], terms: Mapping[str, Parts], count: int
) -> tuple[Fraction, ...]:
    """Return how often each term counts in all gradients; empty if that explains none, or all count alike."""
    places = [(result, rank) for result in wrong for rank in result.reduced]
    columns = np.concatenate([columns_of(result, terms[result.name], rank) for result, rank in places])
    held = np.concatenate([result.reduced[rank].ravel() for result, rank in places])
    solved = weights_between(columns, held) if len(held) >= 4 * count else None
    sizes = [magnitude(columns[:, at]) for at in range(count)]
    tolerance = max(result.tolerance for result in wrong)
    if solved is None or min(sizes) <= TELLING * tolerance:
        return ()
    most = wrong[0].mesh.size * max(evidence.activations.num_micro_batches, 1)
    near = near_ratio(wrong[0].rounding.epsilon)
    weights = (Fraction(0) if abs(weight) <= near else ratio_near(weight, most, near) for weight in solved.tolist())
    ratios = tuple(weight for weight in weights if weight is not None)
    if len(ratios) < count or len(set(ratios)) == 1:
        return ()
    allowed = tolerance * max(map(float, map(abs, ratios)))
    fitted = columns @ np.array([float(ratio) for ratio in ratios])
    return ratios if bool(np.all(np.abs(fitted - held) <= max(allowed, near * max(sizes)))) else ()


def _odd_term(evidence: Evidence, wrong: Sequence[Compared], terms: Mapping[str, Parts], count: int) -> int | None:
    """Return the one term that reaches all wrong gradients, if each other one alone reaches a right one."""
    names = {result.name for result in wrong}

    def reach(name: str) -> set[int]:
        tolerance = evidence.gradients[name].tolerance
        return {at for at, part in enumerate(terms[name]) if magnitude(part) > tolerance}

    right = [reach(name) for name in terms if name not in names]
    odd = set.intersection(*(reach(name) for name in names)) - set().union(*right)
    others = set(range(count)) - odd
    return odd.pop() if len(odd) == 1 and others <= set().union(*right) else None


def _named(evidence: Evidence, at: int) -> str:
    """Say which term of the loss, with its value in the unsharded step."""
    value = whole_of(evidence.dump, "activation", of_loss_term("loss", at))
    size = "" if value is None else f", {number(float(value))}"
    return f"term {at + 1} of the loss{size}"


def _miscounted(evidence: Evidence, weights: Sequence[Fraction], names: list[str], ranks: tuple[int, ...]) -> Finding:
    odd = [at for at, weight in enumerate(weights) if weight != 1]
    times = listed((f"{_named(evidence, at)}, counts {times_text(weights[at])} its weight" for at in odd), MAX_TERMS)
    cause = MiscountedTerm(odd[0] + 1, len(weights), weights[odd[0]])
    return cause.finding(
        "loss",
        ranks,
        f"in all wrong gradients {times} in the unsharded model",
        details=(f"these are {listed(names, MAX_TERMS)}",),
    )


def reduced_as_others(pairs: Sequence[Found]) -> list[Found]:
    """Return findings, with the cause of the others for copies whose sum is 0 but for rounding: so is their mean."""
    explained = {finding.explanation for _, finding in pairs if isinstance(finding.explanation, GradientNotReduced)}
    cause = the_only(explained)
    if cause is None or cause.ratio != 1:
        return list(pairs)
    kind: Reduction = "mean" if cause.op == "AVG" else "sum"
    fits = {result.name for result, _ in pairs if _fits_zeros(result, kind, cause.axes)}
    return [
        (result, unreduced_finding(cause, Unreduced(result, kind, cause.axes)) if result.name in fits else finding)
        for result, finding in pairs
    ]


def _fits_zeros(result: Compared, kind: Reduction, axes: tuple[str, ...]) -> bool:
    is_zero = result.role == "grad" and magnitude(result.wanted) <= result.tolerance
    if not is_zero or not {*axes} <= {*result.copies_differ_along}:
        return False
    reduced = reduced_over(result, kind, axes)
    return bool(reduced) and all(result.is_right(rank, values) for rank, values in reduced.items())
