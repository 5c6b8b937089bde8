"""How often each micro-batch's term is in gradients that are wrong, although every module's backward is right.

A linear layer's gradient is made of what the layer is given and of what comes back to it. Both are recorded, so the
term of each micro-batch can be computed, and a gradient that is a sum of multiples of these terms shows the multiples.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from shardviz.dump.records.trace import Place
from shardviz.explain.step.scales import MicroBatchesWeighed
from shardviz.explain.templates import number
from shardviz.groups import the_only
from shardviz.relate.tolerance import STEP
from shardviz.text import listed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.check.step.comparison import Compared
    from shardviz.check.step.jobs.assembly import JobEvidence
    from shardviz.check.step.trace.judging import Judging
    from shardviz.check.step.trace.traces import Point
    from shardviz.explain.finding import Finding

    Values = NDArray[np.float64]

LINEAR = "Linear"
MAX_LISTED = 4
LEAST_LAYERS = 2
"""Fewer layers do not show that a number belongs to the micro-batch and not to the layer."""


def of_accumulated(evidence: JobEvidence, judging: Judging) -> Finding | None:
    """Return the finding if the gradients of linear layers have each micro-batch's term times one number of its own.

    Most gradients have to be wrong; ranks have equal micro-batches, as many as they call the model.
    """
    count = evidence.micro_batches
    gradients = {name: gradient for name, gradient in evidence.gradients.items() if np.any(gradient.wanted)}
    wrong = [gradient for gradient in gradients.values() if gradient.wrong]
    if count < 2 or 2 * len(wrong) <= len(gradients):
        return None
    every = [_numbers(gradient, terms) for gradient in wrong if (terms := _terms(judging, gradient.name, count))]
    numbers = [numbers for numbers in every if numbers]
    shared = the_only({tuple(map(number, of_layer)) for of_layer in numbers})
    if shared is None or len(numbers) < max(LEAST_LAYERS, len(every)) or len(set(shared)) < 2:
        return None
    again = _times_again(numbers[0])
    again = again if again in (*judging.mesh.shape, judging.mesh.size) else 0
    cause = MicroBatchesWeighed(again, is_lost=not again and "0" in shared)
    listing = listed((f"{times} times the one of micro-batch {at + 1}" for at, times in enumerate(shared)), MAX_LISTED)
    ranks = tuple(sorted(set().union(*(gradient.wrong for gradient in wrong))))
    sentence = (
        f"every module's inputs, outputs and their gradients are right, and the gradients of {len(every)} linear "
        f"layers are a sum of terms: {listing}"
    )
    return cause.finding(wrong[0].name, ranks, sentence, kind="wrong-scale").seen_in(wrong[0])


def _terms(judging: Judging, weight: str, count: int) -> list[Values]:
    """Return the term of each micro-batch, all ranks' together; none if they cannot be computed."""
    module = weight.rpartition(".")[0]
    terms: list[Values] = []
    for points in judging.ranks.values():
        sides = [points.get(Place(module, 0, what, 0)) for what in ("input", "gradient of output")]
        parts = [_parts(point, count) for point in sides if point is not None and point.type == LINEAR]
        if weight != f"{module}.weight" or len(parts) < len(sides) or not all(parts):
            return []
        of_rank = [back.T @ given for given, back in zip(*parts, strict=True)]
        terms = [term + own for term, own in zip(terms, of_rank, strict=True)] if terms else of_rank
    return terms


def _parts(point: Point, count: int) -> list[Values]:
    """Return the rows of each micro-batch; none if some were not kept."""
    values = point.values
    if values is None or not values.is_whole or point.dim or not values.shape or values.shape[0] % count:
        return []
    return [part.reshape(-1, values.shape[-1]) for part in np.split(values.values, count)]


def _numbers(gradient: Compared, terms: list[Values]) -> tuple[float, ...]:
    """Return what each term is multiplied by in a gradient, on all ranks; none if it is no such sum."""
    whole = sum(terms[1:], terms[0])
    scale = float(np.vdot(whole, gradient.wanted) / (np.vdot(whole, whole) or 1.0))
    if whole.shape != gradient.wanted.shape or not _is_near(scale * whole, gradient.wanted):
        return ()
    fits = {_fit(gradient, rank, [scale * term for term in terms]) for rank in gradient.reduced}
    return the_only(fits) or ()


def _fit(gradient: Compared, rank: int, terms: list[Values]) -> tuple[float, ...]:
    held = gradient.reduced[rank]
    columns = np.stack([gradient.part(term, rank).ravel() for term in terms], axis=1)
    numbers, *_ = np.linalg.lstsq(columns, held.ravel(), rcond=None)
    if not _is_near(columns @ numbers, held.ravel()):
        return ()
    return tuple(round(float(value), 3) + 0.0 for value in numbers)


def _is_near(first: Values, second: Values) -> bool:
    return bool(np.linalg.norm(first - second) <= STEP * np.linalg.norm(second))


def _times_again(numbers: tuple[float, ...]) -> int:
    """Return by how many each term is multiplied once more than the next one; 0 if it isn't so."""
    ratios = {round(first / second, 2) for first, second in pairwise(numbers) if second}
    ratio = the_only(ratios)
    is_whole = ratio is not None and ratio >= 2 and ratio == round(ratio) and all(numbers)
    return round(ratio) if is_whole and ratio is not None else 0
