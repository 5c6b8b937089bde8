"""The rows of `plan --gpus`: meshes are looked at first, and those are planned that may fit and leave no rank idle.

A look asks one rank of a mesh, or two, and steps none. Meshes are planned side by side, on as many cores as there are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardviz.dump.planned.ranks import PlannedRanks
from shardviz.dump.records.base import SCHEMA
from shardviz.dump.records.plan import PlanRecord
from shardviz.errors import RankError, ShardvizError
from shardviz.live.plan.asked import answer
from shardviz.live.plan.asking import Request, alone, together
from shardviz.live.plan.forks import one_line
from shardviz.live.plan.planning import load, planned, question_of
from shardviz.plan.choice import Row, row_of
from shardviz.plan.counting.amounts import Amounts

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


@dataclass(frozen=True)
class _TooLarge:
    """A mesh on which one rank that was looked at does not fit.

    Attributes:
        mesh: The mesh.
        bytes: Bytes of that rank.
        place: Where it stands among the meshes that were tried.
    """

    mesh: Mesh
    bytes: int
    place: int


def rows(
    job: PlanJob,
    tried: Sequence[Mesh],
    memory: int,
    now: Callable[[str], None] = lambda _: None,
    ended: Callable[[], None] = lambda: None,
) -> Iterator[Row]:
    """Plan meshes, and yield a row for each when it is known.

    Args:
        job: The job; its mesh is not planned.
        tried: The meshes.
        memory: Bytes that a GPU has; 0 where it is not given.
        now: Called with what is done next.
        ended: Called when a mesh has been planned, or looked at where it is too large.

    Raises:
        ShardvizError: The probe cannot be loaded.
    """
    loaded = load(job)
    large: list[_TooLarge] = []
    for _, row in together(_row(replace(job, mesh=mesh), loaded, at, memory, now) for at, mesh in enumerate(tried)):
        ended()
        if isinstance(row, _TooLarge):
            large.append(row)
        else:
            yield row
    now("planning what does not fit")
    yield from _too_large(job, loaded, large, len(tried))


def _row(job: PlanJob, loaded: Loaded, place: int, memory: int, now: Callable[[str], None]) -> Program[Row | _TooLarge]:
    """Look at a mesh, and plan it if it may fit and leaves no rank idle."""
    looks = yield from _looks(job, loaded, with_memory=bool(memory) and job.with_step)
    idle = [axis for axis, look in looks.items() if axis and look.is_idle]
    failed = next((look.failed for look in looks.values() if look.failed), IDLE.format(idle[0]) if idle else "")
    lasting = max((look.lasting for look in looks.values()), default=0)
    if failed:
        return Row(job.mesh, failed=failed, place=place)
    if memory and lasting > memory:
        return _TooLarge(job.mesh, lasting, place)
    now(f"planning {job.mesh}")
    try:
        _, record = yield from planned(job, loaded)
        return replace(row_of(PlannedRanks(record, job.mesh)), place=place)
    except ShardvizError as error:
        return Row(job.mesh, failed=error.message, place=place)


def _too_large(job: PlanJob, loaded: Loaded, large: Sequence[_TooLarge], place: int) -> Iterator[Row]:
    """Yield the rows that do not fit, smallest first.

    A mesh is planned, without a step, if it may need less than those before it. Of the others the bytes are those of
    the rank that was looked at: their other ranks may have more.
    """
    least = 0
    for number, one in enumerate(sorted(large, key=lambda one: (one.bytes, one.place))):
        row = Row(one.mesh, one.bytes, place=place + number)
        if not least or one.bytes < least:
            row = _without_step(replace(job, mesh=one.mesh, with_step=False), loaded, row)
            least = min(least, row.bytes) if least else row.bytes
        yield row


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
        answers = yield Request(tuple(wanted.values()), look)
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
