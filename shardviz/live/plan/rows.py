"""The rows of `plan --gpus`: meshes are looked at first, and those are planned that may fit and leave no rank idle.

A look asks one rank of a mesh, or two, and steps none. So all looks take less time than the plan of one mesh.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardviz.dump.records.base import SCHEMA
from shardviz.errors import RankError, ShardvizError
from shardviz.live.plan.asked import answer
from shardviz.live.plan.forks import ask, one_line
from shardviz.live.plan.planning import load, plan, question_of
from shardviz.plan.choice import Row, row_of
from shardviz.plan.counting.amounts import Amounts
from shardviz.plan.ranks import PlannedRanks
from shardviz.plan.records import PlanRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardviz.layout.mesh import Mesh
    from shardviz.live.plan.asked import Reply
    from shardviz.live.plan.planning import Loaded, PlanJob

IDLE = "stages of {} would have no parameters"


@dataclass(frozen=True)
class _Look:
    """What one rank has before a step.

    Attributes:
        lasting: Bytes that its GPU holds before, in and after a step.
        is_idle: Whether it has no parameters.
        failed: Why there is no answer; empty where there is one.
    """

    lasting: int = 0
    is_idle: bool = False
    failed: str = ""


@dataclass(frozen=True)
class _Wanted:
    """A rank that is looked at, and why: for the stages of an axis, or as the first of its mesh."""

    mesh: Mesh
    rank: int
    axis: str = ""


def rows(
    job: PlanJob, tried: Sequence[Mesh], memory: int, now: Callable[[str], None] = lambda _: None
) -> Iterator[Row]:
    """Plan meshes, and yield a row for each.

    Args:
        job: The job; its mesh is not planned.
        tried: The meshes.
        memory: Bytes that a GPU has; 0 where it is not given.
        now: Called with what is done next.

    Raises:
        ShardvizError: The probe cannot be loaded.
    """
    loaded = load(job)
    now("looking at all of them")
    found = _looks(job, loaded, tried, with_memory=bool(memory) and job.with_step)
    large: list[Row] = []
    for mesh in tried:
        own = [found[one] for one in found if one.mesh == mesh]
        idle = [one.axis for one, look in found.items() if one.mesh == mesh and one.axis and look.is_idle]
        failed = next((one.failed for one in own if one.failed), IDLE.format(idle[0]) if idle else "")
        lasting = max((one.lasting for one in own), default=0)
        if failed:
            yield Row(mesh, failed=failed)
        elif memory and lasting > memory:
            large.append(Row(mesh, lasting))
        else:
            now(f"planning {mesh}")
            yield _row(replace(job, mesh=mesh), loaded)
    now("planning what does not fit")
    yield from _too_large(job, loaded, large)


def _row(job: PlanJob, loaded: Loaded) -> Row:
    try:
        return row_of(PlannedRanks(plan(job, loaded)[1], job.mesh))
    except ShardvizError as error:
        return Row(job.mesh, failed=error.message)


def _too_large(job: PlanJob, loaded: Loaded, large: Sequence[Row]) -> Iterator[Row]:
    """Yield the rows that do not fit; plan the fullest rank only of those that may need the least memory."""
    least = 0
    for row in sorted(large, key=lambda row: row.bytes):
        if not least or row.bytes < least:
            row = _without_step(replace(job, mesh=row.mesh, with_step=False), loaded, row)
            least = min(least, row.bytes) if least else row.bytes
        yield row


def _without_step(job: PlanJob, loaded: Loaded, row: Row) -> Row:
    try:
        return replace(row, bytes=int(Amounts(PlannedRanks(plan(job, loaded)[1], job.mesh)).lasting.max()))
    except ShardvizError as error:
        return Row(job.mesh, failed=error.message)


def _looks(job: PlanJob, loaded: Loaded, tried: Sequence[Mesh], *, with_memory: bool) -> dict[_Wanted, _Look]:
    """Look at the first rank of every mesh where memory is asked for, and at a stage that may have nothing."""
    wanted = [_Wanted(mesh, mesh.ranks[0]) for mesh in tried if with_memory]
    wanted += [one for mesh in tried for one in _last_but_one(mesh, loaded.stage_axes)]
    named = {f"{one.rank} of {one.mesh}, number {number}": one for number, one in enumerate(wanted)}

    def look(name: str) -> _Look:
        one = named[name]
        try:
            question = replace(question_of(replace(job, mesh=one.mesh), loaded), with_step=False)
            return _look(answer(question, one.rank), one.mesh)
        except ShardvizError as error:
            return _Look(failed=error.message)
        except Exception as error:
            return _Look(failed=f"rank {one.rank}: {one_line(error)}")

    try:
        answers = ask(named, look)
    except RankError:  # one died or hung: then its plan says so, beside those of the others
        return {}
    return {named[name]: answers[name] for name in named}


def _last_but_one(mesh: Mesh, axes: Sequence[str]) -> Iterator[_Wanted]:
    """Yield the rank whose stage has nothing where stages are filled in order: the last one may have the output."""
    for axis in axes:
        if mesh.axis_size(axis) > 2:
            at = tuple(size - 2 if name == axis else 0 for name, size in zip(mesh.axes, mesh.shape, strict=True))
            yield _Wanted(mesh, mesh.rank_at(at), axis)


def _look(reply: Reply, mesh: Mesh) -> _Look:
    ranks = PlannedRanks(PlanRecord(SCHEMA, (reply.part,)), mesh)
    record = reply.part.record
    has_parameters = any(record.bodies[one.body].role == "param" for one in record.tensors)
    return _Look(int(Amounts(ranks).lasting[mesh.ranks.index(record.rank)]), not has_parameters)
