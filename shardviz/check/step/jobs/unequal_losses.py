"""Losses of two jobs that count rows unequally, although all outputs are right.

Nobody wrote a loss down. What comes back to the model's output says by which number each rank, or each micro-batch of
a rank, multiplies it. Where each divides by its own count, the counts are shares of one whole: so are the numbers'
reciprocals.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.trace.traces import in_both
from shardviz.explain.step.losses import MeanOfMeans
from shardviz.explain.step.scales import LossTimesOwnNumber
from shardviz.explain.templates import number
from shardviz.layout.layout import placements_of
from shardviz.relate.factors import scale_between
from shardviz.relate.tolerance import STEP
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.jobs.assembly import JobEvidence
    from shardviz.check.step.trace.judging import Judging
    from shardviz.explain.finding import Finding

    Values = NDArray[np.float64]

MAX_LISTED = 4


def of_unequal_losses(evidence: JobEvidence, judging: Judging) -> Finding | None:
    """Return the finding if ranks' losses, or those of their micro-batches, are multiplied by different numbers.

    Gradients are wrong then, but those that are nearly 0; if most are right, ranks make up for the numbers later. Ranks
    of the other job may have divided by their own counts as well: then the numbers themselves are shares.
    """
    micro_batches = evidence.micro_batches
    gradients = [gradient for gradient in evidence.gradients.values() if np.any(gradient.wanted)]
    scales = _of_micro_batches(judging, micro_batches) if micro_batches > 1 else {}
    is_of_parts = any(len(set(of_rank)) > 1 for of_rank in scales.values())
    if not is_of_parts:
        scales = {rank: (scale,) for rank, scale in sorted(judging.scales.items())}
    every = [scale for of_rank in scales.values() for scale in of_rank]
    if len(set(every)) < 2 or 2 * sum(bool(gradient.wrong) for gradient in gradients) <= len(gradients):
        return None
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


def _of_micro_batches(judging: Judging, count: int) -> dict[int, tuple[float, ...]]:
    """Return what the last output's gradient is the whole's times, for each micro-batch of each rank; else none."""
    places = [place for place in judging.judgments if place.what == "gradient of output"]
    if not places:
        return {}
    last = max(places, key=lambda place: judging.whole[place].order)
    whole = judging.whole[last].values
    of_ranks = {}
    for rank, points in judging.ranks.items():
        shard = points[last].values if last in points else None
        if whole is None or shard is None or not (whole.is_whole and shard.is_whole) or not shard.shape[:1]:
            return {}
        ways = (region for _, region in placements_of(whole.shape, shard.shape, judging.mesh, rank))
        pairs = (in_both(whole, shard, region) for region in ways if shard.shape[0] % count == 0)
        near = judging.judgments[last].near
        fits = (_by_part(*pair, count, near) for pair in pairs if pair is not None)
        scales = next((scales for scales in fits if scales), None)
        if scales is None:
            return {}
        of_ranks[rank] = scales
    return of_ranks


def _by_part(expected: Values, held: Values, count: int, near: float) -> tuple[float, ...]:
    """Return what each of some equal parts is the expected one's times; none if one of them isn't."""
    parts = zip(np.split(held, count), np.split(expected, count), strict=True)
    scales = [scale_between(*part, near) for part in parts if np.any(part)]
    return tuple(scale for scale in scales if scale is not None) if None not in scales else ()
