"""Which ranks are asked, and which each of them stands for.

The first rank and the last one are asked. If both have the same tensors with the same layouts, and the oracle says
what the last one holds from what the first one does, one of them stands for all. If parts are uneven along some axes,
the corners along these are asked, or the first 16: torch may not split as the oracle does. If the user's code reads
where its rank is along some axes, every position along those is asked, as long as they are few: one in the middle may
be special. Otherwise the code tells ranks apart along some axes: those along which the last position differs from the
first, and along those every position is asked.

A step takes ten times as long as the model. A rank is asked for one if code can tell it from the first: along axes
whose places it reads, or along which models differ. Any other rank is asked for its model alone.
"""

from __future__ import annotations

from itertools import islice, product
from operator import ge
from typing import TYPE_CHECKING

from msgspec import structs

from shardviz.dump.plan import PlannedPart, has_equal_parts, without_ranks
from shardviz.dump.records.files import PeakRecord, PlanPart, RankRecord, StepFails
from shardviz.dump.validate import layout_of, mesh_of
from shardviz.errors import ShardvizError
from shardviz.text import bytes_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from shardviz.layout.mesh import Mesh
    from shardviz.live.plan.rank import Reply

    Ask = Callable[[Sequence[int], Collection[int]], dict[int, Reply]]
    """Asks ranks, and some of them for a step."""

    Part = tuple[Reply, dict[str, tuple[int, ...]]]
    """A rank's reply, with the positions along axes of the ranks that it stands for."""

MAX_CORNERS = 16
"""The most ranks to ask of those that are first or last along the axes that split unevenly."""

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


class Replies:
    """The replies of the ranks that were asked, and which of them stand for all.

    Attributes:
        by_rank: What the ranks have.
        parts: The replies that stand for all ranks, each with the positions along axes of those that it stands for.
        axes: The axes along which the code tells ranks apart.
        failed: Why no step is planned; empty if one is.
        step_fails: Whether that is because the step fails, on real ranks too.
    """

    def __init__(self, mesh: Mesh, ask: Ask, failed: str) -> None:
        self.mesh = mesh
        self._ask = ask
        self.by_rank: dict[int, Reply] = {}
        self.parts: Sequence[Part] = ()
        self.axes: tuple[str, ...] = ()
        self.failed = failed
        self.step_fails: StepFails = "no"

    def ask(self, ranks: Iterable[int]) -> None:
        """Ask those ranks that were not asked before, or not for the step that they need.

        If one could not be stepped, none is asked for a step, and those that were stepped are asked without one.
        """
        needs_step = {rank: self._needs_step(rank) for rank in ranks}
        known = {rank for rank, reply in self.by_rank.items() if reply.was_asked_for_step or not needs_step.get(rank)}
        new_ranks = [rank for rank in needs_step if rank not in known]
        stepped = {rank for rank in new_ranks if needs_step[rank]}
        replies = self._ask(new_ranks, stepped)
        self.by_rank |= replies
        failed = [replies[rank] for rank in sorted(replies) if replies[rank].without_step]
        if failed and not self.failed:
            self.failed, self.step_fails = failed[0].without_step, failed[0].step_fails
        if self.failed and stepped:
            again = [
                rank for rank, reply in self.by_rank.items() if reply.was_asked_for_step and not reply.without_step
            ]
            self.by_rank |= self._ask(again, ())

    def _needs_step(self, rank: int) -> bool:
        """Whether a rank's step may differ from the first one's, as far as code and models tell."""
        coord, apart = self.mesh.coord_of(rank), {*self.reads, *self.axes}
        return not (self.failed or any(at for axis, at in zip(self.mesh.axes, coord, strict=True) if axis not in apart))

    @property
    def first(self) -> Reply:
        """What the first rank of the mesh has."""
        return self.by_rank[self.mesh.ranks[0]]

    def is_explained(self, rank: int) -> bool:
        """Whether a rank has what the oracle says from the first one's reply."""
        return explains(self.first, self.by_rank[rank], self.mesh)

    @property
    def reads(self) -> dict[str, str]:
        """The axes whose coordinate the user's code reads, in mesh order, with the lines that do."""
        lines = {axis: line for reply in self.by_rank.values() for axis, line in reply.reads.items()}
        return {axis: lines[axis] for axis in self.mesh.axes if axis in lines}

    def positions(self, ranks: Iterable[int]) -> list[tuple[int, ...]]:
        """Return where ranks are along these axes."""
        indices = [self.mesh.axis_index(axis) for axis in self.reads]
        return [tuple(self.mesh.coord_of(rank)[index] for index in indices) for rank in ranks]

    def stand_for(self) -> dict[int, Reply]:
        """Return by rank, of those that were asked, the reply that stands for it."""
        stands = [(PlannedPart(structs.replace(reply.plan_part, at=at), self.mesh), reply) for reply, at in self.parts]
        return {rank: reply for part, reply in stands for rank in part.ranks if rank in self.by_rank}

    def notes(self) -> Iterator[str]:
        """Note ranks that hold less than their stand-ins, and positions that were not asked."""
        differences = [
            (
                _in_step(stand_in.plan_part)[0] - _in_step(self.by_rank[rank].plan_part)[0],
                -rank,
                stand_in.plan_part.record.rank,
            )
            for rank, stand_in in self.stand_for().items()
            if self.by_rank[rank].plan_part.peak is not None
        ]
        less, rank, other_rank = max(differences, default=(0, 0, 0))
        if less:
            than = f"{bytes_text(less)} less than rank {other_rank}, which stands for it"
            yield f"at a step's fullest moment rank {-rank} holds {than}"
        num_positions, places = len({*self.positions(self.by_rank)}), self.mesh.size_over(self.reads)
        if num_positions < places:
            yield NOT_ALL.format(", ".join(self.reads), next(iter(self.reads.values())), num_positions, places)


def choose(
    mesh: Mesh, ask: Ask, stage_axes: Sequence[str] = (), *, without_step: str = "", needs_step: bool = False
) -> Replies:
    """Ask as few ranks as it takes; those along `stage_axes` are known to differ.

    No step is planned if it is said why. A plan that needs one goes no further if the step of the first rank fails.

    Raises:
        ShardvizError: Too many ranks would have to be asked.
    """
    replies = Replies(mesh, ask, without_step)
    replies.ask(mesh.ranks[:1])
    replies.parts = [(replies.first, {})]
    if needs_step and replies.step_fails != "no":
        return replies
    replies.ask([mesh.ranks[-1]])
    replies.ask(_corners(mesh, replies.first.plan_part.record))
    replies.ask(_ranks_by_reads(replies))
    if all(map(replies.is_explained, replies.by_rank)):
        return replies
    long_axes = mesh.long_axes
    told_apart = _unexplained_axes(replies, stage_axes)
    with_read = tuple(axis for axis in long_axes if axis in {*told_apart, *replies.reads})
    for axes in dict.fromkeys(filter(None, (told_apart, with_read, long_axes))):
        replies.axes = axes
        replies.parts = _ask_along(replies, axes)
        stand_for = replies.stand_for()
        if all(explains(stand_for[rank], reply, mesh) for rank, reply in replies.by_rank.items()):
            break
    return replies


def _ask_along(replies: Replies, axes: tuple[str, ...]) -> Sequence[Part]:
    """Ask every position along some axes."""
    positions_by_rank = _positions_along(replies.mesh, axes)
    if len(positions_by_rank) > MAX_ASKED:
        sizes = " * ".join(f"{axis}({replies.mesh.axis_size(axis)})" for axis in axes)
        raise ShardvizError(
            TOO_MANY.format(sizes, len(positions_by_rank), MAX_ASKED), "plan a smaller mesh of the same axes"
        )
    replies.ask(positions_by_rank)
    return _merge([(replies.by_rank[rank], at) for rank, at in positions_by_rank.items()], replies.mesh)


def _ranks_by_reads(replies: Replies) -> list[int]:
    """Return a rank for each position along the axes that user code reads; the last if too many."""
    mesh, reads = replies.mesh, replies.reads
    answering = [rank for rank, reply in replies.by_rank.items() if replies.failed or reply.was_asked_for_step]
    answered = {*replies.positions(answering)}
    ranks = list(_positions_along(mesh, tuple(reads)))
    if len(ranks) - len(answered) > min(
        MAX_READING, MAX_TENSORS // max(1, len(replies.first.plan_part.record.tensors))
    ):
        ranks = ranks[-1:]
    return [rank for rank, position in zip(ranks, replies.positions(ranks), strict=True) if position not in answered]


def _corners(mesh: Mesh, record: RankRecord) -> list[int]:
    """Return the ranks first or last along axes with uneven splits, first along the rest, up to a limit.

    On uneven splits torch and the oracle may disagree.
    """
    layouts = (layout_of(layout_record, mesh_of(record.meshes[layout_record.mesh])) for layout_record in record.layouts)
    uneven = {axis for layout in layouts if not has_equal_parts(layout) for axis in layout.split_axes}
    ends = (sorted({0, mesh.axis_size(axis) - 1}) if axis in uneven else [0] for axis in mesh.axes)
    return [mesh.rank_at(coord) for coord in islice(product(*ends), MAX_CORNERS)]


def _unexplained_axes(replies: Replies, stage_axes: Sequence[str]) -> tuple[str, ...]:
    """Return the axes along which the last position is not what the first one explains."""
    mesh = replies.mesh
    last = {axis: rank_along(mesh, axis, -1) for axis in mesh.long_axes}
    replies.ask(rank for axis, rank in last.items() if axis not in stage_axes)
    return tuple(axis for axis, rank in last.items() if axis in stage_axes or not replies.is_explained(rank))


def rank_along(mesh: Mesh, axis: str, at: int) -> int:
    """Return the rank at a position along an axis, counted from its end if negative, and first along the others."""
    return [*_positions_along(mesh, [axis])][at]


def _positions_along(mesh: Mesh, axes: Sequence[str]) -> dict[int, dict[str, tuple[int, ...]]]:
    """Return one rank for each position along some axes, with the position."""
    ranges = [range(size if axis in axes else 1) for axis, size in zip(mesh.axes, mesh.shape, strict=True)]
    return {mesh.rank_at(coord): {axis: (coord[mesh.axis_index(axis)],) for axis in axes} for coord in product(*ranges)}


def _merge(parts: Sequence[Part], mesh: Mesh) -> Sequence[Part]:
    """Merge ranks that differ along one axis only and hold the same: one stands for all."""
    merged: list[Part] = []
    for reply, at in parts:
        for index, (merged_reply, there) in enumerate(merged):
            axes = [axis for axis in at if at[axis] != there[axis]]
            if (
                len(axes) == 1
                and _in_step(merged_reply.plan_part) == _in_step(reply.plan_part)
                and explains(merged_reply, reply, mesh)
            ):
                merged[index] = merged_reply, {**there, axes[0]: (*there[axes[0]], *at[axes[0]])}
                break
        else:
            merged.append((reply, at))
    return merged


def explains(reply: Reply, reference: Reply, mesh: Mesh) -> bool:
    """Whether a rank's record is the one that the oracle makes for it out of another rank's.

    A step is compared if both were asked for one: a rank stands for others that hold as much in it, or less.
    """
    record = PlannedPart(reply.plan_part, mesh).record(reference.plan_part.record.rank)
    planned = structs.replace(reply.plan_part, record=record)
    stepped = reply.was_asked_for_step and reference.was_asked_for_step
    same = _comparable(planned, stepped=stepped) == _comparable(reference.plan_part, stepped=stepped)
    return same and (not stepped or all(map(ge, _in_step(reply.plan_part), _in_step(reference.plan_part))))


def _in_step(plan_part: PlanPart) -> tuple[int, int]:
    """Return a step's bytes at its fullest moment, and those saved for backward."""
    peak = plan_part.peak or PeakRecord()
    return peak.activations + peak.gathered, sum(state.bytes for state in plan_part.saved)


def _comparable(plan_part: PlanPart, *, stepped: bool) -> object:
    """Return what a rank has, whatever the numbers of its bodies and layouts."""
    record = plan_part.record
    layouts = [
        (record.meshes[layout_record.mesh], structs.replace(layout_record, mesh=0)) for layout_record in record.layouts
    ]
    bodies = [
        (structs.replace(body, layout=None), None if body.layout is None else layouts[body.layout])
        for body in record.bodies
    ]
    named = [(tensor, bodies[tensor.body]) for tensor in record.tensors]
    tensors = {
        (tensor.name, tensor.numbers, tensor.suffix): body
        for tensor, body in named
        if stepped or body[0].moment != "step"
    }
    step = (without_ranks(record.collectives), record.schedule) if stepped else ()
    return tensors, record.tied, record.not_checked, step, plan_part.units, plan_part.buckets
