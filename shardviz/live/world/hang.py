"""A world that does not finish, told as one error: who is still running, where, and in which collective."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.live.world import output, stacks
from shardviz.live.world.failure import RankFailedError, join_numbers, name_rank

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardviz.live.world.starting import Member

HINT = (
    "a collective that not every rank of its group calls, or not in the same order, waits for ever: "
    "look for one under a condition on the rank"
)


def explain(members: Sequence[Member], seconds: float, coords: Sequence[str], folder: Path) -> RankFailedError:
    """The error for a world in which some ranks are still running after `seconds`."""
    late = [member for member in members if member.outcome is None]
    places = _group(late, _ask(late, folder))
    first = late[0]
    finished = [member.rank for member in members if member.outcome is not None]
    waits = any(place.startswith("waiting") for place, _ in places)
    return RankFailedError(
        _summary(late, places, seconds, coords),
        hint=HINT if waits else "allow more time (timeout), or look at the stacks for what takes it",
        rank=first.rank,
        coord=coords[first.rank] if first.rank < len(coords) else "",
        traceback_text="\n".join(_tell(place, stack, ranks) for (place, stack), ranks in places.items()),
        output=output.read(folder, first.rank),
        others=f"{_ranks(finished)} had finished" if finished else "",
    )


def tell_places(members: Sequence[Member], folder: Path) -> str:
    """Say where the ranks are that are still running, a line a place."""
    late = [member for member in members if member.outcome is None]
    places: dict[str, list[int]] = {}
    for (place, _), ranks in _group(late, _ask(late, folder)).items():
        places.setdefault(place, []).extend(ranks)
    return "\n".join(f"{_ranks(ranks)}: {place}" for place, ranks in places.items())


def _ask(late: Sequence[Member], folder: Path) -> dict[int, stacks.Stack]:
    """The stack of each rank's own thread; ranks that share a process registered by the first of them."""
    homes = {member.process.pid: member.home for member in late if member.thread is not None}
    answers = stacks.ask(folder, {rank: pid for pid, rank in homes.items() if pid is not None})
    return {
        member.rank: answers.get(member.home, {}).get(member.thread, ()) for member in late if member.thread is not None
    }


def _group(late: Sequence[Member], found: dict[int, stacks.Stack]) -> dict[tuple[str, stacks.Stack], list[int]]:
    places: dict[tuple[str, stacks.Stack], list[int]] = {}
    for member in late:
        stack = found.get(member.rank, ())
        key = _place(member, stack), stacks.user_frames(stack)
        places.setdefault(key, []).append(member.rank)
    return places


def _place(member: Member, stack: stacks.Stack) -> str:
    if not member.ready:
        return "still starting"
    return stacks.waiting_in(stack) if stack else "not answering"


def _summary(
    late: Sequence[Member],
    places: dict[tuple[str, stacks.Stack], list[int]],
    seconds: float,
    coords: Sequence[str],
) -> str:
    who = name_rank(late[0].rank, coords) if len(late) == 1 else _ranks([member.rank for member in late])
    where = "; ".join(place if len(places) == 1 else f"{_ranks(ranks)} {place}" for (place, _), ranks in places.items())
    return f"{who} did not finish in {seconds:g} s: {where}"


def _tell(place: str, stack: stacks.Stack, ranks: list[int]) -> str:
    return "\n".join([f"{_ranks(ranks)}: {place}", *map(str, stack)])


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {join_numbers(ranks)}"
