"""Which ranks are asked, and which each of them stands for.

The first rank and the last one are asked. Where both have the same tensors with the same layouts, and the oracle says
what the last one holds from what the first one does, one of them stands for all. Where parts are uneven, all corners
of the mesh are asked, which torch may not split as the oracle does. Otherwise the code tells ranks apart
along some axes: those along which the last position differs from the first, and along those every position is asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from msgspec import structs

from shardviz.dump.validate import layout_of, mesh_of
from shardviz.errors import ShardvizError
from shardviz.plan.ranks import PlannedPart

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardviz.dump.records import RankRecord
    from shardviz.layout.mesh import Mesh
    from shardviz.live.plan.asked import Reply

    Ask = Callable[[Sequence[int]], dict[int, Reply]]

MAX_CORNERS = 16
"""The most ranks to ask of those that are first or last along every axis."""

MAX_ASKED = 256
"""Ranks that are asked at most."""


@dataclass(frozen=True)
class Chosen:
    """The ranks that stand for all.

    Attributes:
        parts: Each rank's reply, with the positions along axes of the ranks that it stands for.
        asked: How many ranks were asked.
        axes: The axes along which the code tells ranks apart.
    """

    parts: tuple[tuple[Reply, dict[str, tuple[int, ...]]], ...]
    asked: int
    axes: tuple[str, ...]


def choose(mesh: Mesh, ask: Ask, stage_axes: Sequence[str] = ()) -> Chosen:
    """Ask as few ranks as it takes.

    Args:
        mesh: The mesh of the plan.
        ask: Asks ranks.
        stage_axes: Axes along which ranks are known to differ.

    Raises:
        ShardvizError: Too many ranks would have to be asked.
    """
    replies = ask([mesh.ranks[0], mesh.ranks[-1]])
    first = replies[mesh.ranks[0]]
    if _is_uneven(first.part.record):
        replies |= ask([rank for rank in _corners(mesh) if rank not in replies])
    if all(explains(first, reply, mesh) for reply in replies.values()):
        return Chosen(((first, {}),), len(replies), ())
    axes = _told_apart(mesh, ask, replies, stage_axes)
    chosen = _asked_along(mesh, axes, ask, replies)
    if _explain(chosen, replies, mesh):
        return chosen
    return _asked_along(mesh, tuple(axis for axis in mesh.axes if mesh.axis_size(axis) > 1), ask, replies)


def _explain(chosen: Chosen, replies: dict[int, Reply], mesh: Mesh) -> bool:
    """Whether all ranks that were asked have what is said of them."""
    stands = [(PlannedPart(structs.replace(reply.part, at=at), mesh), reply) for reply, at in chosen.parts]
    own = {rank: reply for part, reply in stands for rank in part.ranks if rank in replies}
    return all(explains(own[rank], reply, mesh) for rank, reply in replies.items())


def _asked_along(mesh: Mesh, axes: tuple[str, ...], ask: Ask, replies: dict[int, Reply]) -> Chosen:
    """Ask every position along some axes.

    Raises:
        ShardvizError: These are too many.
    """
    wanted = _along(mesh, axes)
    if len(wanted) > MAX_ASKED:
        sizes = " * ".join(f"{axis}({mesh.axis_size(axis)})" for axis in axes)
        raise ShardvizError(
            f"the code tells ranks apart along {sizes} = {len(wanted):,} positions, more than the {MAX_ASKED} that are "
            "asked",
            "plan a smaller mesh of the same axes",
        )
    replies |= ask([rank for rank in wanted if rank not in replies])
    parts = [(replies[rank], at) for rank, at in wanted.items()]
    return Chosen(tuple(_merged(parts, mesh)), len(replies), axes)


def _is_uneven(record: RankRecord) -> bool:
    """Whether a layout splits a dim into parts of different sizes, where torch and the oracle may not agree."""
    layouts = [layout_of(one, mesh_of(record.meshes[one.mesh])) for one in record.layouts]
    return any(
        size % prod(layout.mesh.axis_size(axis) for axis in layout.mesh.axes if axis in chain)
        for layout in layouts
        for size, chain in zip(layout.shape, layout.chains, strict=True)
    )


def _corners(mesh: Mesh) -> list[int]:
    """Return the ranks that are first or last along every axis, as long as they are few."""
    ways = list(product(*((0, size - 1)[: min(size, 2)] for size in mesh.shape)))
    return [mesh.rank_at(way) for way in ways[:MAX_CORNERS]]


def _told_apart(mesh: Mesh, ask: Ask, replies: dict[int, Reply], stage_axes: Sequence[str]) -> tuple[str, ...]:
    """Return the axes along which the last position is not what the first one explains; all, where none alone shows."""
    sizes = dict(zip(mesh.axes, mesh.shape, strict=True))
    at_end = {axis: _rank_at(mesh, {axis: size - 1}) for axis, size in sizes.items() if size > 1}
    replies |= ask([rank for axis, rank in at_end.items() if axis not in stage_axes and rank not in replies])
    first = replies[mesh.ranks[0]]
    found = [axis for axis, rank in at_end.items() if axis in stage_axes or not explains(first, replies[rank], mesh)]
    return tuple(found or at_end)


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
    """Let one rank stand for others that differ from it along one axis only, where it explains them."""
    found: list[tuple[Reply, dict[str, tuple[int, ...]]]] = []
    for reply, at in parts:
        for index, (other, there) in enumerate(found):
            axes = [axis for axis in at if at[axis] != there[axis]]
            if len(axes) == 1 and explains(other, reply, mesh):
                found[index] = other, {**there, axes[0]: (*there[axes[0]], *at[axes[0]])}
                break
        else:
            found.append((reply, at))
    return found


def explains(one: Reply, other: Reply, mesh: Mesh) -> bool:
    """Whether a rank's record is the one that the oracle makes for it out of another rank's."""
    made = PlannedPart(one.part, mesh).record(other.part.record.rank)
    return _comparable(made) == _comparable(other.part.record) and one.part.units == other.part.units


def _comparable(record: RankRecord) -> object:
    """Return what a record says, whatever the numbers of its bodies and layouts."""
    layouts = [(record.meshes[one.mesh], structs.replace(one, mesh=0)) for one in record.layouts]
    bodies = [
        (structs.replace(one, layout=None), None if one.layout is None else layouts[one.layout])
        for one in record.bodies
    ]
    tensors = {(one.name, one.numbers, one.suffix): bodies[one.body] for one in record.tensors}
    return tensors, record.tied, record.collectives, record.schedule, record.not_checked
