"""Findings of a job's step against one process's: the first wrong module and its cause.

Where modules draw random numbers, as dropout does, two jobs draw others, and what follows cannot be compared. What the
ranks of one job draw can: they must keep the same elements of copies, and others of different parts.
"""

from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.report import NotChecked
from shardviz.check.step.contradictions import check_no_gradient
from shardviz.check.step.rules.all_gradients import of_all_gradients
from shardviz.check.step.run import explained, seen_in
from shardviz.check.step.trace.calls import is_within
from shardviz.check.step.trace.naming import of_output, placed, with_cut
from shardviz.check.step.trace.traces import float_of
from shardviz.check.step.words import number
from shardviz.dump.records.trace import Place
from shardviz.explain.finding import Finding
from shardviz.explain.step.losses import MeanOfMeans
from shardviz.explain.step.modules import LayerOnTwoStages, UnexplainedInput
from shardviz.explain.step.whole_step import DifferentMasks, IdenticalMasks, UnexplainedJobStep
from shardviz.layout.placements import Replicate, Shard
from shardviz.relate.tolerance import POINT_EPSILON
from shardviz.relate.values import farthest
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.check.step.jobs.assembly import JobEvidence
    from shardviz.check.step.trace.calls import Call
    from shardviz.check.step.trace.divergence import Divergence
    from shardviz.check.step.trace.judging import Judging
    from shardviz.check.step.trace.traces import Point


MAX_LISTED = 4


def findings_on(evidence: JobEvidence, judging: Judging, reference_name: str) -> Iterator[Finding | NotChecked]:
    """Yield what is wrong, causes before consequences.

    Args:
        evidence: Both jobs, assembled.
        judging: What each rank has at every place.
        reference_name: What the other job is called.
    """
    first = evidence.divergence
    if first is not None and first.direction == "forward":
        yield _in_forward(evidence, judging, first, reference_name)
        return
    results = [
        (result, seen_in(result, finding)) for result in evidence.results for finding in explained(evidence, result)
    ]
    yield from (finding for _, finding in results if isinstance(finding, NotChecked))
    pairs, of_all = of_all_gradients(
        evidence, [(result, finding) for result, finding in results if isinstance(finding, Finding)]
    )
    unequal = _of_unequal_losses(judging) if first is None and (pairs or of_all) else None
    if unequal is not None:
        yield unequal
        return
    yield from of_all
    absent, pairs = with_cut(evidence, list(check_no_gradient(evidence)), placed(evidence, pairs))
    yield from (result for result in absent if isinstance(result, Finding))
    yield from (finding for _, finding in pairs)


def _in_forward(
    evidence: JobEvidence, judging: Judging, first: Divergence, reference_name: str
) -> Finding | NotChecked:
    call = first.call
    if draws(judging, call.module, call.number):
        name = call.module or "the model itself"
        why = (
            f"what follows {name}: it draws random numbers, and the jobs draw different ones; make both run without "
            "(p=0 or eval()), or load the same masks, to compare the rest"
        )
        return check_masks(judging, call.module, call.number) or NotChecked(call.module, why, "step")
    ranks = tuple(sorted(call.points))
    name = first.module or "the model itself"
    base = UnexplainedJobStep().finding(name, ranks, f"its step differs from that of {reference_name}", generic=True)
    finding = of_output(evidence, first, base)
    stages = _stages_of(judging, call) if isinstance(finding.explanation, UnexplainedInput) else None
    return finding if stages is None else finding.because(LayerOnTwoStages(name, *stages))


def _stages_of(judging: Judging, call: Call) -> tuple[int, int] | None:
    """Return a rank of each of two stages that run a module with all that is in it, the first on the right input."""
    given, modules = Place(call.module, call.number, "input", 0), _modules_by_rank(judging)
    if given._replace(call=1) in judging.whole:  # layers may share a module, which is called for each
        return None
    for first, second in permutations(judging.ranks, 2):
        inside = [{name for name in modules[rank] if is_within(name, call.module)} for rank in (first, second)]
        is_of_two = bool(call.module and inside[0]) and inside[0] == inside[1] and modules[first] != modules[second]
        inputs = [judging.ranks[rank].get(given) for rank in (first, second)]
        if is_of_two and _is_alike(judging.whole.get(given), inputs[0]) and not _is_alike(*inputs):
            return first, second
    return None


def _modules_by_rank(judging: Judging) -> dict[int, set[str]]:
    return {rank: {place.module for place in points} for rank, points in judging.ranks.items()}


def _is_alike(first: Point | None, second: Point | None) -> bool:
    values, others = (point.values if point is not None else None for point in (first, second))
    if values is None or others is None or values.shape != others.shape:
        return False
    return farthest(values.values, others.values) <= max(values.tolerance, others.tolerance) * float_of(values)


def _of_unequal_losses(judging: Judging) -> Finding | None:
    """Return the finding if ranks' losses count rows unequally, which changes the mean gradient."""
    scales = judging.scales
    if len(set(scales.values())) < 2:
        return None
    text = listed([f"{number(scale)} on rank {rank}" for rank, scale in sorted(scales.items())], MAX_LISTED)
    return MeanOfMeans().finding(
        "loss",
        tuple(sorted(scales)),
        f"all outputs are right, and each rank's backward begins with the other job's gradient times its own number: "
        f"{text}",
        kind="wrong-scale",
    )


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
    input_place, returned = Place(module, call, "input", 0), Place(module, call, "output", 0)
    layout = judging.judgments[input_place].layout if input_place in judging.judgments else None
    masks = {rank: mask for rank in judging.ranks if (mask := _mask(judging, rank, input_place, returned)) is not None}
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


def _mask(judging: Judging, rank: int, input_place: Place, returned: Place) -> NDArray[np.bool_] | None:
    """Return the elements that a rank keeps; None if the output isn't the input with zeros."""
    points: Mapping[Place, object] = judging.ranks[rank]
    if input_place not in points or returned not in points:
        return None
    before, after = judging.ranks[rank][input_place].values, judging.ranks[rank][returned].values
    if before is None or after is None or before.values.shape != after.values.shape:
        return None
    is_kept = after.values != 0
    factors = after.values[is_kept & (before.values != 0)] / before.values[is_kept & (before.values != 0)]
    if not np.any(~is_kept) or not factors.size:
        return None
    allowed = 2 * POINT_EPSILON * float(np.abs(factors).max())  # what is given and what is returned are rounded
    return is_kept if float(np.ptp(factors)) <= allowed else None


def _finding(module: str, axis: str, pair: tuple[int, int], *, is_same: bool) -> Finding:
    low, high = pair
    if is_same:
        sentence = f"ranks {low} and {high} along {axis} are given the same and drop different elements of it"
        return DifferentMasks(axis).finding(module, pair, sentence, kind="wrong-value", module=module)
    sentence = f"ranks {low} and {high} along {axis} have different parts and drop the same elements of each"
    return IdenticalMasks(axis).finding(module, pair, sentence, module=module)
