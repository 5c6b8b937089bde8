"""What all tensors that differ have in common: a rank's shards, values as made, a decay, the size of a step, roundings.

One tensor alone shows none of this. Only tensors whose difference nothing else explains are looked at, and all of them
have to fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from shardviz.checkpoint.comparing.equality import narrower
from shardviz.checkpoint.comparing.outcome import KEPT, SIDES, with_replaced
from shardviz.checkpoint.maps.numbering import starred
from shardviz.errors import DumpError
from shardviz.explain.checkpoints.conversion import ForgottenFactor, SummedReplicas
from shardviz.explain.checkpoints.training import (
    DecayDiffers,
    LeftAsMade,
    RoundingDifference,
    ShardsOfOneRank,
    UpdatesDiffer,
)
from shardviz.layout.region import Region
from shardviz.relate.casts import cast, values_of
from shardviz.relate.tolerance import (
    ALIKE_RATIOS,
    ALIKE_STEPS,
    EPSILON,
    FLOATS,
    LEAST_DECAY,
    LEAST_SHARE,
    MOST_DECAY,
    UNLIKE_SIZES,
    WHOLE_FACTOR,
)
from shardviz.relate.values import blocks, is_alike, part_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardviz.checkpoint.comparing.outcome import Outcome, Outcomes
    from shardviz.checkpoint.comparing.pairs import Pair
    from shardviz.checkpoint.records import Tensor
    from shardviz.explain.cause import Cause


FEWEST_SUMMED = 2
"""Vectors with one factor that show how ranks were merged."""

MOST_MERGED = 256
"""Ranks of tensor parallelism whose files are merged."""

FEWEST = 3
"""Tensors that show something in common."""

MOST_RANKS = 64

AS_MADE = (0.0, 1.0)
"""Numbers that a buffer, a bias or the weight of a norm has when it is made."""


MOST_ROUNDINGS = 8
"""Roundings by which the norm of a tensor may be off; a few steps of an optimizer leave less than two."""

MOST_OF_ELEMENT = 64
"""Roundings of the largest element by which an element may be off: a single damaged one is off by more."""

WIDE = ("float64", "float32")
"""Dtypes in which an optimizer's step changes a weight by more than that; in narrower ones it may not."""

FEWEST_ROUNDED = 16
"""Elements that differ at least, of all tensors together: a single one may be a bit that was flipped on a disk."""


def with_common_cause(outcomes: Outcomes) -> Outcomes:
    """Explain tensors that differ by what they have in common; return the same outcomes if they have nothing."""
    differing = [(outcome, pair) for outcome, pair in outcomes if outcome.is_open]
    pairs = [pair for _, pair in differing]
    if not pairs or any(None in pair.sides for pair in pairs) or not all(map(_is_comparable, pairs)):
        return outcomes
    equal = [pair for outcome, pair in outcomes if outcome.verdict in KEPT and None not in pair.sides]
    try:
        causes = _causes(pairs, equal)
    except DumpError:  # of a file that is damaged, which the outcomes say
        return outcomes
    explained = zip(differing, causes, strict=False)
    return with_replaced(outcomes, {id(pair): one.became("other", one.why, cause) for (one, pair), cause in explained})


def _is_comparable(pair: Pair) -> bool:
    """Whether both sides of a pair are floats of one shape."""
    first, second = pair.both
    return first.shape == second.shape and first.dtype in FLOATS and second.dtype in FLOATS


def _causes(pairs: Sequence[Pair], equal: Sequence[Pair]) -> Sequence[Cause]:
    """Return the cause of each pair; empty if they have nothing in common."""
    if of_each := _as_made(pairs, equal):
        return of_each
    cause = _one_rank(pairs) or (None if equal else _by_training(pairs))
    return [] if cause is None else [cause] * len(pairs)


def _as_made(pairs: Sequence[Pair], equal: Sequence[Pair]) -> list[Cause]:
    """Return causes of tensors that all are one number on one side, as they are made; empty if any is not."""
    trained = [pair for pair in equal if not is_alike(pair.both[0].bits)]
    if len(trained) < max(FEWEST, len(pairs)):
        return []
    for at in (1, 0):
        numbers = [_number_of(pair.both[at], None) for pair in pairs]
        if all(number in AS_MADE for number in numbers):
            return [LeftAsMade(f"{number:g}", SIDES[at], len(equal)) for number in numbers if number is not None]
    return []


def _number_of(side: Tensor, region: Region | None) -> float | None:
    """Return the number that a tensor, or a part of it, has everywhere; None if its values vary."""
    bits = side.bits if region is None else part_of(side.bits, region)
    if not bits.size or not is_alike(bits):
        return None
    return float(values_of(np.array(bits).reshape(-1)[:1], side.dtype)[0])


def _one_rank(pairs: Sequence[Pair]) -> ShardsOfOneRank | None:
    """Return the cause if tensors of several modules differ in the same one of several equal parts, and only there."""
    fitting: set[tuple[int, int]] | None = None
    boxes = []
    for pair in pairs:
        box = _differing_part(pair)
        parts = set(_parts(box, pair.both[0].shape)) if box is not None else set[tuple[int, int]]()
        fitting = parts if fitting is None else fitting & parts
        if box is None or not fitting:
            return None
        boxes.append(box)
    modules = {starred(pair.name).rpartition(".")[0] for pair in pairs}
    if not fitting or len(pairs) < FEWEST or len(modules) < FEWEST:  # half of a fused weight is no rank's
        return None
    num_parts, number = min(fitting)
    as_made = (
        at
        for at in (1, 0)
        for pair, box in zip(pairs, boxes, strict=True)
        if box.size > 1 and _number_of(pair.both[at], box) in AS_MADE and _number_of(pair.both[1 - at], box) is None
    )
    made = next(as_made, None)
    return ShardsOfOneRank(number, num_parts, "" if made is None else SIDES[made])


def _differing_part(pair: Pair) -> Region | None:
    """Return the smallest box with all elements that differ, if it is not the whole tensor."""
    first, second = pair.both
    narrow = narrower(first.dtype, second.dtype)
    bits = [cast(side.bits, side.dtype, narrow) for side in pair.both]
    if bits[0] is None or bits[1] is None or not first.shape:
        return None
    different = bits[0] != bits[1]
    dims = range(different.ndim)
    lines = [np.flatnonzero(different.any(axis=tuple(other for other in dims if other != dim))) for dim in dims]
    box = Region(tuple(((int(line[0]), int(line[-1]) + 1),) for line in lines))
    return box if box.shape != first.shape else None


def _parts(box: Region, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield `(n, k)` for each number n of equal parts of a dim of which a box is the k-th; the last may be shorter."""
    cut = [dim for dim, size in enumerate(shape) if box.shape[dim] != size]
    if len(cut) != 1:
        return
    ((start, stop),) = box.dims[cut[0]]
    length = shape[cut[0]]
    for number in range(2, min(MOST_RANKS, length) + 1):
        size = math.ceil(length / number)
        if not start % size and stop == min(start + size, length):
            yield number, start // size


@dataclass(frozen=True, slots=True)
class Change:
    """How far the first elements of a tensor are apart.

    Attributes:
        num_dims: The tensor's dims.
        ratio: The number that brings the first's nearest to the second's.
        share: How much of the squared difference that number explains.
        size: The root mean square of the first's values.
        step: That of the difference.
        most: The largest difference.
    """

    num_dims: int
    ratio: float
    share: float
    size: float
    step: float
    most: float


def _by_training(pairs: Sequence[Pair]) -> Cause | None:
    """Return what training did otherwise if all tensors differ: the decay of matrices, or a step or two."""
    changes: list[Change] = []
    for pair in pairs:
        change = _change_of(pair)
        if change is None:
            return None
        changes.append(change)
        if not _are_scaled(changes) and not _are_equally_far(changes):
            return None  # further tensors need not be read
    return _of_decay(changes) or _of_steps(changes)


def _change_of(pair: Pair) -> Change | None:
    first, second = (
        values_of(np.ascontiguousarray(next(islice(blocks(side.bits), 1))), side.dtype).astype(np.float64).ravel()
        for side in pair.both
    )
    difference = second - first
    squares, changed = float(first @ first), float(difference @ difference)
    if not (math.isfinite(squares) and math.isfinite(changed) and squares and changed):
        return None
    ratio = float(first @ second) / squares
    return Change(
        sum(size > 1 for size in pair.both[0].shape),
        ratio,
        (ratio - 1) ** 2 * squares / changed,
        math.sqrt(squares / first.size),
        math.sqrt(changed / first.size),
        float(np.abs(difference).max()),
    )


def _of_decay(changes: Sequence[Change]) -> DecayDiffers | None:
    """Return the cause if all matrices are nearly the first's times one number near 1, and vectors are not."""
    matrices = [change for change in changes if change.num_dims > 1]
    vectors = [abs(change.ratio - 1) for change in changes if change.num_dims == 1]
    if len(matrices) < FEWEST:
        return None
    typical = float(np.median([change.ratio for change in matrices]))
    excess = abs(typical - 1)
    if not (LEAST_DECAY <= excess <= MOST_DECAY and _are_scaled(changes)):
        return None
    if not vectors or float(np.median(vectors)) > excess / 2:
        return None  # an average that is scaled has the factor everywhere
    larger, smaller = (SIDES[1], SIDES[0]) if typical > 1 else (SIDES[0], SIDES[1])
    return DecayDiffers(f"{max(typical, 1 / typical):.3g}", larger, smaller)


def _are_scaled(changes: Sequence[Change]) -> bool:
    """Whether one number explains much of the difference of every matrix."""
    matrices = [change for change in changes if change.num_dims > 1]
    ratios = np.array([change.ratio for change in matrices] or [1.0])
    is_share = all(change.share >= LEAST_SHARE for change in matrices)
    return is_share and float(np.ptp(ratios)) <= ALIKE_RATIOS * abs(float(np.median(ratios)) - 1)


def _are_equally_far(changes: Sequence[Change]) -> bool:
    """Whether elements of all tensors differ by about as much."""
    most, steps = [change.most for change in changes], [change.step for change in changes]
    return max(most) <= ALIKE_STEPS * min(most) and max(steps) <= ALIKE_STEPS * min(steps)


def _of_steps(changes: Sequence[Change]) -> UpdatesDiffer | None:
    """Return the cause if tensors of different sizes differ by equally much in each element."""
    if len(changes) < FEWEST or not _are_equally_far(changes):
        return None
    sizes, most = [change.size for change in changes], max(change.most for change in changes)
    if max(sizes) < UNLIKE_SIZES * min(sizes) or most <= EPSILON["float16"] * max(sizes):
        return None
    return UpdatesDiffer(f"{most:.2g}")


def with_roundings(outcomes: Outcomes) -> Outcomes:
    """Explain tensors whose difference has no other cause and is as small as rounding makes it."""
    rounded: dict[int, Outcome] = {}
    total = 0
    for outcome, pair in outcomes:
        if count := _num_rounded(outcome, pair):
            total += count
            rounded[id(pair)] = outcome.became("other", outcome.why, RoundingDifference(pair.both[0].dtype))
    return outcomes if total < FEWEST_ROUNDED else with_replaced(outcomes, rounded)


def _num_rounded(outcome: Outcome, pair: Pair) -> int:
    """Return how many elements of a tensor differ by rounding; 0 if any differ by more, or a cause is known."""
    if not outcome.is_open or pair.first is None or pair.second is None:
        return 0
    dtype = pair.first.dtype
    if dtype not in WIDE or pair.second.dtype != dtype or pair.first.shape != pair.second.shape:
        return 0
    if outcome.distance is not None and outcome.distance.norm > MOST_ROUNDINGS * EPSILON[dtype]:
        return 0
    try:
        return _count(pair)
    except DumpError:
        return 0


def _count(pair: Pair) -> int:
    """Return how many elements of two tensors differ; 0 if that is not by rounding. They are read block by block."""
    before, after = pair.both
    off, size, far, largest, count = 0.0, 0.0, 0.0, 0.0, 0
    for parts in zip(blocks(before.bits), blocks(after.bits), strict=True):
        first, second = (values_of(part, before.dtype).ravel() for part in parts)
        with np.errstate(all="ignore"):
            difference = second - first
            off, size = off + float(difference @ difference), size + float(first @ first)
            far, largest = max(far, float(np.abs(difference).max())), max(largest, float(np.abs(first).max()))
        count += int(np.count_nonzero(difference))
    epsilon = EPSILON[before.dtype]
    is_near = off <= (MOST_ROUNDINGS * epsilon) ** 2 * size < np.inf and far <= MOST_OF_ELEMENT * epsilon * largest
    return count if is_near else 0


def with_summed_replicas(outcomes: Outcomes) -> Outcomes:
    """Explain that a merge summed replicas if only vectors are scaled, all by one whole number."""
    factors: dict[str, float] = {}
    scaled: Outcomes = []
    for outcome, pair in outcomes:
        if isinstance(outcome.explanation, ForgottenFactor):
            factors[outcome.explanation.undo] = outcome.explanation.factor
            scaled.append((outcome, pair))
    has_matrices = any(outcome.verdict in KEPT and len(pair.both[0].shape) > 1 for outcome, pair in outcomes)
    is_vectors = {len(pair.both[0].shape) for _, pair in scaled} == {1}
    if len(scaled) < FEWEST_SUMMED or len(factors) > 1 or not is_vectors or not has_matrices:
        return outcomes
    (factor,) = factors.values()
    times = max(factor, 1 / factor)
    if not 1 < round(times) <= MOST_MERGED or not math.isclose(times, round(times), rel_tol=WHOLE_FACTOR):
        return outcomes
    summed = SummedReplicas(round(times), SIDES[factor > 1])
    return with_replaced(
        outcomes, {id(pair): one.became("other", f"{one.why}; no matrix is scaled", summed) for one, pair in scaled}
    )
