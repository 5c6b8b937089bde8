"""What two jobs' traces of a step show side by side, in sentences: what they start from first, then where they part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.finding import Finding, NotChecked
from shardviz.check.grouping import grouped, ranks_by_name
from shardviz.check.step.jobs.assembled import assembled
from shardviz.check.step.jobs.findings import findings_on
from shardviz.check.step.jobs.grid import mesh_of_job
from shardviz.check.step.jobs.judging import Judging
from shardviz.check.step.jobs.starts import belongings_of, other_weights, rows_of
from shardviz.check.step.jobs.traces import counts_per_forward, is_pipeline, trace_of
from shardviz.check.step.runs.departure import Departure, StepDifference
from shardviz.text import counted, listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.jobs.starts import Belonging, OtherWeight
    from shardviz.check.step.jobs.traces import JobTrace, OfRank, Place, Point
    from shardviz.dump.dump import Dump
    from shardviz.layout.mesh import Mesh

MAX_LISTED = 3
MAX_ROWS = 1 << 24
"""No longer tensor is put into the order of another job's rows."""
NO_OTHER = (
    "the step, module by module: one of the two jobs has to be a single process: shardviz run --trace -o one -- python "
    "train.py"
)
WEIGHTS = "the jobs' weights agree"
BAD = ("odd", "repeated", "cut", "none")


def compare_jobs(before: Dump, after: Dump) -> StepDifference | None:
    """Compare the traces of two jobs; None where neither has one."""
    with np.errstate(all="ignore"):  # a job that went wrong has NaN
        return _compared(trace_of(before), trace_of(after), before, after)


def _compared(ours: JobTrace | None, theirs: JobTrace | None, before: Dump, after: Dump) -> StepDifference | None:
    if ours is None or theirs is None:
        return None if ours is theirs else _not_compared("the step, module by module: only one dump has a trace of it")
    if ours.is_of_one:
        return _compare(ours, theirs, mesh_of_job(after, theirs), "the second run")
    if theirs.is_of_one:
        return _compare(theirs, ours, mesh_of_job(before, ours), "the first run")
    return _not_compared(NO_OTHER)


def _not_compared(why: str) -> StepDifference:
    return StepDifference(not_compared=(NotChecked("", why, "step"),))


def _compare(one: JobTrace, job: JobTrace, mesh: Mesh, which: str) -> StepDifference:
    """Compare a job with one of a single process.

    Args:
        one: The job of one process.
        job: The other.
        mesh: Its mesh.
        which: What it is called.
    """
    missing = job.dump.files.missing_ranks or one.dump.files.missing_ranks
    if missing:
        return _not_compared(
            f"the step, module by module: no trace of rank{'s' * (len(missing) > 1)} {listed(missing, MAX_LISTED)}"
        )
    whole = one.ranks[0]
    belongings = belongings_of(whole, job.ranks, mesh)
    others, num_weights = other_weights(whole, job.ranks, belongings)
    if others:
        departure = _of_weights(others, num_weights, which)
        return StepDifference((departure,), num_weights - len(others), agreement=WEIGHTS)
    rows = rows_of(whole, job.ranks, mesh)
    if rows.problem:
        why = "another batch, another order of data or another batch size per rank: give both jobs the same rows in all"
        departure = Departure("batch", "", "", f"{which}: {rows.problem}", why)
        return StepDifference((departure,), num_weights, agreement=WEIGHTS)
    judging = _judging(whole, job.ranks, mesh, rows.order)
    return _beside(one, job, judging, belongings, which, num_weights)


def _of_weights(others: Sequence[OtherWeight], total: int, which: str) -> Departure:
    first = others[0]
    names = listed([one.name for one in others], MAX_LISTED)
    sentence = (
        f"weights differ already before the step, {len(others)} of {total}: {names}; on rank {first.rank} of {which} "
    )
    if first.is_permuted:
        sentence += f"{first.name} has numbers of the other job's {first.name}, at other places"
        why = "A loader or the sharding puts rows elsewhere than placements say: shardviz check finds the order"
    else:
        far = f"is up to {first.apart:.2g} of its size off" if np.isfinite(first.apart) else "fits no part of it"
        sentence += f"{first.name} {far}"
        why = (
            "another seed, another order of drawing (as where weights are drawn after sharding) or another checkpoint: "
            "start both jobs from the same weights; the step was not compared"
        )
    return Departure("weights", first.name, "", sentence, why)


def _judging(whole: OfRank, ranks: Mapping[int, OfRank], mesh: Mesh, order: NDArray[np.int64] | None) -> Judging:
    counts = counts_per_forward(whole)
    if is_pipeline(ranks):
        counts = {name: count for name, count in counts.items() if name}  # a stage is called what the model is
    of_ranks = {rank: own.points(counts) for rank, own in ranks.items()}
    points = whole.points(counts)
    if order is not None:
        points = {place: _reordered(point, place, of_ranks, order) for place, point in points.items()}
    return Judging(points, of_ranks, mesh)


def _reordered(
    point: Point, place: Place, ranks: Mapping[int, Mapping[Place, Point]], order: NDArray[np.int64]
) -> Point:
    """Return a point with its rows as the ranks have them, where they share its rows."""
    whole = point.values
    parts = [own[place].values for own in ranks.values() if place in own]
    is_shared = any(part is not None and whole is not None and part.shape[:1] < whole.shape[:1] for part in parts)
    if whole is None or not is_shared or not len(order) <= whole.shape[0] <= MAX_ROWS or whole.shape[0] % len(order):
        return point
    per_row = whole.shape[0] // len(order)
    rows = (order[:, None] * per_row + np.arange(per_row)).ravel()
    return type(point)(whole.reordered(rows), point.needs_grad, point.tensor, point.order, point.type, point.draws)


def _beside(
    one: JobTrace, job: JobTrace, judging: Judging, belongings: Mapping[str, Belonging], which: str, num_weights: int
) -> StepDifference:
    if not judging.found:
        return _not_compared("the step, module by module: the two models have no module of one name")
    dump, sampled = assembled(one, job, judging, belongings)
    results = list(findings_on(dump, judging))
    found = grouped([result for result in results if isinstance(result, Finding)], ranks_by_name(dump))
    found = sorted(found, key=lambda finding: not finding.module)
    departures = [_departure(finding, judging, which) for finding in found]
    not_compared = [result for result in results if isinstance(result, NotChecked)]
    not_compared += [NotChecked(name, "its gradient: only a sample of it was kept", "step") for name in sampled]
    not_compared += [*_without_numbers(judging), *_left_out((one, job))]
    right = [place for place, found in judging.found.items() if not any(state in BAD for state in found.state.values())]
    dtypes = tuple(" and ".join(_dtypes(points)) for points in (judging.whole, *list(judging.ranks.values())[:1]))
    return StepDifference(
        tuple(departures),
        num_weights + len(right),
        judging.drift,
        max((judging.found[place].near / (_size(judging, place) or 1.0) for place in right), default=0.0),
        dtypes,
        tuple(not_compared),
        "the jobs agree",
    )


def _size(judging: Judging, place: Place) -> float:
    kept = judging.whole[place].values
    return float(np.max(np.abs(kept.values), initial=0.0)) if kept is not None else 0.0


def _dtypes(points: Mapping[Place, Point]) -> list[str]:
    return sorted({point.values.dtype for point in points.values() if point.values is not None})


def _without_numbers(judging: Judging) -> Iterator[NotChecked]:
    if judging.num_not_finite:
        why = (
            f"{counted(judging.num_not_finite, 'place')} of the step: the job of one process has NaN or infinity there"
        )
        yield NotChecked("", why, "step")


def _left_out(jobs: Sequence[JobTrace]) -> list[NotChecked]:
    reasons = [why for job in jobs for record in job.dump.files.ranks.values() for _, why in record.not_checked]
    return [NotChecked("", why, "step") for why in dict.fromkeys(reasons)]


def _departure(finding: Finding, judging: Judging, which: str) -> Departure:
    odd = {
        (place.module, place.call)
        for place, found in judging.found.items()
        if any(state in BAD for state in found.state.values())
    }
    module = finding.module or finding.tensor
    first = f"{which}: {finding.summary}"
    why = f"{finding.cause}. {finding.fix[:1].upper()}{finding.fix[1:]}" if finding.fix else finding.cause
    following = len(odd) - 1 if finding.module else 0
    return Departure("sharded", module, "", first, why, max(following, 0))
