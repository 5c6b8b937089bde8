"""The rows of `plan --gpus`: meshes are looked at first, and those are planned that may fit and leave no rank idle.

A look asks one rank of a mesh, or two, and steps none. Meshes are planned side by side, on as many cores as there are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardviz.dump.records.base import SCHEMA
from shardviz.errors import RankError, ShardvizError
from shardviz.live.plan.asked import answer
from shardviz.live.plan.asking import Asked, alone, together
from shardviz.live.plan.forks import one_line
from shardviz.live.plan.planning import load, planned, question_of
from shardviz.plan.choice import Row, row_of
from shardviz.plan.counting.amounts import Amounts
from shardviz.plan.ranks import PlannedRanks
from shardviz.plan.records import PlanRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardviz.layout.mesh import Mesh
    from shardviz.live.plan.asked import Reply
    from shardviz.live.plan.asking import Program
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


def rows(
    job: PlanJob, tried: Sequence[Mesh], memory: int, now: Callable[[str], None] = lambda _: None
) -> Iterator[Row]:
    """Plan meshes, and yield a row for each when it is known.

    Args:
        job: The job; its mesh is not planned.
        tried: The meshes.
        memory: Bytes that a GPU has; 0 where it is not given.
        now: Called with what is done next.

    Raises:
        ShardvizError: The probe cannot be loaded.
    """
    loaded = load(job)
    large: list[Row] = []
    for _, row in together(_row(replace(job, mesh=mesh), loaded, at, memory, now) for at, mesh in enumerate(tried)):
        if row.is_estimate:
            large.append(row)
        else:
            yield row
    now("planning what does not fit")
    yield from _too_large(job, loaded, large, len(tried))


def _row(job: PlanJob, loaded: Loaded, place: int, memory: int, now: Callable[[str], None]) -> Program[Row]:
    """Look at a mesh, and plan it if it may fit and leaves no rank idle."""
    looks = yield from _looks(job, loaded, with_memory=bool(memory) and job.with_step)
    idle = [axis for axis, look in looks.items() if axis and look.is_idle]
    failed = next((look.failed for look in looks.values() if look.failed), IDLE.format(idle[0]) if idle else "")
    lasting = max((look.lasting for look in looks.values()), default=0)
    if failed:
        return Row(job.mesh, failed=failed, place=place)
    if memory and lasting > memory:
        return Row(job.mesh, lasting, place=place, is_estimate=True)
    now(f"planning {job.mesh}")
    try:
        _, record = yield from planned(job, loaded)
        return replace(row_of(PlannedRanks(record, job.mesh)), place=place)
    except ShardvizError as error:
        return Row(job.mesh, failed=error.message, place=place)


def _too_large(job: PlanJob, loaded: Loaded, large: Sequence[Row], place: int) -> Iterator[Row]:
    """Yield the rows that do not fit; plan the fullest rank only of those that may need the least memory."""
    least = 0
    for number, row in enumerate(sorted(large, key=lambda row: (row.bytes, row.place))):
        last = replace(row, place=place + number, is_estimate=False)
        if not least or row.bytes < least:
            last = _without_step(replace(job, mesh=row.mesh, with_step=False), loaded, last)
            least = min(least, last.bytes) if least else last.bytes
        yield last


def _without_step(job: PlanJob, loaded: Loaded, row: Row) -> Row:
    try:
        _, record = alone(planned(job, loaded))
        return replace(row, bytes=int(Amounts(PlannedRanks(record, job.mesh)).lasting.max()))
    except ShardvizError as error:
        return Row(job.mesh, failed=error.message, place=row.place)


def _looks(job: PlanJob, loaded: Loaded, *, with_memory: bool) -> Program[dict[str, _Look]]:
    """Look at the first rank where memory is asked for, and by axis at a stage that may have nothing."""
    wanted = {"": job.mesh.ranks[0]} if with_memory else {}
    wanted |= dict(_last_but_one(job.mesh, loaded.stage_axes))

    def look(rank: int) -> _Look:
        try:
            return _look(answer(replace(question_of(job, loaded), with_step=False), rank), job.mesh)
        except ShardvizError as error:
            return _Look(failed=error.message)
        except Exception as error:
            return _Look(failed=f"rank {rank}: {one_line(error)}")

    try:
        answers = yield Asked(tuple(wanted.values()), look)
    except RankError:  # it died or hung: then the plan says so
        return {}
    return {axis: answers[rank] for axis, rank in wanted.items()}


def _last_but_one(mesh: Mesh, axes: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield for an axis the rank whose stage has nothing if any has: the last one may have the output."""
    for axis in axes:
        if mesh.axis_size(axis) > 2:
            at = tuple(size - 2 if name == axis else 0 for name, size in zip(mesh.axes, mesh.shape, strict=True))
            yield axis, mesh.rank_at(at)


def _look(reply: Reply, mesh: Mesh) -> _Look:
    ranks = PlannedRanks(PlanRecord(SCHEMA, (reply.part,)), mesh)
    record = reply.part.record
    has_parameters = any(record.bodies[one.body].role == "param" for one in record.tensors)
    return _Look(int(Amounts(ranks).lasting[mesh.ranks.index(record.rank)]), not has_parameters)
