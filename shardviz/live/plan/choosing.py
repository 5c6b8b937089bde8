"""Which ranks are asked, and which each of them stands for.

The first rank and the last one are asked. If both have the same tensors with the same layouts, and the oracle says
what the last one holds from what the first one does, one of them stands for all. If parts are uneven, all corners of
the mesh are asked, or the first 16, without a step: torch may not split as the oracle does. If the user's code reads
where its rank is along some axes, every position along those is asked, as long as they are few: one in the middle may
be special. Otherwise the code tells ranks apart along some axes: those along which the last position differs from the
first, and along those every position is asked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from operator import ge
from typing import TYPE_CHECKING

from msgspec import structs

from shardviz.dump.planned.ranks import PlannedPart, has_equal_parts, without_ranks
from shardviz.dump.records.plan import PeakRecord
from shardviz.dump.validate import layout_of, mesh_of
from shardviz.errors import ShardvizError
from shardviz.text import bytes_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from shardviz.dump.records.files import RankRecord
    from shardviz.dump.records.plan import PlanPart, StepFails
    from shardviz.layout.mesh import Mesh
    from shardviz.live.plan.rank import Reply

    Ask = Callable[[Sequence[int], bool], dict[int, Reply]]
    """Asks ranks, with a step or without one."""

    Part = tuple[Reply, dict[str, tuple[int, ...]]]
    """A rank's reply, with the positions along axes of the ranks that it stands for."""

MAX_CORNERS = 16
"""The most ranks to ask of those that are first or last along every axis."""

MAX_ASKED = 256
"""Ranks that are asked at most."""

MAX_READING = 32
"""Positions that are asked at most because the user's code reads which of them is its own."""

MAX_TENSORS = 4096
"""Tensors that these positions may have, all together: 2 ms each, measured."""

TOO_MANY = "the code tells ranks apart along {} = {:,} positions, more than the {} that are asked"

NOT_ALL = (
    "the code reads its place along {}{}: {} of these {:,} places were asked, and one in the middle that does "
    "something else is planned as if it did not"
)


@dataclass(frozen=True)
class Chosen:
    """The ranks that stand for all.

    Attributes:
        parts: Each rank's reply, with the positions along axes of the ranks that it stands for.
        num_asked: How many ranks were asked.
        axes: The axes along which the code tells ranks apart.
        failed: Why no step was planned, though ranks were asked for one; empty if one was.
        step_fails: Whether that is because the step fails, on real ranks too.
        notes: What the parts do not say of ranks that were asked, a sentence each.
    """

    parts: Sequence[Part]
    num_asked: int
    axes: tuple[str, ...]
    failed: str = ""
    step_fails: StepFails = "no"
    notes: tuple[str, ...] = ()


class _Replies:
    """The replies of the ranks that were asked.

    Attributes:
        mesh: The mesh of the plan.
        by_rank: What they have, by rank.
        failed: Why a rank could not be stepped; empty if all could that were asked for it.
        step_fails: Whether that is because its step fails, on real ranks too.
    """

    def __init__(self, mesh: Mesh, ask: Ask) -> None:
        self.mesh = mesh
        self._ask = ask
        self.by_rank: dict[int, Reply] = {}
        self.failed = ""
        self.step_fails: StepFails = "no"

    def ask(self, ranks: Iterable[int], *, with_step: bool = True) -> None:
        """Ask those ranks that were not asked before, or not for a step.

        If one could not be stepped, none is asked for a step, and those that were stepped are asked without one.
        """
        with_step = with_step and not self.failed
        known = {rank for rank, reply in self.by_rank.items() if reply.was_asked_for_step or not with_step}
        replies = self._ask([rank for rank in ranks if rank not in known], with_step)
        self.by_rank |= replies
        failed = [replies[rank] for rank in sorted(replies) if replies[rank].without_step]
        if failed and not self.failed:
            self.failed, self.step_fails = failed[0].without_step, failed[0].step_fails
        if self.failed and with_step:
            stepped = [rank for rank, one in self.by_rank.items() if one.was_asked_for_step and not one.without_step]
            self.by_rank |= self._ask(stepped, False)

    @property
    def first(self) -> Reply:
        """What the first rank of the mesh has."""
        return self.by_rank[self.mesh.ranks[0]]

    def is_explained(self, rank: int) -> bool:
        """Whether a rank has what the oracle says from the first one's reply."""
        return explains(self.first, self.by_rank[rank], self.mesh)

    @property
    def reads(self) -> dict[str, str]:
        """The axes along which the user's code reads where its rank is, in the mesh's order, and the lines that do."""
        lines = {axis: line for reply in self.by_rank.values() for axis, line in reply.reads.items()}
        return {axis: lines[axis] for axis in self.mesh.axes if axis in lines}

    def position(self, rank: int) -> tuple[int, ...]:
        """Return where a rank is along the axes that the user's code reads."""
        coord = self.mesh.coord_of(rank)
        return tuple(coord[self.mesh.axis_index(axis)] for axis in self.reads)

    @property
    def num_missing(self) -> int:
        """How many positions along these axes no rank was asked at."""
        positions = math.prod(map(self.mesh.axis_size, self.reads))
        return positions - len(set(map(self.position, self.by_rank)))


def choose(mesh: Mesh, ask: Ask, stage_axes: Sequence[str] = ()) -> Chosen:
    """Ask as few ranks as it takes.

    Args:
        mesh: The mesh of the plan.
        ask: Asks ranks, with a step or without one.
        stage_axes: Axes along which ranks are known to differ.

    Raises:
        ShardvizError: Too many ranks would have to be asked.
    """
    replies = _Replies(mesh, ask)
    parts, axes = _parts(replies, stage_axes)
    notes = (*_held_less(parts, replies), *_not_asked(replies))
    return Chosen(parts, len(replies.by_rank), axes, replies.failed, replies.step_fails, notes)


def _parts(replies: _Replies, stage_axes: Sequence[str]) -> tuple[Sequence[Part], tuple[str, ...]]:
    """Return the ranks that stand for all, and the axes along which the code tells ranks apart."""
    mesh = replies.mesh
    replies.ask([mesh.ranks[0], mesh.ranks[-1]])
    if _is_uneven(replies.first.part.record):
        replies.ask(_corners(mesh), with_step=False)
    replies.ask(_where_read(replies))
    if all(map(replies.is_explained, replies.by_rank)):
        return [(replies.first, {})], ()
    long_axes = tuple(axis for axis in mesh.axes if mesh.axis_size(axis) > 1)
    told_apart = _told_apart(replies, stage_axes)
    with_read = tuple(axis for axis in long_axes if axis in {*told_apart, *replies.reads})
    for axes in dict.fromkeys(filter(None, (told_apart, with_read, long_axes))):
        parts = _asked_along(replies, axes)
        own = _stand_for(parts, replies)
        if axes == long_axes or all(explains(own[rank], one, mesh) for rank, one in replies.by_rank.items()):
            break
    return parts, axes


def _stand_for(parts: Sequence[Part], replies: _Replies) -> dict[int, Reply]:
    """Return by rank, of those that were asked, the reply that stands for it."""
    stands = [(PlannedPart(structs.replace(reply.part, at=at), replies.mesh), reply) for reply, at in parts]
    return {rank: reply for part, reply in stands for rank in part.ranks if rank in replies.by_rank}


def _held_less(parts: Sequence[Part], replies: _Replies) -> Iterator[str]:
    """Note a rank that holds less in a step than the one that stands for it."""
    differences = [
        (_in_step(one.part)[0] - _in_step(replies.by_rank[rank].part)[0], -rank, one.part.record.rank)
        for rank, one in _stand_for(parts, replies).items()
        if replies.by_rank[rank].part.peak is not None
    ]
    less, rank, other = max(differences, default=(0, 0, 0))
    if less:
        than = f"{bytes_text(less)} less than rank {other}, which stands for it"
        yield f"at a step's fullest moment rank {-rank} holds {than}"


def _not_asked(replies: _Replies) -> Iterator[str]:
    """Note that the code reads its place, and that not all places were asked."""
    if missing := replies.num_missing:
        known = len(set(map(replies.position, replies.by_rank)))
        line = next(iter(replies.reads.values()))
        yield NOT_ALL.format(", ".join(replies.reads), line, known, known + missing)


def _asked_along(replies: _Replies, axes: tuple[str, ...]) -> Sequence[Part]:
    """Ask every position along some axes."""
    wanted = _along(replies.mesh, axes)
    if len(wanted) > MAX_ASKED:
        sizes = " * ".join(f"{axis}({replies.mesh.axis_size(axis)})" for axis in axes)
        raise ShardvizError(TOO_MANY.format(sizes, len(wanted), MAX_ASKED), "plan a smaller mesh of the same axes")
    replies.ask(wanted)
    return _merged([(replies.by_rank[rank], at) for rank, at in wanted.items()], replies.mesh)


def _is_uneven(record: RankRecord) -> bool:
    """Whether a layout splits a dim into parts of different sizes: torch and the oracle may not agree there."""
    return not all(has_equal_parts(layout_of(one, mesh_of(record.meshes[one.mesh]))) for one in record.layouts)


def _where_read(replies: _Replies) -> list[int]:
    """Return a rank for each position along the axes that the user's code reads, unless these are too many."""
    tensors = max(1, len(replies.first.part.record.tensors))
    if replies.num_missing > min(MAX_READING, MAX_TENSORS // tensors):
        return []
    known = set(map(replies.position, replies.by_rank))
    return [rank for rank in _along(replies.mesh, tuple(replies.reads)) if replies.position(rank) not in known]


def _corners(mesh: Mesh) -> list[int]:
    """Return the ranks that are first or last along every axis, as long as they are few."""
    ways = list(product(*((0, size - 1)[: min(size, 2)] for size in mesh.shape)))
    return [mesh.rank_at(way) for way in ways[:MAX_CORNERS]]


def _told_apart(replies: _Replies, stage_axes: Sequence[str]) -> tuple[str, ...]:
    """Return the axes along which the last position is not what the first one explains."""
    sizes = dict(zip(replies.mesh.axes, replies.mesh.shape, strict=True))
    at_end = {axis: _rank_at(replies.mesh, {axis: size - 1}) for axis, size in sizes.items() if size > 1}
    replies.ask(rank for axis, rank in at_end.items() if axis not in stage_axes)
    return tuple(axis for axis, rank in at_end.items() if axis in stage_axes or not replies.is_explained(rank))


def _rank_at(mesh: Mesh, at: dict[str, int]) -> int:
    return mesh.rank_at(tuple(at.get(axis, 0) for axis in mesh.axes))


def _along(mesh: Mesh, axes: Sequence[str]) -> dict[int, dict[str, tuple[int, ...]]]:
    """Return one rank for each position along some axes, with the position."""
    ways = product(*(range(mesh.axis_size(axis)) for axis in axes))
    places = [dict(zip(axes, way, strict=True)) for way in ways]
    return {_rank_at(mesh, at): {axis: (position,) for axis, position in at.items()} for at in places}


def _merged(parts: Sequence[Part], mesh: Mesh) -> Sequence[Part]:
    """Let one rank stand for others that differ from it along one axis only, if it has and holds what they do."""
    merged: list[Part] = []
    for reply, at in parts:
        for index, (other, there) in enumerate(merged):
            axes = [axis for axis in at if at[axis] != there[axis]]
            if len(axes) == 1 and _in_step(other.part) == _in_step(reply.part) and explains(other, reply, mesh):
                merged[index] = other, {**there, axes[0]: (*there[axes[0]], *at[axes[0]])}
                break
        else:
            merged.append((reply, at))
    return merged


def explains(one: Reply, other: Reply, mesh: Mesh) -> bool:
    """Whether a rank's record is the one that the oracle makes for it out of another rank's.

    A step is compared if both were asked for one: a rank stands for others that hold as much in it, or less.
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
    named = [(one, bodies[one.body]) for one in record.tensors]
    tensors = {(one.name, one.numbers, one.suffix): body for one, body in named if stepped or body[0].moment != "step"}
    step = (without_ranks(record.collectives), record.schedule) if stepped else ()
    return tensors, record.tied, record.not_checked, step
