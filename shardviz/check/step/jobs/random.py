"""Modules that draw random numbers, as dropout does: two jobs draw others, and what follows cannot be compared.

What the ranks of one job draw can: they must keep the same elements of copies, and others of different parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.jobs.traces import Place
from shardviz.explain.step import DifferentMasks, IdenticalMasks
from shardviz.layout.placements import Replicate, Shard
from shardviz.relate.tolerance import POINT_EPSILON

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from shardviz.check.step.jobs.judging import Judging
    from shardviz.explain.finding import Finding

LEAST_ELEMENTS = 64
"""Masks of fewer elements may be equal by chance."""


def draws(judging: Judging, module: str, call: int) -> bool:
    """Whether a call drew random numbers in either job."""
    return any(
        point.draws
        for points in (judging.whole, *judging.ranks.values())
        for place, point in points.items()
        if (place.module, place.call) == (module, call)
    )


def check_masks(judging: Judging, module: str, call: int) -> Finding | None:
    """Return the finding if ranks drop different elements of the same values, or the same of different ones."""
    given, returned = Place(module, call, "input", 0), Place(module, call, "output", 0)
    layout = judging.found[given].layout if given in judging.found else None
    masks = {rank: mask for rank in judging.ranks if (mask := _mask(judging, rank, given, returned)) is not None}
    if layout is None or len(masks) < len(judging.ranks):
        return None
    for axis, placement in zip(judging.mesh.axes, layout, strict=True):
        groups = [group for group in judging.mesh.groups(axis) if len(group) > 1]
        pairs = [(group[0], other) for group in groups for other in group[1:]]
        equal = [np.array_equal(masks[one], masks[other]) for one, other in pairs]
        if pairs and isinstance(placement, Replicate) and not all(equal):
            return _finding(module, axis, pairs[equal.index(False)], is_same=True)
        if pairs and isinstance(placement, Shard) and any(equal) and masks[pairs[0][0]].size >= LEAST_ELEMENTS:
            return _finding(module, axis, pairs[equal.index(True)], is_same=False)
    return None


def _mask(judging: Judging, rank: int, given: Place, returned: Place) -> NDArray[np.bool_] | None:
    """Return which elements a rank keeps; None where what is returned is not what is given with some elements zero."""
    points: Mapping[Place, object] = judging.ranks[rank]
    if given not in points or returned not in points:
        return None
    before, after = judging.ranks[rank][given].values, judging.ranks[rank][returned].values
    if before is None or after is None or before.values.shape != after.values.shape:
        return None
    kept = after.values != 0
    factors = after.values[kept & (before.values != 0)] / before.values[kept & (before.values != 0)]
    if not np.any(~kept) or not factors.size:
        return None
    allowed = 2 * POINT_EPSILON * float(np.abs(factors).max())  # what is given and what is returned are rounded
    return kept if float(np.ptp(factors)) <= allowed else None


def _finding(module: str, axis: str, pair: tuple[int, int], *, is_same: bool) -> Finding:
    low, high = pair
    if is_same:
        sentence = f"ranks {low} and {high} along {axis} are given the same and drop different elements of it"
        return DifferentMasks(axis).finding(module, pair, sentence, kind="wrong-value", module=module)
    sentence = f"ranks {low} and {high} along {axis} have different parts and drop the same elements of each"
    return IdenticalMasks(axis).finding(module, pair, sentence, module=module)
