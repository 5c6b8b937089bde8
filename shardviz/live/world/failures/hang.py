"""The error of a world that hangs: ranks that still run, their lines and collectives."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from shardviz.live.world.failures import output, stacks
from shardviz.live.world.failures.failure import RankFailedError, name_rank
from shardviz.live.world.protocol import WHERE
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardviz.live.world.starting import Member

HINT = (
    "a collective that not every rank of its group calls, or not in the same order, waits forever: "
    "look for one under a condition on the rank"
)


def explain(members: Sequence[Member], seconds: float, coords: Sequence[str], folder: Path) -> RankFailedError:
    """Return the error for a world in which some ranks are still running after `seconds`."""
    late = [member for member in members if member.outcome is None]
    places = _group(late, _ask(late, coords, folder))
    first = late[0]
    finished = [member.rank for member in members if member.outcome is not None]
    waits = any(place.startswith("waiting") for place, _ in places)
    return RankFailedError(
        _summary(late, places, seconds, coords),
        hint=HINT if waits else "allow more time (timeout), or see in the stacks where the time goes",
        rank=first.rank,
        coord=coords[first.rank] if first.rank < len(coords) else "",
        traceback_text="\n".join(
            "\n".join([f"{named_ranks(ranks)}: {place}", *map(str, stack)]) for (place, stack), ranks in places.items()
        ),
        output=output.read(folder, first.rank),
        others=f"{named_ranks(finished)} had finished" if finished else "",
    )


def places_text(members: Sequence[Member], coords: Sequence[str], folder: Path) -> str:
    """Say where the ranks are that are still running, one line per place."""
    late = [member for member in members if member.outcome is None]
    by_place: dict[str, list[int]] = {}
    for (place, _), ranks in _group(late, _ask(late, coords, folder)).items():
        by_place.setdefault(place, []).extend(ranks)
    return "\n".join(f"{named_ranks(ranks)}: {place}" for place, ranks in by_place.items())


Place = tuple[str, stacks.Stack]
"""Where a rank is, in a few words, and its stack."""


def _ask(late: Sequence[Member], coords: Sequence[str], folder: Path) -> dict[int, Place]:
    """Return where each rank is."""
    running = {member.rank: member for member in late if member.thread is not None}
    answers = stacks.ask(folder, {rank: member.process.pid for rank, member in running.items() if member.process.pid})
    for member in running.values():  # only now: a thread that runs while its stack is read by signal can crash the rank
        with suppress(OSError):
            member.line.send_bytes(WHERE)
    groups = stacks.read_groups(folder, running)
    by_rank = {}
    for member in late:
        stack = answers.get(member.rank, {}).get(member.thread or 0, ())
        axes = stacks.axes_text(groups.get(member.rank, ()), coords)
        by_rank[member.rank] = _place(member, stack, axes), stack
    return by_rank


def _group(late: Sequence[Member], by_rank: dict[int, Place]) -> dict[Place, list[int]]:
    places: dict[Place, list[int]] = {}
    for member in late:
        place, stack = by_rank[member.rank]
        places.setdefault((place, stacks.user_frames(stack)), []).append(member.rank)
    return places


def _place(member: Member, stack: stacks.Stack, axes: str) -> str:
    if not member.ready:
        return "still starting"
    if not stack:
        return "not answering"
    place = stacks.waiting_in(stack)
    return f"{place} {axes}" if axes and place.startswith("waiting") else place


def _summary(
    late: Sequence[Member],
    places: dict[Place, list[int]],
    seconds: float,
    coords: Sequence[str],
) -> str:
    who = name_rank(late[0].rank, coords) if len(late) == 1 else named_ranks([member.rank for member in late])
    where = "; ".join(
        place if len(places) == 1 else f"{named_ranks(ranks)} {place}" for (place, _), ranks in places.items()
    )
    return f"{who} did not finish in {seconds:g} s: {where}"
