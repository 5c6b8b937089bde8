"""Gradients in which some terms of the loss count more often than others, or not at all, or are another number.

The unsharded model's gradient is known of every term. One weight for each term that makes all wrong gradients, which
least squares finds, says how often it counts. Where there are no such weights, and all gradients are right that other
terms alone reach, the one term that reaches all wrong ones is computed otherwise.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from shardviz.dump.records.step import of_loss_term
from shardviz.explain.losses import MiscountedTerm, TermOfPart
from shardviz.explain.templates import number, times_text
from shardviz.relate.factors import ratio_near
from shardviz.relate.tolerance import TELLING, near_ratio
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.compared import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.explain.finding import Finding

    Found = tuple[Compared, Finding]
    Terms = Mapping[str, Sequence[NDArray[np.float64]]]

MAX_LISTED = 4


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
    weights = _weights(evidence, wrong, terms, count)
    if weights:
        return [], [_miscounted(evidence, weights, [result.name for result in wrong], ranks)]
    odd = _odd_term(evidence, wrong, terms, count) if not evidence.loss_is_right else None
    if odd is None:
        return list(pairs), []
    return [], [_of_part(evidence, odd, count, [result.name for result in wrong], ranks)]


def _terms(evidence: Evidence, result: Compared) -> list[NDArray[np.float64]]:
    """Return the unsharded model's gradient of each term of the loss."""
    gradients: list[NDArray[np.float64]] = []
    while part := evidence.dump.find("reference", "activation", of_loss_term(result.name, len(gradients))):
        values = evidence.dump.values(part.first, of_loss_term(result.name, len(gradients)))
        gradients.append(values.reshape(result.wanted.shape))
    return gradients if gradients and result.near(sum(gradients, np.zeros(result.wanted.shape)), result.wanted) else []


def _weights(evidence: Evidence, wrong: Sequence[Compared], terms: Terms, count: int) -> tuple[Fraction, ...]:
    """Return how often each term counts in all gradients; empty if that explains none, or all count alike."""
    columns, got = [], []
    for result in wrong:
        for rank, values in result.reduced.items():
            at = result.regions[rank].flat_ids(result.wanted.shape).ravel()
            columns.append(np.stack([part.ravel()[at] for part in terms[result.name]], axis=1))
            got.append(values.ravel())
    matrix, held = np.concatenate(columns), np.concatenate(got)
    if len(held) < 4 * count or not np.all(np.isfinite(held)):
        return ()
    solved, _, num_ranks, _ = np.linalg.lstsq(matrix, held, rcond=1e-9)
    most, near = (
        wrong[0].mesh.size * max(evidence.activations.num_micro_batches, 1),
        near_ratio(wrong[0].rounding.epsilon),
    )
    sizes = [float(np.max(np.abs(matrix[:, at]), initial=0.0)) for at in range(count)]
    if num_ranks < count or min(sizes) <= TELLING * max(result.tolerance for result in wrong):
        return ()
    weights = [_ratio(float(weight), most, near) for weight in solved]
    ratios = tuple(weight for weight in weights if weight is not None)
    made = matrix @ np.array([float(weight) for weight in ratios]) if len(ratios) == count else held + np.inf
    allowed = max(result.tolerance for result in wrong) * max(map(float, map(abs, ratios)), default=1.0)
    is_made = bool(np.all(np.abs(made - held) <= max(allowed, near * max(sizes))))
    return ratios if is_made and len(set(ratios)) > 1 else ()


def _ratio(weight: float, most: int, near: float) -> Fraction | None:
    return Fraction(0) if abs(weight) <= near else ratio_near(weight, most, near)


def _odd_term(evidence: Evidence, wrong: Sequence[Compared], terms: Terms, count: int) -> int | None:
    """Return the one term that reaches all wrong gradients, if each other one alone reaches a right one."""
    names = {one.name for one in wrong}

    def reach(name: str) -> set[int]:
        tolerance = evidence.gradients[name].tolerance
        return {at for at, part in enumerate(terms[name]) if float(np.max(np.abs(part), initial=0.0)) > tolerance}

    right = [reach(name) for name in terms if name not in names]
    odd = set.intersection(*(reach(name) for name in names)) - set().union(*right)
    others = set(range(count)) - odd
    return odd.pop() if len(odd) == 1 and others <= set().union(*right) else None


def _named(evidence: Evidence, at: int) -> str:
    """Say which term of the loss, with its value in the unsharded step."""
    value = evidence.dump.find("reference", "activation", of_loss_term("loss", at))
    size = "" if value is None else f", {number(float(evidence.dump.values(value.first, of_loss_term('loss', at))))}"
    return f"term {at + 1} of the loss{size}"


def _miscounted(evidence: Evidence, weights: Sequence[Fraction], names: list[str], ranks: tuple[int, ...]) -> Finding:
    odd = [at for at, weight in enumerate(weights) if weight != 1]
    times = listed((f"{_named(evidence, at)}, counts {times_text(weights[at])} its weight" for at in odd), MAX_LISTED)
    cause = MiscountedTerm(odd[0] + 1, len(weights), weights[odd[0]])
    return cause.finding(
        "loss",
        ranks,
        f"in all wrong gradients {times} in the unsharded model",
        details=(f"these are {listed(names, MAX_LISTED)}",),
    )


def _of_part(evidence: Evidence, odd: int, count: int, names: list[str], ranks: tuple[int, ...]) -> Finding:
    return TermOfPart(odd + 1, count).finding(
        "loss",
        ranks,
        f"{_named(evidence, odd)} in the unsharded model, is wrong: only gradients that the term reaches are wrong, "
        f"{listed(names, MAX_LISTED)}",
    )
