"""Tensors that differ by no more than rounding, as those of two right runs on different numbers of ranks do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.errors import DumpError
from shardviz.explain.checkpoints.training import RoundingDifference
from shardviz.relate.casts import values_of
from shardviz.relate.tolerance import EPSILON
from shardviz.relate.values import blocks

if TYPE_CHECKING:
    from shardviz.checkpoint.comparing.common import Outcomes
    from shardviz.checkpoint.comparing.outcome import Outcome
    from shardviz.checkpoint.comparing.pairs import Pair

MOST_ROUNDINGS = 8
"""Roundings by which the norm of a tensor may be off; a few steps of an optimizer leave less than two."""

MOST_OF_ELEMENT = 64
"""Roundings of the largest element by which an element may be off: a single damaged one is off by more."""

WIDE = ("float64", "float32")
"""Dtypes in which an optimizer's step changes a weight by more than that; in narrower ones it may not."""


FEWEST = 16
"""Elements that differ at least, of all tensors together: a single one may be a bit that was flipped on a disk."""


def with_roundings(outcomes: Outcomes) -> Outcomes:
    """Explain tensors whose difference has no other cause and is as small as rounding makes it."""
    rounded = {id(pair): count for outcome, pair in outcomes if (count := _num_rounded(outcome, pair))}
    if sum(rounded.values()) < FEWEST:
        return outcomes
    return [
        (outcome.became("other", outcome.why, RoundingDifference(pair.both[0].dtype)), pair)
        if id(pair) in rounded
        else (outcome, pair)
        for outcome, pair in outcomes
    ]


def _num_rounded(outcome: Outcome, pair: Pair) -> int:
    """Return how many elements of a tensor differ by rounding; 0 if any differ by more, or a cause is known."""
    if outcome.verdict != "other" or outcome.explanation is not None or pair.first is None or pair.second is None:
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
