"""What two runs' steps show side by side, in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.report import NotChecked
from shardviz.check.step.jobs.compare import compare_jobs
from shardviz.check.step.runs.departure import Departure, StepDifference, departure_for
from shardviz.check.step.runs.unsharded import first_parting, has_sketches, pairs_of
from shardviz.check.step.words import number
from shardviz.check.unread import without_trace
from shardviz.explain.step import DifferentBatch, DifferentProgram, DifferentWeights, WeightsDrawnAfterSharding
from shardviz.text import counted, listed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardviz.check.report import Report
    from shardviz.check.step.runs.departure import Kind
    from shardviz.check.step.runs.unsharded import Pair, Parting, Place
    from shardviz.dump.dump import Dump
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding

MAX_LISTED = 3
ODD = ("odd", "repeated", "cut", "none")


def compare_steps(before: Dump, after: Dump, reports: tuple[Report, Report]) -> StepDifference:
    """Compare the steps of two runs; nothing if neither followed its step through its modules."""
    of_jobs = compare_jobs(before, after)
    if of_jobs is not None:
        return of_jobs
    has = has_sketches(before), has_sketches(after)
    if not all(has):
        which, dump = ("the second", after) if has[0] else ("the first", before)
        why = f"the step, module by module: {without_trace(dump, which)}"
        return StepDifference(not_compared=(NotChecked("", why, "step"),)) if any(has) else StepDifference()
    pairs = pairs_of(before, after)
    weights = {place: pair for place, pair in pairs.items() if place[1] == "weight"}
    points = {place: pair for place, pair in pairs.items() if place[1] != "weight"}
    begun = _of_weights(weights) + _of_batch(points)
    parting = None if begun else first_parting(points)
    unsharded = begun or ([_of_parting(parting)] if parting is not None else [])
    agree = {place: pair for place, pair in (weights if unsharded else pairs).items() if not pair.differs}
    nearest = max(agree.values(), key=lambda pair: pair.apart / pair.allowed if pair.is_telling else 0.0, default=None)
    return StepDifference(
        (*unsharded, *_of_sharded(before, after, reports)),
        len(agree),
        nearest.apart if nearest is not None else 0.0,
        nearest.allowed if nearest is not None else 0.0,
        _precision(points),
        tuple(_not_compared(points, begun)),
    )


def _precision(points: Mapping[Place, Pair]) -> tuple[str, ...]:
    both = [sorted({getattr(pair, side).dtype for pair in points.values()}) for side in ("ours", "theirs")]
    return tuple(" and ".join(one) for one in both)


def _not_compared(points: Mapping[Place, Pair], begun: Sequence[Departure]) -> list[NotChecked]:
    if begun:
        other = "weights" if begun[0].kind != "batch" else "rows"
        why = f"{counted(len(points), 'point')} of the unsharded models' steps: they start from different {other}"
        return [NotChecked("", why, "step")] if points else []
    if not points:
        return [NotChecked("", "the step, module by module: a dump has no trace of one (--trace off)", "step")]
    lost = [place for place, pair in points.items() if not pair.is_telling]
    if not lost:
        return []
    why = f"{len(lost)} of {counted(len(points), 'point')} of the step: rounding alone moves them by more than 5 %"
    return [NotChecked("", why, "step")]


def _of_weights(weights: Mapping[Place, Pair]) -> list[Departure]:
    """Return that the runs start from different weights; those drawn after sharding are reported separately."""
    differ = [(place[0], pair) for place, pair in weights.items() if pair.differs]
    drawn = [(name, pair) for name, pair in differ if pair.ours.is_drawn or pair.theirs.is_drawn]
    other = [(name, pair) for name, pair in differ if (name, pair) not in drawn]
    departures = []
    if other:
        departures.append(_weights("weights", other, len(weights), DifferentWeights()))
    if drawn:
        departures.append(_weights("drawn", drawn, len(weights), WeightsDrawnAfterSharding()))
    return departures


def _of_batch(points: Mapping[Place, Pair]) -> list[Departure]:
    """Return that the models are given other rows."""
    pairs = [pair for (name, what, _, _), pair in points.items() if not name and what == "input" and pair.differs]
    if not pairs:
        return []
    sentence = f"the model's inputs differ: {_apart(pairs[0])}"
    return [departure_for(DifferentBatch(), "batch", "", sentence, direction="forward")]


def _weights(kind: Kind, differ: Sequence[tuple[str, Pair]], total: int, cause: Cause) -> Departure:
    name, pair = differ[0]
    names = listed([one for one, _ in differ], MAX_LISTED)
    sentence = f"{len(differ):,} of {total:,} weights differ before the step: {names}; {_apart(pair)}"
    return departure_for(cause, kind, name, sentence)


def _apart(pair: Pair) -> str:
    if pair.ours.shape != pair.theirs.shape:
        return f"{list(pair.ours.shape)} in the first run, {list(pair.theirs.shape)} in the second"
    if not pair.ours.numbers or not pair.theirs.numbers:
        return f"the {'first' if not pair.ours.numbers else 'second'} run's has NaN or infinite elements"
    times = pair.factor
    if times is not None and abs(times - 1) > pair.allowed:
        return f"the second run's is {number(times)} times the first's"
    return f"off by {pair.apart:.2g} of its size (rounding allows {pair.allowed:.2g})"


def _of_parting(first: Parting) -> Departure:
    name = first.module or "the model itself"
    dtypes = sorted({first.pair.ours.dtype, first.pair.theirs.dtype})
    how = _apart(first.pair) + (f" ({' and '.join(dtypes)})" if len(dtypes) > 1 else "")
    if first.what == "input":
        sentence = f"{name} is the first module whose input differs: {how}"
    else:
        of_equal = {"output": "its inputs are equal", "gradient of input": "the gradients of its output are equal"}
        equal = f", although {of_equal[first.what]}" if first.what in of_equal else ""
        sentence = f"{name} is the first module whose {first.what} differs{equal}: {how}"
    return departure_for(
        DifferentProgram(),
        "unsharded",
        first.module,
        sentence,
        direction=first.direction,
        following=first.following,
    )


def _of_sharded(before: Dump, after: Dump, reports: tuple[Report, Report]) -> list[Departure]:
    """Return the first wrong module of one run's sharded step if the other run is right there."""
    ours, theirs = (next((one for one in report.findings if one.module), None) for report in reports)
    departures = []
    for number_, finding, other, dump in ((0, ours, theirs, before), (1, theirs, ours, after)):
        if finding is not None and (other is None or other.module != finding.module):
            run = ("first", "second")[number_]
            where = f"only in the {run} run, on {dump.files.mesh}: {finding.summary}"
            departures.append(_departure(finding, where, dump))
    if ours is not None and theirs is not None and ours.module == theirs.module:
        departures.append(_departure(ours, f"in both runs: {ours.summary}", before))
    return departures


def _departure(finding: Finding, sentence: str, dump: Dump) -> Departure:
    following = _num_odd(dump) - 1
    return Departure("sharded", finding.module, "", sentence, finding.cause, following, finding.explanation)


def _num_odd(dump: Dump) -> int:
    """Return how many modules' calls have a wrong side on any rank."""
    odd = {(one.module, one.call) for own in dump.files.ranks.values() for one in own.trace if one.state in ODD}
    return max(len(odd), 1)
