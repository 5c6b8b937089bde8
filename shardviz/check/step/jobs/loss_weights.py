"""How much each rank's, micro-batch's and row's loss counts, as the gradients say that it sends back.

The gradient of the last output is the other job's times a number for each. A linear layer shows what each micro-batch
adds to its gradients: of what it is given, and what comes back to it.

If the losses are right, a term of each expert's mean probability may be sent back to a router besides. A balance loss
multiplies each expert's share of the tokens, a constant, by the mean of its probabilities. What it sends back to a
row's logits is made of that row's probabilities and one number for each expert. If the difference between two jobs is
of this form, with the same numbers for all rows of a rank, then the shares differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Literal

import numpy as np

from shardviz.check.step.trace.calls import is_within
from shardviz.check.step.trace.judging import BAD
from shardviz.check.step.trace.traces import in_both
from shardviz.dump.records.trace import Place
from shardviz.explain.step.line_rows import RowsWithOtherLabels
from shardviz.explain.step.losses import MeanOfMeans
from shardviz.explain.step.norms import BalanceOfOwnRows, BalanceScaled
from shardviz.explain.step.scales import LossTimesOwnNumber, RowsTimesOwnNumbers
from shardviz.explain.templates import number
from shardviz.groups import the_only
from shardviz.layout.layout import Layout, placements_of
from shardviz.relate.factors import factors_of_rows, scale_between
from shardviz.relate.tolerance import CANCELED, FEW, STEP
from shardviz.relate.values import farthest, magnitude, part_of
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.jobs.assembly import JobEvidence
    from shardviz.check.step.trace.judging import Judging
    from shardviz.check.step.trace.traces import JobTrace, Point, Weight
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding

    Values = NDArray[np.float64]
    Labels = NDArray[np.int64]


MAX_LISTED = 3

MANY_LABELS = 8
"""Of fewer labels nothing is said about their order."""

MOST_LABELS = 0.7
"""Which share of labels are those of the next row if they are shifted: the last of each sequence are not."""


def of_unequal_losses(evidence: JobEvidence, judging: Judging, *, is_open: bool) -> Finding | None:
    """Return the finding if ranks' losses, or those of their micro-batches, are multiplied by different numbers.

    Gradients are wrong then, but those that are nearly 0; if most are right, ranks make up for the numbers later. Ranks
    of the other job may have divided by their own counts as well: then the numbers themselves are shares.

    Args:
        is_open: Whether nothing else explains the gradients: then numbers and labels of single rows may.
    """
    micro_batches = evidence.micro_batches
    gradients = [gradient for gradient in evidence.gradients.values() if np.any(gradient.wanted)]
    scales = _of_micro_batches(judging) if micro_batches > 1 else {}
    is_of_parts = any(len(set(of_rank)) > 1 for of_rank in scales.values())
    if not is_of_parts:
        scales = {rank: (scale,) for rank, scale in sorted(judging.scales.items())}
    every = [scale for of_rank in scales.values() for scale in of_rank]
    if 2 * sum(bool(gradient.wrong) for gradient in gradients) <= len(gradients):
        return None
    if len(set(every)) < 2:
        return (_of_rows(judging) or _of_labels(judging)) if is_open else None
    ways = (every,) if evidence.is_beside_one else (every, [1 / scale for scale in every if scale])
    is_mean = any(_are_shares(scales_of_way, [*judging.mesh.shape, micro_batches]) for scales_of_way in ways)
    cause = MeanOfMeans(micro_batches=micro_batches * is_of_parts) if is_mean else LossTimesOwnNumber(is_of_parts)
    numbers = (f"{' and '.join(_shown(of_rank))} on rank {rank}" for rank, of_rank in scales.items())
    sentence = (
        f"all outputs are right, and each {'micro-batch' if is_of_parts else 'rank'}'s backward begins with the other "
        f"job's gradient times its own number: {listed(numbers, MAX_LISTED)}"
    )
    return cause.finding("loss", tuple(scales), sentence, kind="wrong-scale")


def _shown(scales: Sequence[float]) -> list[str]:
    return [*map(number, scales[:MAX_LISTED]), *(["others"] if len(scales) > MAX_LISTED else [])]


def _are_shares(scales: Sequence[float], sizes: Sequence[int]) -> bool:
    """Whether the numbers' reciprocals add up to 1, or to that times numbers of ranks and micro-batches."""
    products = {math.prod(some) for count in range(len(sizes) + 1) for some in combinations(sizes, count)}
    total = sum(1 / scale for scale in scales if scale)
    ratios = (up / down for up in products for down in products)
    return min(scales) > 0 and any(math.isclose(total, ratio, rel_tol=STEP) for ratio in ratios)


@dataclass(frozen=True, slots=True)
class LastGradient:
    """A rank's gradient of the last output.

    Attributes:
        ways: The other job's values and the rank's, for each place at which it may stand: where the output does, if
            that is known.
        near: How far rounding may take an element.
    """

    point: Point
    ways: Sequence[tuple[Values, Values]]
    near: float


def _last_gradients(judging: Judging) -> dict[int, LastGradient]:
    """Return the gradient of the last output of each rank that has this output; none if it isn't known of one."""
    places = [place for place in judging.judgments if place.what == "gradient of output"]
    if not places:
        return {}
    last = max(places, key=lambda place: judging.whole[place].order)
    whole, output = judging.whole[last].values, judging.judgments.get(last.forward)
    of_ranks = {}
    for rank, points in judging.ranks.items():
        point = points.get(last)
        if point is None:
            continue
        shard = point.values
        if whole is None or shard is None or not (whole.is_whole and shard.is_whole):
            return {}
        regions = dict(placements_of(whole.shape, shard.shape, judging.mesh, rank))
        if output is not None and output.layout in regions:
            regions = {output.layout: regions[output.layout]}
        ways = [pair for region in regions.values() if (pair := in_both(whole, shard, region)) is not None]
        of_ranks[rank] = LastGradient(point, ways, judging.judgments[last].near)
    return of_ranks


def _of_rows(judging: Judging) -> Finding | None:
    """Return the finding if each row of the last output's gradient is the whole's times a number of its own."""
    factors = {}
    for rank, last in _last_gradients(judging).items():
        fits = (_factors_of_rows(held, expected, last.near) for expected, held in last.ways)
        of_rank = next((fit for fit in fits if fit is not None), None)
        if of_rank is None:
            return None
        factors[rank] = of_rank
    if all(np.ptp(of_rank) <= STEP * magnitude(of_rank) for of_rank in factors.values()):
        return None
    numbers = (
        f"{number(of_rank.min())} to {number(of_rank.max())} on rank {rank}" for rank, of_rank in factors.items()
    )
    sentence = (
        "all outputs are right, and each row's gradient at the last output is the other job's times its own number: "
        f"{listed(numbers, MAX_LISTED)}"
    )
    return RowsTimesOwnNumbers().finding("loss", tuple(factors), sentence, kind="wrong-scale")


def _factors_of_rows(held: Values, expected: Values, near: float) -> Values | None:
    """Return the factor of each row that the other job counts; None if one isn't counted, or is no multiple."""
    if held.ndim < 2 or held.shape[-1] < FEW:
        return None
    held, expected = (side.reshape(-1, side.shape[-1]) for side in (held, expected))
    is_some = np.any(expected, axis=1)
    if not np.array_equal(is_some, np.any(held, axis=1)):
        return None
    factors = factors_of_rows(held[is_some], expected[is_some])
    if factors is None or len(factors) < FEW:
        return None
    off = np.abs(held[is_some] - factors * expected[is_some])
    return factors.ravel() if np.all(off <= near * np.maximum(1.0, np.abs(factors))) else None


def _of_labels(judging: Judging) -> Finding | None:
    """Return the finding if the last output's gradient says that rows are compared with other labels.

    A cross entropy sends back a gradient that is negative at a row's label alone.
    """
    odd: dict[int, tuple[Labels, Labels, LastGradient]] = {}
    for rank, last in _last_gradients(judging).items():
        pairs = (tuple(map(_labels_in, way)) for way in last.ways)
        expected, held = next((pair for pair in pairs if pair[0] is not None and pair[1] is not None), (None, None))
        if expected is None or held is None:
            return None
        if not np.array_equal(expected, held):
            odd[rank] = expected, held, last
    if not odd:
        return None
    rank, (expected, held, last) = next(iter(odd.items()))
    cause = RowsWithOtherLabels(_relation_of_labels(expected, held, last.point.lengths))
    row = tuple(np.argwhere(expected != held)[0].tolist())
    count, label, due = int((expected != held).sum()), *(_in_words(labels[row]) for labels in (held, expected))
    sentence = (
        f"all outputs are right, and by the gradient of the last one {count} of {held.size} rows on rank {rank} are "
        f"compared with other labels than in the other job: row {list(row)} with {label}, and there with {due}"
    )
    return cause.finding("loss", tuple(odd), sentence, kind="wrong-value")


IGNORED = -1
"""The label of a row that sends nothing back: the loss ignores it."""


def _in_words(label: int) -> str:
    return "none" if label == IGNORED else f"label {label}"


def _labels_in(gradient: Values) -> Labels | None:
    """Return the only element of each row that is negative, `IGNORED` for rows of zeros; None if there are others.

    It is what the others add up to: they are probabilities, and it is one less than that.
    """
    if gradient.ndim < 2 or gradient.shape[-1] < FEW:
        return None
    if np.any(np.abs(gradient.sum(-1)) > CANCELED * np.abs(gradient).max(-1)):
        return None
    is_negative, is_ignored = gradient < 0, ~np.any(gradient, axis=-1)
    if np.all(is_ignored) or not np.all((is_negative.sum(-1) == 1) | is_ignored):
        return None
    return np.where(is_ignored, IGNORED, is_negative.argmax(-1))


def _relation_of_labels(
    expected: Labels, held: Labels, lengths: tuple[int, ...]
) -> Literal["next", "previous", "ends", "micro-batches", "ignored", "moved", "other"]:
    """Return what a rank's labels are of the other job's."""
    if held.shape[-1] > 1 and held.size >= MANY_LABELS:
        is_other = _share(held, expected) < MOST_LABELS
        if is_other and _share(held[..., :-1], expected[..., 1:]) > MOST_LABELS:
            return "next"
        if is_other and _share(held[..., 1:], expected[..., :-1]) > MOST_LABELS:
            return "previous"
        if np.array_equal(held[..., :-1], expected[..., :-1]):
            return "ends"
    parts, due = ([part.tolist() for part in np.split(labels, np.cumsum(lengths)[:-1])] for labels in (held, expected))
    if len(parts) > 1 and all(part in due for part in parts):
        return "micro-batches"
    if np.all((held == expected) | (held == IGNORED) | (expected == IGNORED)):
        return "ignored"
    return "moved" if np.array_equal(np.sort(held, axis=None), np.sort(expected, axis=None)) else "other"


def _share(labels: Labels, others: Labels) -> float:
    """Return which share of the labels are the others, of rows that one of both counts."""
    is_counted = (labels != IGNORED) | (others != IGNORED)
    return float(np.mean(labels[is_counted] == others[is_counted])) if np.any(is_counted) else 0.0


def _of_micro_batches(judging: Judging) -> dict[int, tuple[float, ...]]:
    """Return what the last output's gradient is the whole's times, for each micro-batch of each rank; else none."""
    of_ranks = {}
    for rank, last in _last_gradients(judging).items():
        fits = (_by_part(last.point, expected, last.near) for expected, _ in last.ways if not last.point.dim)
        scales = next((scales for scales in fits if scales), None)
        if scales is None:
            return {}
        of_ranks[rank] = scales
    return of_ranks


def _by_part(point: Point, expected: Values, near: float) -> tuple[float, ...]:
    """Return what each micro-batch is the expected one's times; none if one of them isn't."""
    parts = zip(point.split(), np.split(expected, np.cumsum(point.lengths)[:-1]), strict=True)
    scales = [scale_between(*part, near) for part in parts if np.any(part[0]) or np.any(part[1])]
    return tuple(scale for scale in scales if scale is not None) if None not in scales else ()


def terms_of_micro_batches(
    job: JobTrace, judging: Judging, gradients: Mapping[str, Weight]
) -> Iterator[tuple[str, list[Values]]]:
    """Yield each gradient of a linear layer with its terms, one for a micro-batch of all ranks together.

    Ranks have several micro-batches, as many each, and the terms add up to the gradient.

    Args:
        gradients: The other job's, whole.
    """
    count = the_only({of_rank.counts.get("", 1) for of_rank in job.ranks.values()}) or 1
    modules = {name.rpartition(".")[0] for name in gradients if name.endswith(".weight")}
    for module in sorted(modules) if count > 1 else ():
        places = [Place(module, 0, what, 0) for what in ("input", "gradient of output")]
        sides = [[_rows(points.get(place), count) for place in places] for points in judging.ranks.values()]
        weight = gradients[f"{module}.weight"]
        if not all(all(parts) for parts in sides) or not all(_fit(weight, *parts) for parts in sides):
            continue
        terms = {
            "weight": [sum((back[at].T @ given[at] for given, back in sides), np.zeros(())) for at in range(count)],
            "bias": [sum((back[at].sum(axis=0) for _, back in sides), np.zeros(())) for at in range(count)],
        }
        for name, of_batches in terms.items():
            scaled = _adding_up(of_batches, gradients.get(f"{module}.{name}"))
            if scaled:
                yield f"{module}.{name}", scaled


def _fit(weight: Weight, given: Sequence[Values], back: Sequence[Values]) -> bool:
    """Whether a rank has the whole layer, and as many rows of what it is given as of what comes back to it."""
    return all(
        len(rows) == len(rows_back) and (rows_back.shape[1], rows.shape[1]) == weight.shape
        for rows, rows_back in zip(given, back, strict=True)
    )


def _rows(point: Point | None, count: int) -> list[Values]:
    """Return the rows of each micro-batch at a linear layer; nothing of other modules, or if some were not kept."""
    values = point.values if point is not None and point.type == "Linear" and not point.dim else None
    parts = point.split() if point is not None and values is not None and values.is_whole else []
    is_of_all = len(parts) == count and values is not None and len(values.shape) > 1
    return [part.reshape(-1, part.shape[-1]) for part in parts] if is_of_all else []


def _adding_up(terms: Sequence[Values], gradient: Weight | None) -> list[Values]:
    """Return terms times the number with which they add up to a gradient; none if there is no such number."""
    values = gradient.values if gradient is not None else None
    whole = sum(terms[1:], terms[0])
    if values is None or not values.is_whole or whole.shape != values.shape:
        return []
    scale = float(np.vdot(whole, values.values) / (np.vdot(whole, whole) or 1.0))
    is_whole = farthest(scale * whole, values.values) <= STEP * magnitude(values.values)
    return [scale * term for term in terms] if is_whole else []


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
