"""Buffers of two jobs: those that ranks make different from each other, and averages of weights that are kept in some.

Between two steps: ranks had the same before the step, and one process has another one after it, too. What is drawn at
random also differs, so that of each rank must be like that of one process. DistributedDataParallel sends rank 0's
buffers before the next forward.

In a forward: each rank writes what it makes of its own rows, and one process what it makes of all of them. That is
right for statistics. It is wrong if the next forward reads rows that others wrote, and these are lost.

An average moves toward a weight by a share of its distance to it. What of the other job does so is an average; a
teacher, a gradient or a copy does not, and is left out. A rank's average is compared with what the rank's own weights
make of it, so that it is right if rounding stepped these in a slightly different direction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.report import NotChecked
from shardviz.check.step.comparison import weight_of
from shardviz.check.step.jobs.assembly import are_whole
from shardviz.check.step.jobs.updates import Updates
from shardviz.explain.placement.values import UnsynchronizedBuffer
from shardviz.explain.step.buffers import BufferOfParts, OtherAverage, OwnBufferRead, RowsOfOneRank, UnexplainedBuffer
from shardviz.explain.step.modules import UnexplainedModule
from shardviz.explain.templates import number
from shardviz.groups import in_groups, the_only
from shardviz.relate.factors import factor_of, pairs_along
from shardviz.relate.orders import places_of
from shardviz.relate.tolerance import (
    ALIKE,
    CANCELED,
    EPSILON,
    FEW,
    LEAST_STATISTIC,
    ROUNDINGS_OF_RULE,
    SINGLE,
    UPDATE_OF_JOB,
)
from shardviz.relate.values import farthest, magnitude, root_mean_square
from shardviz.text import join_numbers, listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.jobs.starts import Weights
    from shardviz.check.step.jobs.whole_job import WholeJob
    from shardviz.check.step.trace.calls import Calls
    from shardviz.check.step.trace.traces import Weight
    from shardviz.dump.dump import Dump
    from shardviz.dump.records.base import Moment
    from shardviz.explain.finding import Finding

    Values = NDArray[np.float64]
    Why = OtherAverage | UnexplainedBuffer
    Wanted = tuple[float, str, Values]  # the share, the moment of the weight, and the average before the step
    Averages = Sequence[tuple[str, str, "Average"]]

SENDING = ("ddp", "unfrozen", "no_sync")
"""Wrappers that send rank 0's buffers to all ranks before a forward, if they don't keep them."""

LIKE = 0.25
"""The least cosine of what a rank has and what one process has, if that is made of the rank's rows, too."""


def buffers_of(reference: WholeJob, job: WholeJob, *, are_updates_right: bool) -> Updates:
    """Compare the buffers of two jobs after the step: what forwards wrote, and if weights agree, all others."""
    written = _written_buffers(reference, job)
    others = _own_buffers(reference, job) if are_updates_right else ()
    return replace(written, results=(*written.results, *others))


def _own_buffers(reference: WholeJob, job: WholeJob) -> Iterator[Finding]:
    """Yield the buffers of which ranks have equal copies before the step, and others before the next one."""
    if not reference.is_of_one or any(wrapper.kind not in ("fsdp", "bypassed") for wrapper in job.wrappers):
        return
    before, after = job.weights("buffer"), job.weights("buffer", "updated")
    whole, whole_after = _of_one(reference, "step"), _of_one(reference, "updated")
    written = _written(job)
    names = [name for name in after if name not in written]
    for name in (name for name in names if name in before and name in whole and name in whole_after):
        copies = [whole[name], *before[name].values()]
        if not are_whole(whole_after[name], *copies, *after[name].values()):
            continue
        wanted, *others = map(_array, copies)
        if not all(np.array_equal(wanted, other) for other in others):
            continue
        values = {rank: _array(weight) for rank, weight in after[name].items()}
        expected = _array(whole_after[name])
        moved = max(farthest(own, wanted) for own in (*values.values(), expected))
        axes = [axis for axis in job.mesh.long_axes if _differ_along(axis, values, job, UPDATE_OF_JOB * moved)]
        if axes and all(_is_like(own, expected) for own in values.values()):
            yield _finding(name, axes, job, tuple(values))


def with_buffer_read(finding: Finding, calls: Calls, reference: WholeJob, job: WholeJob) -> Finding:
    """Return an unexplained finding about a module with the buffer that it reads, if ranks' copies of that differ.

    The module's output must be wrong on every rank whose buffer differs. Other ranks may have a wrong output, too. A
    buffer that a forward writes, and DistributedDataParallel sends, is only named: it may be of no consequence.
    """
    if not isinstance(finding.explanation, UnexplainedModule) or not reference.is_of_one:
        return finding
    wrong = {rank for call in calls.by_module.get(finding.module, ()) for rank, _ in call.tensors("output", "odd")}
    before, whole = job.weights("buffer"), _of_one(reference, "step")
    written, carried = _written(job), _carried(job)
    names = [name for name in before if name.rpartition(".")[0] == finding.module and name in whole]
    for name in (name for name in names if name in carried or name not in written):
        wanted = whole[name]
        if not are_whole(wanted, *before[name].values()):
            continue
        values = {rank: _array(weight) for rank, weight in before[name].items()}
        if name in written and _is_sent(job):
            values = dict.fromkeys(values, values[min(values)])
        expected = _array(wanted)
        rounding = (UPDATE_OF_JOB if name in written else SINGLE) * magnitude(expected)
        odd = {rank for rank, held in values.items() if farthest(held, expected) > rounding}
        clause = f"{named_ranks(sorted(odd))} read other values from the buffer {name} than one process does"
        axes = tuple(axis for axis in job.mesh.long_axes if _differ_along(axis, values, job, rounding))
        if odd and odd <= wrong and name in written and _is_of_floats(wanted):
            line = f"in {written[name]} " if written[name] else ""
            clause = f"{clause}; it was written {line}in an earlier step"
            return replace(finding, details=(*finding.details, clause))
        if axes and odd <= wrong and name not in written:
            return replace(finding, details=(*finding.details, clause)).because(UnsynchronizedBuffer(axes))
    return finding


def _written_buffers(reference: WholeJob, job: WholeJob) -> Updates:
    """Compare the buffers that the forwards of both jobs wrote, as they are after the step."""
    written, carried = _written(job), _carried(job) & _carried(reference)
    findings, others, num_right = [], [], 0
    after, whole_after = job.weights("buffer", "updated"), _of_one(reference, "updated")
    for name in (name for name in _written(reference) if name in written and name in after and name in whole_after):
        wanted = whole_after[name]
        copies = after[name].values()
        is_known = reference.is_of_one and are_whole(wanted, *copies)
        rounding = UPDATE_OF_JOB * magnitude(_array(wanted)) if is_known else 0.0
        if is_known and all(farthest(_array(copy), _array(wanted)) <= rounding for copy in copies):
            num_right += 1
            continue
        shares = _shares_of(name, reference, job) if is_known and name in carried and _is_sent(job) else None
        if shares is not None:
            findings.append(_lost_rows(name, *shares, written[name], job))
        others += [] if shares is not None else [name]
    return Updates(tuple(findings), num_right, tuple(others))


def _shares_of(
    name: str, reference: WholeJob, job: WholeJob
) -> tuple[int, dict[int, NDArray[np.int64]], dict[int, NDArray[np.int64]]] | None:
    """Return which of the slices that one process writes to a buffer each rank writes.

    Returns:
        The dim of the slices; by rank, which of the buffer's slices it writes, and at which ones one process has what
        they hold. None unless the ranks have all slices together, and those with the same ones have all of them alike.
    """
    before, after = job.weights("buffer")[name], job.weights("buffer", "updated")[name]
    wanted, wanted_after = (_array(_of_one(reference, moment)[name]) for moment in ("step", "updated"))
    if not all(weight.values is not None and weight.values.is_whole for weight in before.values()):
        return None
    values = {rank: (_array(before[rank]), _array(weight)) for rank, weight in after.items()}
    if any(not np.array_equal(old, wanted) or new.shape != wanted.shape for old, new in values.values()):
        return None
    for dim in range(wanted.ndim):
        slices_written = {rank: _changed(*pair, dim) for rank, pair in values.items()}
        all_written = _changed(wanted, wanted_after, dim)
        near = UPDATE_OF_JOB * magnitude(wanted_after)
        places = {
            rank: places_of(values[rank][1].take(slices, dim), wanted_after.take(all_written, dim), near)
            for rank, slices in slices_written.items()
        }
        share_by_rank = {rank: place[1] for rank, place in places.items() if place is not None and place[0] == dim}
        shares = {tuple(share.tolist()) for share in share_by_rank.values()}
        all_indices = sorted(index for share in shares for index in share)
        if len(share_by_rank) == len(values) and len(shares) > 1 and all_indices == list(range(len(all_written))):
            return dim, slices_written, {rank: all_written[share] for rank, share in share_by_rank.items()}
    return None


def _changed(before: NDArray[np.float64], after: NDArray[np.float64], dim: int) -> NDArray[np.int64]:
    """Return the slices along a dim in which something changed."""
    others = tuple(axis for axis in range(before.ndim) if axis != dim)
    return np.flatnonzero(np.any(before != after, axis=others))


def _lost_rows(
    name: str,
    dim: int,
    slices: Mapping[int, NDArray[np.int64]],
    shares: Mapping[int, NDArray[np.int64]],
    line: str,
    job: WholeJob,
) -> Finding:
    """Return the finding of a buffer of which each rank writes some of the slices that one process writes."""
    first = min(slices)
    other = next(rank for rank in slices if not np.array_equal(shares[rank], shares[first]))
    count = len({index for share in shares.values() for index in share.tolist()})
    places = [
        f"rank {rank} wrote {join_numbers(slices[rank])}, with what one process has in {join_numbers(shares[rank])}"
        for rank in (first, other)
    ]
    axes = [
        axis
        for axis in job.mesh.long_axes
        if not all(np.array_equal(*pair) for pair in pairs_along(axis, shares, job.mesh))
    ]
    sentence = (
        f"after the step each rank has written its own {len(slices[first])} slices along dim {dim} of this buffer, and "
        f"one process all {count}: {listed(places)}. The next forward reads them"
    )
    cause = RowsOfOneRank(listed(axes), line, is_same_place=np.array_equal(slices[first], slices[other]))
    return cause.finding(name, tuple(slices), sentence, held=f"{len(slices[first])} of {count} slices")


def _of_one(job: WholeJob, moment: Moment) -> dict[str, Weight]:
    """Return the buffers of a job as its first rank has them, which has all of each if the job is one process."""
    return {name: next(iter(parts.values())) for name, parts in job.weights("buffer", moment).items()}


def _written(job: WholeJob) -> dict[str, str]:
    """Return the buffers that a forward of a job wrote, each with the line that writes it."""
    return dict(pair for record in job.records.values() for pair in record.written_buffers)


def _carried(job: WholeJob) -> set[str]:
    """Return the buffers that a forward of a job writes, and reads before it does."""
    return {name for record in job.records.values() for name in record.read_buffers}


def _is_sent(job: WholeJob) -> bool:
    """Whether DistributedDataParallel sends rank 0's buffers to all ranks before a forward."""
    return any(wrapper.kind in SENDING and not wrapper.keeps_buffers for wrapper in job.wrappers)


def unseen_buffers(dump: Dump, job: WholeJob) -> list[str]:
    """Return the buffers of a job's model that its trace lacks after the step."""
    seen = job.weights("buffer", "updated")
    buffers = (tensor for tensor in dump.at("initial") if tensor.role == "buffer")
    return [name for buffer in buffers for name in buffer.names if name not in seen]


def _finding(name: str, axes: list[str], job: WholeJob, ranks: tuple[int, ...]) -> Finding:
    along = listed(axes)
    is_of_rows = any(_are_given_other_rows(axis, job) for axis in axes)
    cause = OwnBufferRead(along) if is_of_rows else BufferOfParts(along)
    sentence = (
        f"before the step ranks along {along} have the same in this buffer, and before the next one each has its own; "
        "the forward reads it"
    )
    return cause.finding(name, ranks, sentence, held=f"different values along {along}")


def _array(weight: Weight) -> NDArray[np.float64]:
    assert weight.values is not None, "it is whole"
    return weight.values.values


def _is_of_floats(weight: Weight) -> bool:
    return weight.values is not None and "float" in weight.values.dtype


def _differ_along(axis: str, values: Mapping[int, NDArray[np.float64]], job: WholeJob, allowed: float) -> bool:
    return any(farthest(*pair) > allowed for pair in pairs_along(axis, values, job.mesh))


def _are_given_other_rows(axis: str, job: WholeJob) -> bool:
    batches = {rank: [given.values for given in of_rank.batch] for rank, of_rank in job.ranks.items()}
    pairs = pairs_along(axis, batches, job.mesh)
    return any(len(first) != len(other) or not all(map(np.array_equal, first, other)) for first, other in pairs)


def _is_like(values: NDArray[np.float64], wanted: NDArray[np.float64]) -> bool:
    return float(np.vdot(values, wanted)) > LIKE * float(np.linalg.norm(values) * np.linalg.norm(wanted))


MAX_LISTED = 3
MOMENTS = ("after", "before")
MOST_UPDATES = 64
"""An average is not taken to be updated more often in a step."""


@dataclass(frozen=True, slots=True)
class Average:
    """An average before and after a step, and the weight that it is of.

    Attributes:
        before: The average before the step.
        after: The average after it.
        weights: The weight by moment: `after` the step, or `before` it.
        near: How far rounding may take an element.
        of_other_job: Whether the weight is the other job's: the rank has all of the average, and a part of the weight.
    """

    before: Values
    after: Values
    weights: Mapping[str, Values]
    near: float
    of_other_job: bool = False

    @property
    def moved(self) -> float:
        """How far an element was moved at most."""
        return magnitude(self.after - self.before)

    @property
    def is_moved(self) -> bool:
        """Whether something but rounding moved it."""
        return self.moved > self.near

    def share(self, moment: str) -> float | None:
        """Return the share of the distance to a weight by which it moved; None if it moved in another way."""
        toward = self.weights[moment] - self.before
        taken = factor_of(self.after - self.before, toward) if np.count_nonzero(toward) >= FEW else None
        part = ALIKE if self.of_other_job else LEAST_STATISTIC
        if taken is None or magnitude(self.after - self.before - taken * toward) > self.near + part * self.moved:
            return None
        return taken

    def is_near(self, due: Values) -> bool:
        """Whether the average is what it should be: another job's weight may be off by much where rounding decides."""
        apart = self.after - due
        if not self.of_other_job:
            return magnitude(apart) <= self.near + CANCELED * magnitude(due - self.before)
        return root_mean_square(apart) <= self.near + ALIKE * root_mean_square(due - self.before)

    def made_by(self, taken: float, moment: str) -> Values:
        """Return the average that a share makes."""
        return self.before + taken * (self.weights[moment] - self.before)


def averages_of(reference: WholeJob, job: WholeJob, weights: Weights) -> Updates:
    """Compare what a job's ranks make of their averages in the step with what the other job makes of its own."""
    averages = in_groups(_averages_of_ranks(job, weights))
    results: list[Finding | NotChecked] = []
    num_right = 0
    for wanted in in_groups(_moved_averages(reference, weights)).values():
        reasons = [_best(of_rank, dict(wanted)) for of_rank in averages.values()]
        # One piece of code makes them all: what a few numbers do not show, others do.
        explained = {why for own in reasons for why in own.values() if isinstance(why, OtherAverage)}
        of_all = the_only(explained) or UnexplainedBuffer()
        for weight, _ in wanted:
            of_ranks = {rank: own[weight] for rank, own in zip(averages, reasons, strict=True) if weight in own}
            if any(why is not None for why in of_ranks.values()):
                is_copied = all(_has_all(averages[rank], weight, weights) for rank in of_ranks)
                results.append(_result_of_average(f"average of {weight}", of_ranks, of_all, is_copied=is_copied))
            num_right += bool(of_ranks) and not any(of_ranks.values())
        if not any(reasons):
            why = "averages of weights: one process keeps some, and of the other job none was found"
            results.append(NotChecked("", why, "step"))
    return Updates(tuple(results), num_right)


def _best(of_rank: Averages, wanted: Mapping[str, Wanted]) -> dict[str, Why | None]:
    """Return why each weight's average is wrong, None if it is right, of what the rank keeps that is nearest.

    What nothing moves, as a teacher, is farther than what moves.
    """
    by_which = in_groups((which, (weight, average)) for which, weight, average in of_rank if weight in wanted)
    reasons = [{weight: _why_other(average, wanted[weight]) for weight, average in own} for own in by_which.values()]
    return min(reasons, key=lambda own: (sum(why is not None for why in own.values()), _num_idle(own)), default={})


def _num_idle(reasons: Mapping[str, Why | None]) -> int:
    """Return how many averages nothing moved."""
    return sum(isinstance(why, OtherAverage) and why.what == "none" for why in reasons.values())


def _has_all(of_rank: Averages, weight: str, weights: Weights) -> bool:
    """Whether a rank's average is of a whole weight."""
    whole = weights.params[weight].shape
    return all(average.before.shape == whole for _, name, average in of_rank if name == weight)


def _result_of_average(
    name: str, of_ranks: Mapping[int, Why | None], of_all: Why, *, is_copied: bool
) -> Finding | NotChecked:
    """Return the finding of an average that is wrong on some ranks: one that is saved by one rank may be right."""
    ranks = tuple(rank for rank, why in of_ranks.items() if why is not None)
    causes = {why for why in of_ranks.values() if isinstance(why, OtherAverage)}
    cause = the_only(causes) or of_all
    if is_copied and len(ranks) < len(of_ranks) and isinstance(cause, OtherAverage) and cause.what == "none":
        return NotChecked(name, f"{named_ranks(ranks, MAX_LISTED)} don't update their copies of it", "step")
    who = f"on {named_ranks(ranks, MAX_LISTED)} it" if len(ranks) < len(of_ranks) else "it"
    text = f"{who} is another average than the other job's after the step"
    return cause.finding(name, ranks, text, kind="wrong-value")


def _moved_averages(reference: WholeJob, weights: Weights) -> Iterator[tuple[str, tuple[str, Wanted]]]:
    """Yield each average that moved in the step: which, of which weight, and how."""
    before = reference.put_as_weights(weights.ways, "buffer")
    for name, after in reference.put_as_weights(weights.ways, "buffer", "updated").items():
        weight = weight_of("buffer", name)
        average = _average_of(before.get(name), after, weights.params.get(weight), weights.updated.get(weight))
        for moment in MOMENTS if average is not None and average.is_moved else ():
            if average is not None and (share := average.share(moment)) is not None:
                yield name.partition(" of ")[0], (weight, (share, moment, average.before))
                break


def _averages_of_ranks(job: WholeJob, weights: Weights) -> Iterator[tuple[int, tuple[str, str, Average]]]:
    """Yield what ranks have of each average, beside their own part of the weight or, if it has another shape, all."""
    old, after = job.weights("buffer"), job.weights("buffer", "updated")
    params, updated = job.weights("param"), job.weights("param", "updated")
    for name, held in after.items():
        weight = weight_of("buffer", name)
        for rank, part in held.items():
            sides = old.get(name, {}).get(rank), part
            average = _average_of(*sides, params.get(weight, {}).get(rank), updated.get(weight, {}).get(rank))
            if average is None:
                average = _average_of(
                    *sides, weights.params.get(weight), weights.updated.get(weight), of_other_job=True
                )
            if average is not None:
                yield rank, (name.partition(" of ")[0], weight, average)


def _average_of(*sides: Weight | None, of_other_job: bool = False) -> Average | None:
    """Return an average before and after a step, with the weight before and after it; None if they do not fit."""
    kept = [side.values for side in sides if side is not None and side.values is not None]
    is_complete = len(kept) == len(sides) and all(side.is_whole for side in kept)
    if not is_complete or len({side.values.shape for side in kept}) > 1:
        return None
    before, after, old, new = (side.values for side in kept)
    near = ROUNDINGS_OF_RULE * EPSILON.get(kept[1].dtype, EPSILON["float32"]) * magnitude(after)
    return Average(before, after, {"after": new, "before": old}, near, of_other_job)


def _why_other(average: Average, wanted: Wanted) -> OtherAverage | UnexplainedBuffer | None:
    """Return why a rank's average is not what the other job's share of the weight makes; None if it is."""
    taken, moment, before = wanted
    due = average.made_by(taken, moment)
    if average.is_near(due):
        is_other = average.is_moved and before.shape == average.before.shape
        apart = root_mean_square(average.before - before) if is_other else 0.0
        return OtherAverage("start") if apart > ALIKE * root_mean_square(before) else None
    if not average.is_moved:
        return OtherAverage("none", "before" if not magnitude(average.weights["before"] - average.before) else "")
    shares = {at: share for at in MOMENTS if (share := average.share(at)) is not None}
    others = [at for at, share in shares.items() if at != moment and math.isclose(share, taken, rel_tol=CANCELED)]
    if others:
        return OtherAverage("moment", others[0], moment)
    if moment in shares:
        kept = 1 - shares[moment]
        times = round(math.log(kept) / math.log(1 - taken)) if 0 < kept < 1 and 0 < taken < 1 else 0
        share = 1 - (1 - taken) ** times
        if 1 < times <= MOST_UPDATES and math.isclose(shares[moment], share, rel_tol=LEAST_STATISTIC):
            return OtherAverage("times", str(times))
        return OtherAverage("decay", number(kept), number(1 - taken))
    is_old = np.abs(average.after - average.before) <= average.near
    is_due = np.abs(average.after - due) <= average.near + ALIKE * magnitude(due - average.before)
    is_part = np.all(is_old | is_due) and not np.all(is_old) and average.of_other_job
    return OtherAverage("part") if is_part else UnexplainedBuffer()
