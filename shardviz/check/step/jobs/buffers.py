"""Buffers that ranks make different from each other between two steps, and that the model's forward reads.

A trace has those that a forward reads and does not write. Ranks had the same before the step, and one process has
another one after it, too. What is drawn at random also differs, so that of each rank must be like that of one process.
DistributedDataParallel sends rank 0's buffers before the next forward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.jobs.assembly import are_whole
from shardviz.check.step.jobs.starts import by_name
from shardviz.explain.placement.values import UnsynchronizedBuffer
from shardviz.explain.step.buffers import BufferOfParts, OwnBufferRead
from shardviz.explain.step.modules import UnexplainedModule
from shardviz.relate.tolerance import SINGLE, UPDATE_OF_JOB
from shardviz.relate.values import farthest, magnitude
from shardviz.text import listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.check.step.jobs.whole_job import WholeJob
    from shardviz.check.step.trace.calls import Calls
    from shardviz.check.step.trace.traces import OfRank, Weight
    from shardviz.dump.dump import Dump
    from shardviz.explain.finding import Finding

LIKE = 0.25
"""The least cosine of what a rank has and what one process has, if that is made of the rank's rows, too."""


def own_buffers(reference: WholeJob, job: WholeJob) -> Iterator[Finding]:
    """Yield the buffers of which ranks have equal copies before the step, and others before the next one."""
    wrappers = [wrapper for record in job.job.dump.files.ranks.values() for wrapper in record.wrappers or ()]
    if not reference.is_of_one or any(one.kind not in ("fsdp", "bypassed") for one in wrappers):
        return
    before, after = (by_name(job.job.ranks, "buffer", moment) for moment in ("step", "updated"))
    whole, whole_after = (by_name(reference.job.ranks, "buffer", moment) for moment in ("step", "updated"))
    for name in (name for name in after if name in before and name in whole and name in whole_after):
        wanted, wanted_after = (next(iter(each[name].values())) for each in (whole, whole_after))
        copies = before[name]
        if not are_whole(wanted, wanted_after, *copies.values(), *after[name].values()) or not _are_equal(
            wanted, copies
        ):
            continue
        values = {rank: _array(weight) for rank, weight in after[name].items()}
        expected = _array(wanted_after)
        moved = max(farthest(own, _array(wanted)) for own in (*values.values(), expected))
        axes = [axis for axis in job.mesh.long_axes if _differ_along(axis, values, job, UPDATE_OF_JOB * moved)]
        if axes and all(_is_like(own, expected) for own in values.values()):
            yield _finding(name, axes, job, tuple(values))


def with_buffer_read(finding: Finding, calls: Calls, reference: WholeJob, job: WholeJob) -> Finding:
    """Return an unexplained finding about a module with the buffer that it reads, if ranks' copies of that differ.

    The module's output must be wrong on every rank whose buffer differs. Other ranks may have a wrong output, too.
    """
    if not isinstance(finding.explanation, UnexplainedModule) or not reference.is_of_one:
        return finding
    wrong = {rank for call in calls.by_module.get(finding.module, ()) for rank, _ in call.tensors("output", "odd")}
    before, whole = (by_name(each.job.ranks, "buffer", "step") for each in (job, reference))
    for name in (name for name in before if name.rpartition(".")[0] == finding.module and name in whole):
        wanted = next(iter(whole[name].values()))
        if not are_whole(wanted, *before[name].values()):
            continue
        values = {rank: _array(weight) for rank, weight in before[name].items()}
        expected = _array(wanted)
        rounding = SINGLE * magnitude(expected)
        odd = {rank for rank, held in values.items() if farthest(held, expected) > rounding}
        axes = tuple(axis for axis in job.mesh.long_axes if _differ_along(axis, values, job, rounding))
        if axes and odd <= wrong:
            clause = f"{named_ranks(sorted(odd))} read other values from the buffer {name} than one process does"
            return replace(finding, details=(*finding.details, clause)).because(UnsynchronizedBuffer(axes))
    return finding


def unseen_buffers(dump: Dump, job: WholeJob) -> list[str]:
    """Return the buffers of a job's model that its trace lacks after the step, as those that a forward writes."""
    seen = by_name(job.job.ranks, "buffer", "updated")
    buffers = (tensor for tensor in dump.at("initial") if tensor.role == "buffer")
    return [name for buffer in buffers for name in buffer.names if name not in seen]


def _finding(name: str, axes: list[str], job: WholeJob, ranks: tuple[int, ...]) -> Finding:
    along = listed(axes)
    is_of_rows = any(_are_given_other_rows(axis, job.job.ranks, job) for axis in axes)
    cause = OwnBufferRead(along) if is_of_rows else BufferOfParts(along)
    sentence = (
        f"before the step ranks along {along} have the same in this buffer, and before the next one each has its own; "
        "the forward reads it"
    )
    return cause.finding(name, ranks, sentence, held=f"different values along {along}")


def _array(weight: Weight) -> NDArray[np.float64]:
    assert weight.values is not None, "it is whole"
    return weight.values.values


def _are_equal(wanted: Weight, copies: Mapping[int, Weight]) -> bool:
    """Whether ranks have what one process has, whole."""
    return all(np.array_equal(_array(wanted), _array(copy)) for copy in copies.values())


def _differ_along(axis: str, values: Mapping[int, NDArray[np.float64]], job: WholeJob, allowed: float) -> bool:
    groups = [[values[rank] for rank in group if rank in values] for group in job.mesh.groups(axis)]
    return any(farthest(group[0], other) > allowed for group in groups for other in group[1:])


def _are_given_other_rows(axis: str, ranks: Mapping[int, OfRank], job: WholeJob) -> bool:
    batches = {rank: [given.values for given in of_rank.batch] for rank, of_rank in ranks.items()}
    groups = [[batches[rank] for rank in group if rank in batches] for group in job.mesh.groups(axis)]
    return any(
        len(group[0]) != len(other) or not all(map(np.array_equal, group[0], other))
        for group in groups
        for other in group[1:]
    )


def _is_like(values: NDArray[np.float64], wanted: NDArray[np.float64]) -> bool:
    return float(np.vdot(values, wanted)) > LIKE * float(np.linalg.norm(values) * np.linalg.norm(wanted))
