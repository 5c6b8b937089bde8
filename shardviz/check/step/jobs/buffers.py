"""Buffers that ranks of a job make different from each other in a step or after it, and that the forward reads.

Between two steps: ranks had the same before the step, and one process has another one after it, too. What is drawn at
random also differs, so that of each rank must be like that of one process, and much so if numbers were drawn between
the steps. DistributedDataParallel sends rank 0's buffers before the next forward.

In a forward: each rank writes what it makes of its own rows, and one process what it makes of all of them. That is
right for statistics. It is wrong if the next forward reads rows that others wrote, and these are lost.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.jobs.assembly import are_whole
from shardviz.check.step.jobs.later_outputs import later_outputs_of
from shardviz.check.step.jobs.updates import Updates
from shardviz.check.step.rules.factors import size_in_words
from shardviz.check.step.update.reasons import factor_to
from shardviz.check.step.update.states import share_added
from shardviz.explain.placement.values import UnsynchronizedBuffer
from shardviz.explain.step.buffers import (
    BufferOfOwnSizes,
    BufferOfParts,
    BufferReducedWrongly,
    OtherBufferBefore,
    OwnBufferRead,
    RowsOfOneRank,
    StatisticsOfOneRank,
)
from shardviz.explain.step.modules import UnexplainedModule
from shardviz.explain.step.whole_step import UnexplainedBackward
from shardviz.explain.templates import times_text
from shardviz.layout.layout import placements_of
from shardviz.relate.factors import pairs_along
from shardviz.relate.orders import places_of
from shardviz.relate.tolerance import SINGLE, UPDATE_OF_JOB
from shardviz.relate.values import farthest, finite_magnitude, part_of
from shardviz.text import join_numbers, listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.jobs.whole_job import WholeJob
    from shardviz.check.step.trace.calls import Calls
    from shardviz.check.step.trace.traces import Weight
    from shardviz.dump.dump import Dump
    from shardviz.dump.records.base import Moment
    from shardviz.explain.finding import Finding

SENDING = ("ddp", "unfrozen", "no_sync")
"""Wrappers that send rank 0's buffers to all ranks before a forward, if they don't keep them."""

LEAVING = ("fsdp", "bypassed")
"""Wrappers that leave buffers as they are."""

FEW_OF_PART = 2
"""A smaller part may be anything."""

LIKE = 0.25
"""The least cosine of what a rank has and what one process has, if that is made of the rank's rows, too."""

CHANCE = 3.0
"""Two drawn buffers' correlation is within so many standard deviations, each 1 / sqrt(elements), of zero."""

DRAWN = "the outputs of later steps: between steps each rank draws numbers of its own into this buffer, and reads them"

BETWEEN_STEPS = (
    "before the step ranks along {} have the same in this buffer, and before the next one each has its own; the "
    "forward reads it"
)
SUMMED, AVERAGED = "sum over ranks of what each adds", "mean over ranks"
"""What makes one process's buffer of those that ranks have."""


def buffers_of(reference: WholeJob, job: WholeJob, *, are_updates_right: bool) -> Updates:
    """Compare the buffers of two jobs after the step: what forwards wrote, and if weights agree, all others."""
    written = _written_buffers(reference, job)
    others = _own_buffers(reference, job) if are_updates_right else ()
    return replace(written, results=(*written.results, *others))


def _own_buffers(reference: WholeJob, job: WholeJob) -> Iterator[Finding]:
    """Yield the buffers of which ranks have equal copies before the step, and others before the next one.

    Where all ranks are sent rank 0's, the model must make other outputs of later rows: it may be of no consequence.
    """
    if not reference.is_of_one or any(wrapper.kind not in (*LEAVING, *SENDING) for wrapper in job.wrappers):
        return
    written = _written(job)
    drawn = redrawn_buffers(reference, job)
    for name in (name for name in job.weights("buffer", "updated") if name not in written and name not in drawn):
        if axes := _axes_apart(name, reference, job):
            finding = _finding(name, axes, job, BETWEEN_STEPS.format(listed(axes)))
            if not _is_sent(name, job):
                yield finding
            elif isinstance(finding.explanation, OwnBufferRead) and later_outputs_of(reference, job)[0] is not None:
                yield finding.because(replace(finding.explanation, is_sent=True))


def _axes_apart(name: str, reference: WholeJob, job: WholeJob) -> list[str]:
    """Return the axes along which ranks make different buffers of equal ones, all of them like one process's."""
    before, after = (job.weights("buffer", moment).get(name, {}) for moment in ("step", "updated"))
    whole, whole_after = (_of_one(reference, moment).get(name) for moment in ("step", "updated"))
    if not before or whole is None or whole_after is None:
        return []
    copies = [whole, *before.values()]
    if not are_whole(whole_after, *copies, *after.values()):
        return []
    wanted, *others = map(_array, copies)
    values, expected = {rank: _array(weight) for rank, weight in after.items()}, _array(whole_after)
    is_drawn = _draws_between(job)
    if not all(np.array_equal(wanted, other) for other in others) or any(
        own.shape != wanted.shape or not _is_like(own, expected, is_drawn=is_drawn) for own in values.values()
    ):
        return []
    moved = max(farthest(own, wanted) for own in (*values.values(), expected))
    return [axis for axis in job.mesh.long_axes if _differ_along(axis, values, job, UPDATE_OF_JOB * moved)]


def redrawn_buffers(reference: WholeJob, job: WholeJob) -> list[str]:
    """Return the buffers into which each rank draws numbers between two steps, as one process does.

    A rank whose generator is where that of one process is has the very same numbers, and others have not. These have
    nothing in common with them, and are not what the rank had before.
    """
    if not reference.is_of_one or not _draws_between(job):
        return []
    before, whole_after, drawn = job.weights("buffer"), _of_one(reference, "updated"), []
    for name, after in job.weights("buffer", "updated").items():
        if name in whole_after and are_whole(whole_after[name], *after.values()):
            wanted, held = _array(whole_after[name]), {rank: _array(weight) for rank, weight in after.items()}
            differing = {rank: values for rank, values in held.items() if not np.array_equal(values, wanted)}
            is_other = 0 < len(differing) < len(held) and not any(
                _is_like(values, wanted, is_drawn=True) or _is_kept(values, before.get(name, {}).get(rank))
                for rank, values in differing.items()
            )
            drawn += [name] if is_other else []
    return drawn


def _is_kept(values: NDArray[np.float64], before: Weight | None) -> bool:
    return before is not None and np.array_equal(values, _array(before))


def _draws_between(job: WholeJob) -> bool:
    """Whether a rank drew random numbers between the traced step's forward and the next one."""
    return any(given.draws_after for record in job.records.values() for given in record.given[:1])


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
        if name not in written and (others := _of_no_part(wanted, before[name], job)) and {*others} <= wrong:
            clause = f"{named_ranks(others)} read numbers from the buffer {name} that are no part of one process's"
            return replace(finding, details=(*finding.details, clause)).because(BufferOfOwnSizes(name))
        values = {rank: _array(weight) for rank, weight in before[name].items()}
        if name in written and _is_sent(name, job):
            values = dict.fromkeys(values, values[min(values)])
        expected = _array(wanted)
        rounding = (UPDATE_OF_JOB if name in written else SINGLE) * finite_magnitude(expected)
        odd = {rank for rank, held in values.items() if farthest(held, expected) > rounding}
        clause = f"{named_ranks(sorted(odd))} read other values from the buffer {name} than one process does"
        axes = tuple(axis for axis in job.mesh.long_axes if _differ_along(axis, values, job, rounding))
        if odd and odd <= wrong and name in written and _is_of_floats(wanted):
            line = f"in {written[name]} " if written[name] else ""
            clause = f"{clause}; it was written {line}in an earlier step"
            return replace(finding, details=(*finding.details, clause))
        if axes and odd <= wrong and name not in written:
            is_changed = job.steps_before and any(wrapper.kind in SENDING for wrapper in job.wrappers)
            cause = OtherBufferBefore() if is_changed else UnsynchronizedBuffer(axes)  # wrapped, copies are equal
            return replace(finding, details=(*finding.details, clause)).because(cause)
    return finding


def _of_no_part(whole: Weight, parts: Mapping[int, Weight], job: WholeJob) -> list[int]:
    """Return the ranks whose smaller part of a buffer of floats isn't in the whole, if placements allow its shape."""
    expected = _array(whole)
    others = []
    for rank, weight in parts.items():
        held = _array(weight)
        regions = [region for _, region in placements_of(expected.shape, held.shape, job.mesh, rank)]
        near = SINGLE * finite_magnitude(expected)
        if held.shape == expected.shape or not regions or not _is_of_floats(weight) or held.size < FEW_OF_PART:
            return []
        if not any(farthest(held, part_of(expected, region)) <= near for region in regions):
            others.append(rank)
    return others


def with_buffers_before(findings: Sequence[Finding], reference: WholeJob, job: WholeJob) -> Sequence[Finding]:
    """Return findings with the buffers that earlier steps wrote differently, if gradients are wrong without a cause.

    The gradients' own findings stay: nothing shows that the loss depends on these buffers.
    """
    is_unexplained = findings and all(isinstance(finding.explanation, UnexplainedBackward) for finding in findings)
    if not is_unexplained or not reference.is_of_one or not job.steps_before:
        return findings
    before, whole = job.weights("buffer"), _of_one(reference, "step")
    written = _written(job)
    buffers = []
    for name in sorted(_carried(job) & _carried(reference) & before.keys() & whole.keys()):
        if not are_whole(whole[name], *before[name].values()) or not _is_of_floats(whole[name]):
            continue
        expected = _array(whole[name])
        off = {rank: farthest(_array(weight), expected) for rank, weight in before[name].items()}
        odd = {rank: far for rank, far in off.items() if far > UPDATE_OF_JOB * finite_magnitude(expected)}
        if odd:
            line = f"{written[name]} " if written.get(name) else "a forward "
            sentence = (
                f"before the step {named_ranks(sorted(odd))} {'has' if len(odd) == 1 else 'have'} other values in this "
                f"buffer than one process, off by up to {max(odd.values()):.5g} (largest value "
                f"{finite_magnitude(expected):.5g}); {line}wrote them in an earlier step, and the forward reads them"
            )
            buffers.append(OtherBufferBefore().finding(name, tuple(sorted(odd)), sentence))
    return [*findings, *buffers]


def _written_buffers(reference: WholeJob, job: WholeJob) -> Updates:
    """Compare the buffers that the forwards of both jobs wrote, as they are after the step."""
    written, carried = _written(job), _carried(job) & _carried(reference)
    findings, others, num_right = [], [], 0
    after, whole_after = job.weights("buffer", "updated"), _of_one(reference, "updated")
    for name in (name for name in _written(reference) if name in written and name in after and name in whole_after):
        wanted = whole_after[name]
        copies = after[name].values()
        is_known = reference.is_of_one and are_whole(wanted, *copies)
        rounding = UPDATE_OF_JOB * finite_magnitude(_array(wanted)) if is_known else 0.0
        if is_known and all(farthest(_array(copy), _array(wanted)) <= rounding for copy in copies):
            num_right += 1
            continue
        if is_known and name in carried and (scaled := _scaled_on_all(name, reference, job)) is not None:
            findings.append(scaled)
            continue
        shares = _shares_of(name, reference, job) if is_known and name in carried else None
        if shares is not None and _is_sent(name, job):
            findings.append(_lost_rows(name, *shares, written[name], job))
            continue
        if is_known and name in carried and (of_first := _of_first_rank(name, reference, job)) is not None:
            findings.append(of_first)
            continue
        is_kept = is_known and name in carried and shares is None and _is_of_floats(wanted) and not _is_sent(name, job)
        axes = _axes_apart(name, reference, job) if is_kept else []
        if axes and all(_are_given_other_rows(axis, job) for axis in axes):
            findings.append(_of_own_rows(name, axes, reference, job))
        else:
            others.append(name)
    return Updates(tuple(findings), num_right, tuple(others))


def _scaled_on_all(name: str, reference: WholeJob, job: WholeJob) -> Finding | None:
    """Return that what a forward adds to a buffer is the other job's times a size of the mesh, on all ranks alike.

    Ranks have different rows, so equal copies were reduced over them. If models make the same of later rows, they read
    it in a way that no factor changes.
    """
    old, expected = (_array(_of_one(reference, moment)[name]) for moment in ("step", "updated"))
    after = job.weights("buffer", "updated")[name]
    copies = {rank: _array(weight) for rank, weight in after.items()}
    first = next(iter(copies.values()))
    axes = [axis for axis in job.mesh.long_axes if _are_given_other_rows(axis, job)]
    if not axes or not _is_of_floats(next(iter(after.values()))) or len(copies) < 2:
        return None
    added = share_added(first, expected, old, job.mesh, UPDATE_OF_JOB)
    if added is None or any(not np.array_equal(first, copy) for copy in copies.values()):
        return None
    ratio, fitted = added
    of_outputs, num_agreeing = later_outputs_of(reference, job)
    is_without_effect = bool(num_agreeing) and of_outputs is None
    if farthest(fitted, first) > UPDATE_OF_JOB * finite_magnitude(first) or is_without_effect:
        return None
    line = _written(job)[name]
    sentence = (
        f"the forward writes the buffer{f' in {line}' if line else ''}, and the next one reads it: on every rank, what "
        f"it adds is {times_text(ratio)} the other job's"
    )
    cause = BufferReducedWrongly(size_in_words(job.mesh, ratio), is_too_large=ratio > 1)
    return cause.finding(name, tuple(copies), sentence, kind="wrong-scale")


def _of_own_rows(name: str, axes: list[str], reference: WholeJob, job: WholeJob) -> Finding:
    """Return the finding of a buffer that each rank makes of its own rows, and that the next forward reads."""
    lines = {other: f"{other} ({line})" if line else other for other, line in _written(job).items()}
    siblings = [other for other in lines if other.rpartition(".")[0] == name.rpartition(".")[0]]
    sentence = f"each rank's forward writes {lines[name]} from its own rows, and the next forward reads it: "
    sentence += f"ranks along {listed(axes)} have different values after the step"
    for op in (SUMMED, AVERAGED):
        if of_op := [lines[other] for other in siblings if _reduction(other, reference, job) == op]:
            sentence += f". With the {op} it would be one process's: {listed(of_op)}"
    return _finding(name, axes, job, sentence)


def _of_first_rank(name: str, reference: WholeJob, job: WholeJob) -> Finding | None:
    """Return that rank 0's statistics are sent to all ranks, if all ranks' together are one process's.

    If models make the same of later rows, the buffer is of no consequence in training.
    """
    op = _reduction(name, reference, job) if _is_sent(name, job) else ""
    axes = [axis for axis in job.mesh.long_axes if _are_given_other_rows(axis, job)]
    if not op or not axes or later_outputs_of(reference, job)[0] is None:
        return None
    line = _written(job)[name]
    sentence = (
        f"each rank's forward writes this buffer{f' in {line}' if line else ''} from its own rows; the {op} would be "
        "one process's, and before the next forward all ranks are sent that of rank 0"
    )
    cause = StatisticsOfOneRank(listed(axes), line, "AVG" if op == AVERAGED else "SUM")
    return cause.finding(name, tuple(job.weights("buffer", "updated")[name]), sentence, held="rank 0's")


def _reduction(name: str, reference: WholeJob, job: WholeJob) -> str:
    """Return what over ranks gives one process's buffer; empty if nothing does.

    The sum of what ranks add has the share that a buffer keeps of its old value once for each of them.
    """
    old, expected = (_of_one(reference, moment).get(name) for moment in ("step", "updated"))
    held = tuple(job.weights("buffer", "updated").get(name, {}).values())
    if old is None or expected is None or not held or not are_whole(old, expected, *held) or not _is_of_floats(old):
        return ""
    parts, wanted = [*map(_array, held)], _array(expected)
    if {part.shape for part in parts} != {wanted.shape} or all(np.array_equal(part, wanted) for part in parts):
        return ""
    if farthest(np.mean(parts, axis=0), wanted) <= UPDATE_OF_JOB * finite_magnitude(wanted):
        return AVERAGED
    return SUMMED if factor_to(np.sum(parts, axis=0) - wanted, _array(old)) is not None else ""


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
        near = UPDATE_OF_JOB * finite_magnitude(wanted_after)
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


def _is_sent(name: str, job: WholeJob) -> bool:
    """Whether DistributedDataParallel sends rank 0's buffer to all ranks before a forward."""
    is_beside = any(name in record.buffers_beside for record in job.records.values())
    return not is_beside and any(wrapper.kind in SENDING and not wrapper.keeps_buffers for wrapper in job.wrappers)


def unseen_buffers(dump: Dump, job: WholeJob) -> list[str]:
    """Return the buffers of a job's model that its trace lacks after the step, but those that no forward writes."""
    kept = {name for record in job.records.values() for name in record.kept_buffers}
    seen = job.weights("buffer", "updated").keys() | (kept - _written(job).keys())
    buffers = (tensor for tensor in dump.at("initial") if tensor.role == "buffer")
    return [name for buffer in buffers for name in buffer.names if name not in seen]


def _finding(name: str, axes: list[str], job: WholeJob, sentence: str) -> Finding:
    along = listed(axes)
    is_of_rows = any(_are_given_other_rows(axis, job) for axis in axes)
    cause = OwnBufferRead(along) if is_of_rows else BufferOfParts(along)
    ranks = tuple(job.weights("buffer", "updated")[name])
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


def _is_like(values: NDArray[np.float64], wanted: NDArray[np.float64], *, is_drawn: bool) -> bool:
    """Whether two buffers have much in common; if they may be drawn, besides their mean and beyond chance."""
    least = LIKE
    if is_drawn and wanted.size:
        values, wanted, least = values - values.mean(), wanted - wanted.mean(), max(LIKE, CHANCE / wanted.size**0.5)
    return float(np.vdot(values, wanted)) > least * float(np.linalg.norm(values) * np.linalg.norm(wanted))
