"""Which ranks are asked, and which each of them stands for.

The first rank and the last one are asked. Where both have the same tensors with the same layouts, and the oracle says
what the last one holds from what the first one does, one of them stands for all. Where parts are uneven, all corners of
the mesh are asked, or the first 16, without a step: torch may not split as the oracle does. Where the user's code reads
where its rank is along some axes, every position along those is asked, as long as they are few: one in the middle may
be special. Otherwise the code tells ranks apart along some axes: those along which the last position differs from the
first, and along those every position is asked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from operator import ge
from typing import TYPE_CHECKING

from msgspec import structs

from shardviz.dump.planned.ranks import PlannedPart, has_equal_parts, without_ranks
from shardviz.dump.records.plan import PeakRecord
from shardviz.dump.validate import layout_of, mesh_of
from shardviz.errors import ShardvizError
from shardviz.live.plan.reads import Reading
from shardviz.text import bytes_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from shardviz.dump.records.files import RankRecord
    from shardviz.dump.records.plan import PlanPart, StepFails
    from shardviz.layout.mesh import Mesh
    from shardviz.live.plan.asked import Reply
    from shardviz.live.plan.asking import Program

    Ask = Callable[[Sequence[int], bool], Program[dict[int, Reply]]]
    """Asks ranks, with a step or without one."""

MAX_CORNERS = 16
"""The most ranks to ask of those that are first or last along every axis."""

MAX_ASKED = 256
"""Ranks that are asked at most."""

MAX_READING = 32
"""Positions that are asked at most because the user's code reads which of them is its own."""

MAX_TENSORS = 4096
"""Tensors that these positions may have, all together: 2 ms each, measured."""


@dataclass(frozen=True)
class Chosen:
    """The ranks that stand for all.

    Attributes:
        parts: Each rank's reply, with the positions along axes of the ranks that it stands for.
        num_asked: How many ranks were asked.
        axes: The axes along which the code tells ranks apart.
        failed: Why no step was planned, though ranks were asked for one; empty where one was.
        step_fails: Whether that is because the step fails, on real ranks too.
        notes: What the parts do not say of ranks that were asked, a sentence each.
    """

    parts: tuple[tuple[Reply, dict[str, tuple[int, ...]]], ...]
    num_asked: int
    axes: tuple[str, ...]
    failed: str = ""
    step_fails: StepFails = "no"
    notes: tuple[str, ...] = ()


class _Replies:
    """The replies of the ranks that were asked.

    Args:
        mesh: The mesh of the plan.
        ask: Asks ranks, with a step or without one.

    Attributes:
        by_rank: What they have, by rank.
        mesh: The mesh of the plan.
        failed: Why a rank could not be stepped; empty where all could that were asked for it.
        step_fails: Whether that is because its step fails, on real ranks too.
    """

    def __init__(self, mesh: Mesh, ask: Ask) -> None:
        self.mesh = mesh
        self._ask = ask
        self.by_rank: dict[int, Reply] = {}
        self.failed = ""
        self.step_fails: StepFails = "no"

    def ask(self, ranks: Iterable[int], *, with_step: bool = True) -> Program[None]:
        """Ask those ranks that were not asked before, or not for a step.

        Where one could not be stepped, none is asked for a step, and those that were stepped are asked without one.
        """
        with_step = with_step and not self.failed
        known = {rank for rank, reply in self.by_rank.items() if reply.was_asked_for_step or not with_step}
        found = yield from self._ask([rank for rank in ranks if rank not in known], with_step)
        self.by_rank |= found
        failed = [found[rank] for rank in sorted(found) if found[rank].without_step]
        if failed and not self.failed:
            self.failed, self.step_fails = failed[0].without_step, failed[0].step_fails
        if self.failed and with_step:
            stepped = [rank for rank, one in self.by_rank.items() if one.was_asked_for_step and not one.without_step]
            self.by_rank |= yield from self._ask(stepped, False)

    @property
    def reading(self) -> Reading:
        """What the user's code reads of its place, on the ranks that were asked."""
        reads = {axis: line for reply in self.by_rank.values() for axis, line in reply.reads.items()}
        return Reading(self.mesh, reads, self.by_rank)

    @property
    def first(self) -> Reply:
        """What the first rank of the mesh has."""
        return self.by_rank[self.mesh.ranks[0]]

    def is_explained(self, rank: int) -> bool:
        """Whether a rank has what the oracle says from the first one's reply."""
        return explains(self.first, self.by_rank[rank], self.mesh)


def choose(mesh: Mesh, ask: Ask, stage_axes: Sequence[str] = ()) -> Program[Chosen]:
    """Ask as few ranks as it takes.

    Args:
        mesh: The mesh of the plan.
        ask: Asks ranks, with a step or without one.
        stage_axes: Axes along which ranks are known to differ.

    Raises:
        ShardvizError: Too many ranks would have to be asked.
    """
    replies = _Replies(mesh, ask)
    chosen = yield from _chosen(replies, stage_axes)
    return replace(
        chosen,
        num_asked=len(replies.by_rank),
        failed=replies.failed,
        step_fails=replies.step_fails,
        notes=(*_held_less(chosen, replies), *replies.reading.said),
    )


def _chosen(replies: _Replies, stage_axes: Sequence[str]) -> Program[Chosen]:
    mesh = replies.mesh
    yield from replies.ask([mesh.ranks[0], mesh.ranks[-1]])
    if _is_uneven(replies.first.part.record):
        yield from replies.ask(_corners(mesh), with_step=False)
    yield from replies.ask(_where_read(replies))
    if all(map(replies.is_explained, replies.by_rank)):
        return Chosen(((replies.first, {}),), len(replies.by_rank), ())
    told_apart = yield from _told_apart(replies, stage_axes)
    apart_or_read = {*told_apart, *replies.reading.axes}
    with_read = tuple(axis for axis in mesh.axes if axis in apart_or_read and mesh.axis_size(axis) > 1)
    for axes in dict.fromkeys(axes for axes in (told_apart, with_read) if axes):
        chosen = yield from _asked_along(replies, axes)
        if _explain(chosen, replies):
            return chosen
    return (yield from _asked_along(replies, tuple(axis for axis in mesh.axes if mesh.axis_size(axis) > 1)))


def _explain(chosen: Chosen, replies: _Replies) -> bool:
    """Whether all ranks that were asked have what the oracle says."""
    own = _stand_for(chosen, replies)
    return all(explains(own[rank], reply, replies.mesh) for rank, reply in replies.by_rank.items())


def _stand_for(chosen: Chosen, replies: _Replies) -> dict[int, Reply]:
    """Return by rank, of those that were asked, the reply that stands for it."""
    stands = [(PlannedPart(structs.replace(reply.part, at=at), replies.mesh), reply) for reply, at in chosen.parts]
    return {rank: reply for part, reply in stands for rank in part.ranks if rank in replies.by_rank}


def _held_less(chosen: Chosen, replies: _Replies) -> Iterator[str]:
    """Say it where a rank holds less in a step than the one that stands for it."""
    found = [
        (_in_step(one.part)[0] - _in_step(replies.by_rank[rank].part)[0], -rank, one.part.record.rank)
        for rank, one in _stand_for(chosen, replies).items()
        if replies.by_rank[rank].part.peak is not None
    ]
    less, rank, other = max(found, default=(0, 0, 0))
    if less:
        beside = f"{bytes_text(less)} less than rank {other}, which stands for it"
        yield f"at a step's fullest moment rank {-rank} holds {beside}"


def _asked_along(replies: _Replies, axes: tuple[str, ...]) -> Program[Chosen]:
    """Ask every position along some axes.

    Raises:
        ShardvizError: These are too many.
    """
    wanted = _along(replies.mesh, axes)
    if len(wanted) > MAX_ASKED:
        sizes = " * ".join(f"{axis}({replies.mesh.axis_size(axis)})" for axis in axes)
        raise ShardvizError(
            f"the code tells ranks apart along {sizes} = {len(wanted):,} positions, more than the {MAX_ASKED} that are "
            "asked",
            "plan a smaller mesh of the same axes",
        )
    yield from replies.ask(wanted)
    parts = [(replies.by_rank[rank], at) for rank, at in wanted.items()]
    return Chosen(tuple(_merged(parts, replies.mesh)), len(replies.by_rank), axes)


def _is_uneven(record: RankRecord) -> bool:
    """Whether a layout splits a dim into parts of different sizes, where torch and the oracle may not agree."""
    layouts = [layout_of(one, mesh_of(record.meshes[one.mesh])) for one in record.layouts]
    return not all(map(has_equal_parts, layouts))


def _where_read(replies: _Replies) -> list[int]:
    """Return a rank for each position along the axes that the user's code reads, unless these are too many."""
    mesh, reading = replies.mesh, replies.reading
    tensors = max(1, len(replies.first.part.record.tensors))
    if reading.missing > min(MAX_READING, MAX_TENSORS // tensors):
        return []
    return [rank for rank in _along(mesh, reading.axes) if reading.position(rank) not in reading.known]


def _corners(mesh: Mesh) -> list[int]:
    """Return the ranks that are first or last along every axis, as long as they are few."""
    ways = list(product(*((0, size - 1)[: min(size, 2)] for size in mesh.shape)))
    return [mesh.rank_at(way) for way in ways[:MAX_CORNERS]]


def _told_apart(replies: _Replies, stage_axes: Sequence[str]) -> Program[tuple[str, ...]]:
    """Return the axes along which the last position is not what the first one explains."""
    sizes = dict(zip(replies.mesh.axes, replies.mesh.shape, strict=True))
    at_end = {axis: _rank_at(replies.mesh, {axis: size - 1}) for axis, size in sizes.items() if size > 1}
    yield from replies.ask(rank for axis, rank in at_end.items() if axis not in stage_axes)
    return tuple(axis for axis, rank in at_end.items() if axis in stage_axes or not replies.is_explained(rank))


def _rank_at(mesh: Mesh, at: dict[str, int]) -> int:
    return mesh.rank_at(tuple(at.get(axis, 0) for axis in mesh.axes))


def _along(mesh: Mesh, axes: Sequence[str]) -> dict[int, dict[str, tuple[int, ...]]]:
    """Return one rank for each position along some axes, with the position."""
    ways = product(*(range(mesh.axis_size(axis)) for axis in axes))
    places = [dict(zip(axes, way, strict=True)) for way in ways]
    return {_rank_at(mesh, at): {axis: (position,) for axis, position in at.items()} for at in places}


def _merged(
    parts: list[tuple[Reply, dict[str, tuple[int, ...]]]], mesh: Mesh
) -> list[tuple[Reply, dict[str, tuple[int, ...]]]]:
    """Let one rank stand for others that differ from it along one axis only, where it has and holds what they do."""
    found: list[tuple[Reply, dict[str, tuple[int, ...]]]] = []
    for reply, at in parts:
        for index, (other, there) in enumerate(found):
            axes = [axis for axis in at if at[axis] != there[axis]]
            if len(axes) == 1 and _in_step(other.part) == _in_step(reply.part) and explains(other, reply, mesh):
                found[index] = other, {**there, axes[0]: (*there[axes[0]], *at[axes[0]])}
                break
        else:
            found.append((reply, at))
    return found


def explains(one: Reply, other: Reply, mesh: Mesh) -> bool:
    """Whether a rank's record is the one that the oracle makes for it out of another rank's.

    A step is compared where both were asked for one: a rank stands for others that hold as much in it, or less.
    """
    made = PlannedPart(one.part, mesh).record(other.part.record.rank)
    stepped = one.was_asked_for_step and other.was_asked_for_step
    same = _comparable(made, stepped=stepped) == _comparable(other.part.record, stepped=stepped)
    same = same and (one.part.units, one.part.buckets) == (other.part.units, other.part.buckets)
    return same and (not stepped or all(map(ge, _in_step(one.part), _in_step(other.part))))


def _in_step(part: PlanPart) -> tuple[int, int]:
    """Return the bytes that a step holds at its fullest moment, and those that wait for its backward."""
    peak = part.peak or PeakRecord()
    return peak.activations + peak.gathered, sum(one.bytes for one in part.saved)


def _comparable(record: RankRecord, *, stepped: bool) -> object:
    """Return what a record says, whatever the numbers of its bodies and layouts."""
    layouts = [(record.meshes[one.mesh], structs.replace(one, mesh=0)) for one in record.layouts]
    bodies = [
        (structs.replace(one, layout=None), None if one.layout is None else layouts[one.layout])
        for one in record.bodies
    ]
    found = [(one, bodies[one.body]) for one in record.tensors]
    tensors = {(one.name, one.numbers, one.suffix): body for one, body in found if stepped or body[0].moment != "step"}
    step = (without_ranks(record.collectives), record.schedule) if stepped else ()
    return tensors, record.tied, record.not_checked, step
