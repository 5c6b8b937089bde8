"""What a loss sends back to a router besides what the experts do: a term of each expert's mean probability.

A balance loss multiplies each expert's share of the tokens, a constant, by the mean of its probabilities. What it sends
back to a row's logits is made of that row's probabilities and one number for each expert. If the difference between
two jobs is of this form, with the same numbers for all rows of a rank, then the shares differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.trace.calls import is_within
from shardviz.check.step.trace.judging import BAD
from shardviz.explain.step.norms import BalanceOfOwnRows, BalanceScaled
from shardviz.layout.layout import Layout
from shardviz.relate.tolerance import FEW
from shardviz.relate.values import magnitude, part_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from shardviz.check.step.trace.judging import Judging
    from shardviz.dump.records.trace import Place
    from shardviz.explain.cause import Cause

    Values = NDArray[np.float64]

CLOSE = 0.02
"""How far from such a form a difference may be, relative to it: it is small beside the gradient that is rounded."""
MAX_EXPERTS = 512
"""What has more elements in a row is no router's."""
MIN_EXPERTS = 3
"""With two, any difference is of this form for one row."""


def cause_in_router(judging: Judging, module: str) -> Cause | None:
    """Return what is wrong about a balance term, by the gradients of a router in a module; None if that isn't shown."""
    for place, judgment in judging.judgments.items():
        is_here = place.module == module or is_within(place.module, module)
        if place.what != "gradient of output" or not is_here or not {*judgment.state.values()} & {*BAD}:
            continue
        numbers = _numbers_of_ranks(judging, place)
        if not numbers:
            continue
        largest = max(magnitude(own) for own in numbers.values())
        mean = sum(numbers.values(), np.zeros(())) / len(numbers)
        if magnitude(mean) <= CLOSE * largest:
            axes = [axis for axis in judging.mesh.long_axes if _differs_along(axis, numbers, judging)]
            return BalanceOfOwnRows(place.module, " and ".join(axes))
        if all(magnitude(own - mean) <= CLOSE * largest for own in numbers.values()):
            return BalanceScaled(place.module)
    return None


def _differs_along(axis: str, numbers: Mapping[int, Values], judging: Judging) -> bool:
    groups = ([numbers[rank] for rank in group if rank in numbers] for group in judging.mesh.groups(axis))
    return any(magnitude(own - group[0]) > CLOSE * magnitude(group[0]) for group in groups for own in group[1:])


def _numbers_of_ranks(judging: Judging, place: Place) -> dict[int, Values]:
    """Return each rank's number for each expert that makes its gradient right; empty if one of them has none."""
    judgment, logits, gradient = judging.judged(place.forward), judging.whole.get(place.forward), judging.whole[place]
    placements = judgment.layout if judgment is not None and {*judgment.state.values()} == {"right"} else None
    if placements is None or logits is None or logits.values is None or gradient.values is None:
        return {}
    layout = Layout.from_placements(judging.mesh, logits.values.values.shape, placements)
    if not layout.chains or layout.chains[-1]:  # ranks have some experts' logits alone
        return {}
    held = judging.held(place)
    kept = (logits.values, gradient.values, *held.values())
    if not all(one.is_whole for one in kept) or layout.shape != gradient.values.values.shape:
        return {}
    numbers: dict[int, Values] = {}
    for rank, region in layout.regions():
        expected = part_of(gradient.values.values, region)
        if rank not in held or held[rank].values.shape != expected.shape:
            return {}
        off = held[rank].values / judging.scale(place, rank) - expected
        own = numbers_of(part_of(logits.values.values, region), off)
        if own is None:
            return {}
        numbers[rank] = own
    return numbers


def numbers_of(logits: Values, off: Values) -> Values | None:
    """Return the number of each expert that makes of each row's probabilities what its gradient is off by; else None.

    Args:
        logits: What a router returns, an expert's in each column.
        off: The difference of their gradients.
    """
    size = logits.shape[-1] if logits.ndim else 0
    rows, wanted = logits.reshape(-1, size or 1), off.reshape(-1, size or 1)
    if not MIN_EXPERTS <= size <= MAX_EXPERTS or len(rows) < FEW or not off.any():
        return None
    if not (np.isfinite(rows).all() and np.isfinite(wanted).all()):
        return None
    return next((own for form in (_of_softmax, _of_sigmoid) if (own := form(rows, wanted)) is not None), None)


def _of_softmax(rows: Values, wanted: Values) -> Values | None:
    """Return the numbers v for which each row of what is wanted is p * (v - p . v), p being the row's softmax.

    By normal equations: they have a row for each expert, and not one for each of all elements.
    """
    powers = np.exp(rows - rows.max(axis=-1, keepdims=True))
    shares = powers / powers.sum(axis=-1, keepdims=True)
    squares, lengths = shares**2, (shares**2).sum(axis=-1, keepdims=True)
    crossed = squares.T @ shares
    sides = np.diag(squares.sum(axis=0)) - crossed - crossed.T + shares.T @ (lengths * shares)
    due = shares * wanted
    solved = np.linalg.lstsq(sides, due.sum(axis=0) - shares.T @ due.sum(axis=-1), rcond=None)[0]
    numbers = np.asarray(solved - solved.mean(), np.float64)
    made = shares * (numbers - (shares @ numbers)[:, None])
    return numbers if magnitude(made - wanted) <= CLOSE * magnitude(wanted) else None


def _of_sigmoid(rows: Values, wanted: Values) -> Values | None:
    """Return the numbers v for which each row of what is wanted is v times the slope of the row's sigmoid."""
    powers = np.exp(-np.abs(rows))
    slopes = powers / (1 + powers) ** 2
    squares = (slopes**2).sum(axis=0)
    numbers: Values = (slopes * wanted).sum(axis=0) / np.where(squares, squares, 1.0)
    return numbers if magnitude(slopes * numbers - wanted) <= CLOSE * magnitude(wanted) else None
